"""Losses whose kernels are slow, or have too few bytes."""

from __future__ import annotations

import torch

from compile_losses.lower.fused_calls import find_losses
from compile_losses.lower.slow_paths import is_small, slow_path
from tests.constants import set_constants
from tests.corpus.capture import SMALL
from tests.passes.graphs import fused, of_aten


def loss(function, *inputs):
    return find_losses(of_aten(function, *inputs).graph)[0]


def test_slow_paths():
    def mse(x, t):
        return fused.mse_loss_forward(x, t, None, 1, x.dtype)

    x, t = torch.randn(8, 6), torch.randn(8, 6)
    assert slow_path(loss(mse, x, t)).factor == 1.1  # without a gradient
    assert slow_path(loss(mse, x, torch.randn(6, 8).t())).factor == 2.5

    def trained(x, t, g):
        return mse(x, t), fused.mse_loss_backward(g, x, t, None, 1, True, False, False)[0]

    assert slow_path(loss(trained, x, t, torch.tensor(1.0))) is None

    def classes(y, t):
        return fused.cross_entropy_forward(y, t, None, 1, -100, 0.0, y.dtype)[0]

    narrow, labels = torch.randn(8, 6).bfloat16(), torch.randint(6, (8,))
    assert slow_path(loss(classes, narrow, labels)) is None
    assert (
        "not neighbours"
        in slow_path(loss(classes, torch.randn(6, 8).bfloat16().t(), labels)).reason
    )


def test_small_losses(monkeypatch):
    def mse(x, t):
        return fused.mse_loss_forward(x, t, None, 1, x.dtype)

    found = loss(mse, torch.randn(8, 6), torch.randn(8, 6))
    assert not is_small(found)
    set_constants(monkeypatch, **{**SMALL, "small_simple_bytes": 8 * 6 * 4 + 1})
    assert is_small(found)
