"""Problems of linear cross entropy, torch's results for them, and the ways to go through them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import compile_losses.ops  # noqa: F401
from compile_losses.ops.linear import block_layout, row_chunks
from compile_losses.ops.linear.block_layout import smallest_scratch
from compile_losses.ops.linear.chunk_size import Plan
from compile_losses.ops.linear.reference import reference
from compile_losses.ops.linear.row_function import known_gradients
from tests.accuracy import assert_accurate
from tests.constants import set_constants

op = torch.ops.fused.linear_cross_entropy
ROWS, HIDDEN, CLASSES = 90, 24, 37


@pytest.fixture
def chunks(monkeypatch):
    """Sets how many rows of logits are held at a time."""

    def set_rows(rows):
        set_constants(monkeypatch, least_rows=rows, logits_bytes=1)
        monkeypatch.setattr("compile_losses.ops.linear.matrix_products.BLOCK_BYTES", 1000)

    set_rows(16)
    return set_rows


@pytest.fixture
def exact_plan(monkeypatch):
    """Sets how many rows of logits are held, and where, whatever else would be better."""

    def set_plan(*arguments):
        monkeypatch.setattr(row_chunks, "plan", lambda *_, **__: Plan(*arguments))

    return set_plan


@pytest.fixture
def blocks(chunks, monkeypatch):
    """Lets the logits of the first rows lie in the weight's gradient; returns what was planned."""
    plans = []

    def planned(rows, hidden, classes, *_, **__):
        first = smallest_scratch(min(rows, hidden), hidden, classes, 3) if rows else None
        plans.append(Plan(16, first))
        return plans[-1]

    monkeypatch.setattr(block_layout, "ALIGNED", 1)
    monkeypatch.setattr(row_chunks, "plan", planned)
    return plans


@pytest.fixture(params=["chunks", "blocks"])
def either_way(request):
    """All rows in small chunks, or the logits of the first ones in the weight's gradient."""
    request.getfixturevalue(request.param)


def problem(device, rows=ROWS, hidden=HIDDEN, classes=CLASSES, ignored=5, scale=1.0):
    """Input, weight, target, bias and class weights in float64, exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.bfloat16().double().to(device)

    target = torch.randint(classes, (rows,), generator=generator)
    if ignored:
        target[::ignored] = -100
    weight = torch.rand(classes, generator=generator, dtype=torch.float64) + 0.5
    weight = weight.bfloat16().double().to(device)
    return draw(rows, hidden), draw(classes, hidden), target.to(device), draw(classes), weight


def expected(input, linear_weight, target, *, linear_bias=None, weight=None, reduction=1, **more):
    options = {"label_smoothing": 0.0, "softcap": None, "z_loss": 0.0, **more}
    return reference(
        input, linear_weight, target, linear_bias, weight, reduction, -100,
        *options.values(), dtype=input.dtype,
    )  # fmt: skip


def run(function, tensors, dtype, grad_output=None, **options):
    """The loss and the gradients of input, weight and bias."""
    input, linear_weight, target, linear_bias, weight = (
        t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors
    )
    leaves = [
        t.detach().requires_grad_() for t in (input, linear_weight, linear_bias) if t is not None
    ]
    bias = {"linear_bias": leaves[2]} if linear_bias is not None else {}
    loss = function(leaves[0], leaves[1], target, weight=weight, **bias, **options)
    if grad_output is None:
        generator = torch.Generator().manual_seed(1)
        grad_output = torch.randn(loss.shape, generator=generator, dtype=torch.float64) * 3
    return loss.detach(), *torch.autograd.grad(
        loss, leaves, grad_output.to(loss.device, loss.dtype)
    )


def assert_like_torch(tensors, dtype, what, **options):
    ours = run(op, tensors, dtype, **options)
    eager = run(expected, tensors, dtype, **options)
    exact = run(
        expected, [t.cpu() if t is not None else t for t in tensors], torch.float64, **options
    )
    for name, *results in zip(("loss", "input", "weight", "bias"), ours, eager, exact):  # noqa: B905
        assert_accurate(*results, f"{what}, {name}")


def products(function):
    """The matrix products that a call makes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        function()
    return sum(
        event.name in ("aten::mm", "aten::addmm", "aten::addmm_") for event in profiled.events()
    )


def compiled_texts(function, *tensors):
    """The forward and the backward graph that AOTAutograd makes of a loss, as text."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    texts = []

    def record(gm, inputs):
        texts.append(gm.print_readable(print_output=False))
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    torch.compile(function, backend=backend)(*tensors).backward()
    forward, backward = texts
    return forward, backward


def known_text(gradient):
    """What ``rows_with_grad`` is given for gradients of each row that are known."""
    function = known_gradients([gradient])
    return function.text, list(function.known)


class LargestStorage(TorchDispatchMode):
    """Notes the bytes of the largest storage among the results of the ops inside."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if type(tensor) is torch.Tensor:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def largest_allocation(function, device="cpu"):
    """In bytes, of those that the ops inside a call make on a device."""
    is_cpu = torch.device(device).type == "cpu"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = profiled.events()
    return max(e.self_cpu_memory_usage if is_cpu else e.self_device_memory_usage for e in events)


def most_allocated(function):
    """In bytes, how much more is allocated at a time in a call than before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = function()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    assert events
    del result
    return max(itertools.accumulate(event.nbytes() for event in events))


OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"softcap": 5.0},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2},
]


def leaves(device="cpu", dtype=torch.float64, **options):
    input, linear_weight, target, bias, _ = problem(device, **options)
    return [t.to(dtype).requires_grad_() for t in (input, linear_weight, bias)], target
