"""Every option of every loss, in every layout: values, gradients, second derivatives."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.conformance import samples
from tests.conformance.compare import DTYPES, LOSSES, Call, compare, dtypes, losses, patterns
from tests.conformance.ledger import OPTIONS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.sampled(2)
@losses
@dtypes
def test_values_and_gradients(loss, dtype, device):
    ran = 0
    for call in samples.calls(loss, dtype, device):
        for requires in patterns(call):
            compare(call, requires)
            ran += 1
    assert ran > 50


@pytest.mark.sampled(2)
@losses
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float64, id="float64"),
        pytest.param(torch.float32, id="float32", marks=pytest.mark.slow),
    ],
)
def test_second_derivatives(loss, dtype, device):
    ran = 0
    for call in samples.calls(loss, dtype, device):
        if call.differentiable:
            compare(call, call.differentiable, second=True)
            ran += 1
    assert ran > 50


OTHERS = (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)


@losses
def test_mixed_dtypes(loss, device):
    """Every pair of dtypes: torch's result dtype, or its class of error."""
    for first, second in itertools.product((*DTYPES, *OTHERS), repeat=2):
        for reduction in ("none", "mean", "sum"):
            tensors = {
                "input": samples.Draw(torch.float32, device).positive(6, 5).to(first),
                "target": samples.Draw(torch.float32, device, 1).positive(6, 5).to(second),
            }
            call = Call(loss, tensors, {"reduction": reduction})
            if loss in ("nll_loss", "cross_entropy"):
                tensors["target"] = torch.arange(5, device=device).repeat(2)[:6].to(second)
                compare(call)
                tensors = {**tensors, "target": call.tensors["target"]}
            compare(call)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", [name for name in LOSSES if "broadcast" in OPTIONS[name]])
def test_dtypes_of_numbers(loss, device):
    """Of tensors and numbers, which have no dimensions, the tensors decide, but where torch expands
    the numbers first; and the gradient of each has its own dtype."""
    draw = samples.Draw(torch.float64, device)
    options = [{"reduction": reduction} for reduction in ("none", "mean", "sum")]
    if loss == "kl_div":
        options += [{"reduction": "batchmean"}, {"reduction": "none", "log_target": True}]
    several = [("input", "target")]
    if "weight" in OPTIONS[loss]:
        several.append(("input", "target", "weight"))
    for shapes, names in itertools.product((((5,), ()), ((), (5,)), ((), ())), several):
        for kinds in itertools.product(DTYPES, repeat=len(names)):
            tensors = {
                name: draw.positive(*shape).to(dtype)
                for name, shape, dtype in zip(names, (*shapes, shapes[0]), kinds, strict=False)
            }
            for option in options:
                call = Call(loss, tensors, option)
                compare(call)
                compare(call, call.differentiable)


@losses
def test_dtypes_of_weights(loss, device):
    draw = samples.Draw(torch.float32, device)
    for first, second in itertools.product((*DTYPES, torch.int64, torch.bool), repeat=2):
        for reduction in ("none", "mean", "sum"):
            tensors = {"input": draw.normal(6, 5), "target": draw.positive(6, 5)}
            if loss in ("nll_loss", "cross_entropy"):
                tensors["target"] = draw.classes(5, 6)
                tensors["weight"] = draw.positive(5)
            elif loss == "binary_cross_entropy_with_logits":
                tensors["weight"], tensors["pos_weight"] = draw.positive(6, 1), draw.positive(5)
                tensors["pos_weight"] = tensors["pos_weight"].to(first)
            elif loss in ("mse_loss", "l1_loss", "huber_loss"):
                tensors["weight"] = draw.positive(6, 5)
            else:
                pytest.skip(reason=f"{loss} has no weight")
            tensors["input"] = tensors["input"].to(first)
            tensors["weight"] = tensors["weight"].to(second)
            compare(Call(loss, tensors, {"reduction": reduction}))
