"""PyTorch's own samples, reference and error inputs of the losses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests.conformance import ledger
from tests.conformance.compare import LOSSES, Call, compare, dtypes, evaluate, losses, patterns

OPINFOS = {op.name.removeprefix("nn.functional."): op for op in op_db if not op.variant_test_name}


def bind(loss: str, sample: SampleInput) -> Call:
    return Call.bind(loss, sample.input, *sample.args, **sample.kwargs)


def calls(loss: str, dtype: torch.dtype, device: str) -> Iterator[Call]:
    """Sample and reference inputs, each as it is and with gaps between its elements."""
    op: OpInfo = OPINFOS[loss]
    # reference_inputs are the sample inputs, and for some ops more of them.
    for sample in op.reference_inputs(device, dtype, requires_grad=False):
        yield bind(loss, sample)
        yield bind(loss, sample.noncontiguous())


def test_there_are_samples():
    assert set(LOSSES) <= set(OPINFOS)


@pytest.mark.sampled(2)
@losses
@dtypes
def test_gradients(loss, dtype, device):
    ran = 0
    for call in calls(loss, dtype, device):
        for requires in patterns(call):
            compare(call, requires)
            ran += 1
    assert ran > 20


@losses
@dtypes
@pytest.mark.slow
def test_double_backward(loss, dtype, device):
    ran = 0
    for call in calls(loss, dtype, device):
        for requires in patterns(call):
            if requires:
                compare(call, requires, second=True)
                ran += 1
    assert ran > 10


@losses
def test_errors(loss, device):
    op: OpInfo = OPINFOS[loss]
    if op.error_inputs_func is None:
        pytest.skip(reason=f"PyTorch has no error inputs for {loss}")
    for error in op.error_inputs(device):
        call = bind(loss, error.sample_input)
        with pytest.raises(error.error_type):
            call.theirs(**call.tensors, **call.options)
        assert isinstance(evaluate(call.ours, call).error, error.error_type), str(call)
        ledger.count(call, "errors")
