"""Arguments that no caller means: the ops refuse them or compute, and never leave their buffers.

What they read and write is checked by `make asan`, which runs these tests on kernels built with
AddressSanitizer, and on a GPU by `make memcheck`. Targets out of range end a GPU's context, and
have processes of their own in tests/test_errors.py.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compile_losses import functional
from compile_losses.lower.fused_calls import is_elementwise
from tests.calls import leaves, loss_and_gradients, record_leaf_calls
from tests.conformance import samples
from tests.conformance.compare import dtypes, evaluate, losses
from tests.specs import SPECS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

REFUSALS = (RuntimeError, ValueError, IndexError, TypeError)
BAD = (-1, 5, -101, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))


def recorded(spec, device, dtype=torch.float32):
    """The leaf ops' calls that forward and backward make, and those of the passes' ops."""
    for sample in spec.samples(device, dtype):
        if sample.tensors[0].numel() > 3000:
            continue
        calls = record_leaf_calls(lambda s=sample: loss_and_gradients(spec.op, s, s.tensors))
        yield from calls
        forward = calls[0][1]
        if sample.options["reduction"] != 0:
            for suffix in {"with_grad", "with_grad_"} & {*spec.parts}:
                yield spec.part(suffix), forward, {}


def finish(device):
    """Waits for what a GPU still has to do, to raise here what it fails with."""
    if device == "cuda":
        torch.cuda.synchronize()


def mutations(argument, generator: random.Random):
    """Wrong values of one argument."""
    if isinstance(argument, Tensor):
        yield argument.new_empty(0)
        yield argument.flatten()
        yield argument.unsqueeze(0)
        yield argument.to(torch.float16 if argument.is_floating_point() else torch.int32)
        yield argument.to(torch.float64 if argument.is_floating_point() else torch.uint8)
        yield argument.bool()
        yield argument.to("meta")
        if argument.is_cuda:
            yield argument.cpu()
        for dim in range(argument.dim()):
            yield argument.narrow(dim, 0, argument.shape[dim] // 2)
            yield torch.cat([argument, argument], dim)
            yield argument.transpose(dim, 0)
        if argument.numel():
            yield argument.flatten()[0].expand(argument.shape)
            yield argument.flatten()[0]
        if not argument.is_floating_point():
            for bad in BAD:
                yield torch.full_like(argument, bad) if bad in RANGE[argument.dtype] else argument
        yield None
    elif isinstance(argument, bool):
        yield not argument
    elif isinstance(argument, int):
        yield from (-1, 3, 7, 2**40, generator.randrange(-5, 5))
    elif isinstance(argument, float):
        yield from (0.0, -1.0, 2.0, float("nan"), float("inf"))
    elif isinstance(argument, torch.dtype):
        yield from (torch.int64, torch.float64, torch.float16, torch.complex64)


RANGE = {torch.int64: range(-(2**63), 2**63), torch.uint8: range(256)}


def copies(args, device=None):
    """Copies of the tensors, on another device if one is given; of meta tensors there are none.

    Their strides stay, those of expanded ones too.
    """
    return [
        copy_of(a, device or a.device) if isinstance(a, Tensor) and not a.is_meta else a
        for a in args
    ]


def copy_of(tensor, device):
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    copy = memory.to(device, copy=True)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def result_or_refusal(op, args, kwargs):
    try:
        with torch.no_grad():
            return op(*args, **kwargs)
    except REFUSALS as error:
        return error


def is_target_out_of_range(refusal, args) -> bool:
    """Whether the CPU refuses a target that would end a GPU's context.

    Torch's own ops, which compute without kernels, refuse it by a RuntimeError.
    """
    classes = any(isinstance(a, Tensor) and not a.is_floating_point() for a in args)
    out_of_bounds = isinstance(refusal, RuntimeError) and "out of bounds" in str(refusal)
    return (isinstance(refusal, IndexError) or out_of_bounds) and classes


def assert_same_as_on_cpu(what, op, result, on_cpu, *, exact) -> None:
    """Both refuse, or both compute the same, statistics for a backward excepted.

    Float64 values are compared where both compute in float64: losses of rows do for float64 inputs.
    """
    assert isinstance(result, Exception) == isinstance(on_cpu, Exception), (what, result, on_cpu)
    name = op.name()
    if isinstance(result, Exception) or name.endswith("_"):
        return  # what is written over a wrong input depends on the order
    results = [r if isinstance(r, tuple) else (r,) for r in (result, on_cpu)]
    if name.endswith("_forward"):
        results = [r[:1] for r in results]
    for ours, expected in zip(*results, strict=True):
        assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype), what
        if exact and not ours.is_meta and ours.dtype == torch.float64:
            torch.testing.assert_close(
                ours.cpu(), expected, equal_nan=True, msg=lambda m: f"{what}: {m}"
            )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_wrong_arguments_of_every_op(spec, dtype, device):
    """Refused, or computed; what a GPU computes or refuses is what the CPU does."""
    generator, ran, refused = random.Random(0), 0, 0
    exact = dtype == torch.float64 or is_elementwise(spec.name)
    for op, args, kwargs in recorded(spec, device, dtype):
        args = copies([a.detach() if isinstance(a, Tensor) else a for a in args])
        wrong = [(i, m) for i, a in enumerate(args) for m in mutations(a, generator)]
        for i, mutation in generator.sample(wrong, min(len(wrong), 12)):
            given = copies(args)
            given[i] = mutation
            on_cpu = None
            if device != "cpu":
                on_cpu = result_or_refusal(op, copies(given, "cpu"), kwargs)
                if is_target_out_of_range(on_cpu, given):
                    continue
            ran += 1
            result = result_or_refusal(op, given, kwargs)
            refused += isinstance(result, Exception)
            what = op.name(), i, mutation  # not as text, which would take most of the time
            if isinstance(mutation, Tensor) and mutation.device.type == "cpu" != device:
                assert isinstance(result, Exception), what
            elif device != "cpu":
                assert_same_as_on_cpu(what, op, result, on_cpu, exact=exact)
    finish(device)
    assert refused > ran // 4 > 10


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
@pytest.mark.parametrize("bad", BAD)
def test_targets_out_of_range_cpu(name, bad):
    """In every layout, with and without weights; the threads that see no bad target finish."""
    options = [{}] if name == "nll_loss" else [{}, {"label_smoothing": 0.1}]
    shapes = ((4, 5), (5,), (3, 5, 2), (300, 5), (2, 5, 3, 40))
    for shape, option, weighted in itertools.product(shapes, options, (False, True)):
        for transposed in (False, True):
            x = torch.randn(shape)
            x = x.transpose(0, -1).contiguous().transpose(0, -1) if transposed else x
            dim = 0 if len(shape) == 1 else 1
            target = torch.zeros([*shape[:dim], *shape[dim + 1 :]], dtype=torch.int64)
            target.view(-1)[-1] = bad
            weight = torch.rand(5) if weighted else None
            with pytest.raises(IndexError):
                getattr(functional, name)(x.requires_grad_(), target, weight, **option)


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
@pytest.mark.parametrize("bad", BAD)
def test_targets_that_change_before_backward_cpu(name, bad):
    """Also behind the version counter's back."""
    leaf, target = torch.randn(4, 5, requires_grad=True), torch.zeros(4, dtype=torch.int64)
    loss = getattr(functional, name)(leaf, target)
    target.data.fill_(bad)
    try:
        loss.backward()
    except REFUSALS:
        return
    assert leaf.grad.isfinite().all()  # of what was saved before the change


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_operands_share_memory(spec, device):
    """Overlapping operands are read as they are."""
    for sample in spec.samples(device, torch.float64):
        input, *rest = leaves(sample)
        if input.numel() > 3000 or not input.numel():
            continue
        overlapping = input.detach().flatten()[0].expand(input.shape)
        torch.testing.assert_close(
            replace(sample, tensors=(overlapping, *rest)).call(spec.op),
            replace(sample, tensors=(overlapping.clone(), *rest)).call(spec.op),
            equal_nan=True,
        )


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@dtypes
def test_every_sample_stays_in_its_buffers(spec, dtype, device):
    """For the sanitizers: the samples of the other suites, results and refusals aside."""
    for sample in spec.samples(device, dtype):
        loss_and_gradients(spec.op, sample, sample.tensors)
    if dtype == torch.float32:
        for op, args, kwargs in recorded(spec, device):
            result_or_refusal(op, copies(args), kwargs)  # refused: gradients of broadcast inputs
    finish(device)


@losses
@dtypes
def test_every_call_stays_in_its_buffers(loss, dtype, device):
    for call in samples.calls(loss, dtype, device):
        evaluate(call.ours, call, call.differentiable)
    finish(device)
