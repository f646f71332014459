"""The short way of the ops in eager code: the same as the general one, and cheaper."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import compile_losses.ops  # noqa: F401

fused = torch.ops.fused
CASES = {
    "mse_loss": (torch.randn(8), torch.randn(8)),
    "smooth_l1_loss": (torch.randn(8), torch.randn(8)),
    "kl_div": (torch.rand(8).log(), torch.rand(8)),
    "cross_entropy": (torch.randn(2, 4), torch.tensor([3, 1])),
}
losses = pytest.mark.parametrize("name", CASES)


def inputs_of(name):
    input, target = CASES[name]
    return input.clone().requires_grad_(), target


def leaf(name):
    """The same loss through the op's registered formula."""
    forward = getattr(fused, f"{name}_forward").default
    arguments = {a.name: a.default_value for a in getattr(fused, name).default._schema.arguments}

    def function(input, target):
        named = {**arguments, "input": input, "target": target, "dtype": input.dtype}
        result = forward(*(named[a.name] for a in forward._schema.arguments))
        return result if isinstance(result, torch.Tensor) else result[0]

    return function


@losses
def test_same_gradients(name):
    results = []
    for function in (getattr(fused, name), leaf(name)):
        input, target = inputs_of(name)
        loss = function(input, target) * 3
        (gradient,) = torch.autograd.grad(loss, input, create_graph=True)
        # kl_div's gradient does not depend on its input.
        (second,) = torch.autograd.grad(
            gradient.square().sum(), input, allow_unused=True, materialize_grads=True
        )
        results.append((loss, gradient, second))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@losses
def test_batched_gradients(name):
    """A backward over vmap's tensors, whose type is that of plain ones."""
    input, target = inputs_of(name)
    loss = getattr(fused, name)(input, target)
    factors = torch.tensor([1.0, -2.0, 0.5])
    (batch,) = torch.autograd.grad(loss, input, factors, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(loss, input, f, retain_graph=True)[0] for f in factors]
    torch.testing.assert_close(batch, torch.stack(each))


@losses
def test_modes_see_the_ops(name):
    """Dispatch modes and hooks of saved tensors get what they always got."""
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    input, target = inputs_of(name)
    with Mode():
        loss = getattr(fused, name)(input, target)
    assert f"fused.{name}_forward.default" in seen
    loss.backward()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        again = getattr(fused, name)(input, target)
    assert packed
    gradient, input.grad = input.grad, None
    again.backward()
    torch.testing.assert_close(input.grad, gradient)


@losses
def test_checkpoint_and_modified_input(name):
    input, target = inputs_of(name)
    function = getattr(fused, name)
    checkpoint(function, input, target, use_reentrant=False).backward()
    expected = torch.autograd.grad(function(input, target), input)[0]
    torch.testing.assert_close(input.grad, expected)
    hidden = input * 1
    loss = function(hidden, target)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
@losses
def test_overhead(name):
    """Host time on eight elements against torch.nn.functional's, in the thread's own time."""

    def microseconds(function, calls=300, rounds=40):
        best = float("inf")
        for _ in range(rounds):
            start = time.thread_time_ns()
            for _ in range(calls):
                function()
            best = min(best, (time.thread_time_ns() - start) / calls / 1e3)
        return best

    def step(function):
        input.grad = None
        function(input, target).backward()

    input, target = inputs_of(name)
    ours, torchs = getattr(fused, name), getattr(F, name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kl_div's mean
            both = microseconds(lambda: step(ours)) / microseconds(lambda: step(torchs))
    finally:
        torch.set_num_threads(threads)
    assert both < 2.8
