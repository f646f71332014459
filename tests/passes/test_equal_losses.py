"""Losses with the same arguments, of which one is left."""

from __future__ import annotations

import torch

from compile_losses.lower.equal_losses import merge_equal_losses
from tests.corpus.capture import inputs_for
from tests.passes.graphs import fused, indexed, of_aten, text
from tests.passes.outcomes import assert_same, results_of

MSE = (None, 1)


def given():
    return torch.randn(4, 5), torch.randn(4, 5), torch.tensor(2.0)


def test_equal_losses_are_merged():
    def step(x, t, tangents_1):
        one = fused.mse_loss_forward(x, t, *MSE, x.dtype)
        same = fused.mse_loss_forward(x, t, *MSE, x.dtype)
        return one + same, fused.mse_loss_forward(t, x, *MSE, x.dtype)

    gm = of_aten(step, *given())
    numbers = inputs_for(gm)
    right = results_of(gm, numbers)
    merge_equal_losses(indexed(gm))
    gm.recompile()
    assert text(gm.graph).count("mse_loss_forward(") == 2
    assert_same(results_of(gm, numbers), right)


def test_equal_losses_that_are_returned_stay_apart():
    def step(x, t, tangents_1):
        return tuple(fused.mse_loss_forward(x, t, *MSE, x.dtype) for _ in range(2))

    gm = of_aten(step, *given())
    merge_equal_losses(indexed(gm))
    gm.recompile()
    one, same = gm(*given())
    assert "aten.clone" in text(gm.graph)
    assert one.data_ptr() != same.data_ptr()
