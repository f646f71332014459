"""Calls of the ops with the samples of the specs."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.specs import SPECS

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def leaves(sample, tensors=None):
    """The sample's tensors, the differentiable ones as leaves of the same layout."""
    return tuple(
        t.detach().requires_grad_(i in sample.differentiable) if t.is_floating_point() else t
        for i, t in enumerate(sample.tensors if tensors is None else tensors)
    )


def loss_and_gradients(function, sample, tensors, grad_output=None):
    tensors = leaves(sample, tensors)
    loss = sample.call(function, tensors)
    if grad_output is None:
        generator = torch.Generator().manual_seed(1)
        grad_output = torch.randn(loss.shape, generator=generator, dtype=torch.float64) * 3
    roots = [tensors[i] for i in sample.differentiable]
    return loss, torch.autograd.grad(loss, roots, grad_output.to(loss.device, loss.dtype))


@contextlib.contextmanager
def deterministic():
    """Torch's deterministic mode, which also fills new tensors with nan."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def record_leaf_calls(function):
    """The leaf ops, with their arguments, that a call dispatches to."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "fused":
                calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorder():
        function()
    return calls


#: Losses made of other losses' kernels and of products of ATen: no kernels of their own.
COMPOSED = {"linear_cross_entropy", "linear_softmax_js_div", "linear_softmax_kl_div"}
