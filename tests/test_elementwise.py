"""Gradients of elementwise losses without an op, computed with the loss."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.elementwise import LOSSES
from compile_losses.backend import compile_losses as backend
from compile_losses.lower.elementwise import move
from tests.accuracy import assert_accurate

MOVED = "fused.keep_gradient"


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """On every device, whether it pays there or not."""
    monkeypatch.setattr(move, "SMALL", 0)
    monkeypatch.setattr(move, "ON_CPU", True)


def inputs_of(name, shape, dtype=torch.float32):
    kinds = LOSSES[name][1]
    made = [torch.rand(shape) * 0.9 + 0.05 if k in "pP" else torch.randn(shape) for k in kinds]
    return [t.to(dtype).requires_grad_(k.isupper()) for t, k in zip(made, kinds, strict=True)]


def results(function, inputs, factor=1.0):
    loss = function(*inputs)
    leaves = [t for t in inputs if t.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss * factor, leaves)]


def check(function, inputs, factor=1.0, **options):
    """By the one accuracy rule."""
    compiled = torch.compile(function, backend=backend, **options)
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    for ours, eager, true in zip(
        results(compiled, inputs, factor),
        results(function, inputs, factor),
        results(function, exact, factor),
        strict=True,
    ):
        assert_accurate(ours, eager, true)


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, dtype, factor, graphs, no_code):
    check(LOSSES[name][0], inputs_of(name, (32, 48), dtype), factor)
    (joint,) = graphs["joint"]
    assert joint.count(MOVED) == sum(kind.isupper() for kind in LOSSES[name][1])
    assert not any(MOVED in graph for graph in graphs["post"])


@pytest.mark.parametrize("name", ["sigmoid_focal", "kl_to_normal"])
def test_code(name):
    check(LOSSES[name][0], inputs_of(name, (32, 256)), 3.0)


def test_gradients_stay(graphs, no_code):
    """Near misses: another reduction, a number, a gradient of what is broadcast."""
    variance = torch.rand(48, requires_grad=True)
    for function in (
        lambda x, t: ((x - t).exp()).sum().sqrt() + math.pi * x.norm(),
        lambda x, t: F.softmax(x, -1).pow(3).mean(),
        lambda x, t: x.sum(),
        lambda x, t: ((x - t) ** 4 / variance + variance.log()).mean(),
        lambda x, t: ((x - t) ** 4).mean(0).amax(),
    ):
        check(function, [torch.randn(32, 48, requires_grad=True), torch.randn(32, 48)])
    assert not any(MOVED in joint for joint in graphs["joint"])
