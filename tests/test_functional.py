"""Functions of compile_losses.functional that torch.nn.functional does not have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses import functional
from compile_losses.ops.checks import REDUCTIONS

DIVERGENCES = {
    "softmax_kl_div": {"temperature": 2.0, "dim": 0},
    "softmax_js_div": {"beta": 0.1, "temperature": 0.5},
    "softmax_finite_kl_div": {"entropy": False, "temperature": 0.5},
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "batchmean"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_of_softmaxes(name, reduction):
    """torch has no such functions: these are the ops, with named reductions."""
    x, t = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    ours = getattr(functional, name)(x, t, reduction, **DIVERGENCES[name])
    op = getattr(torch.ops.fused, name)
    expected = op(x, t, REDUCTIONS[reduction], **DIVERGENCES[name])
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert torch.equal(getattr(functional, name)(x, t), op(x, t))


def test_kl_div_of_softmaxes_is_torchs():
    x, t = torch.randn(5, 7), torch.randn(5, 7)
    expected = F.kl_div(F.log_softmax(x / 2, -1), F.softmax(t / 2, -1), reduction="batchmean")
    torch.testing.assert_close(functional.softmax_kl_div(x, t, temperature=2.0), expected)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_wrong_reduction_of_a_divergence(name):
    x = torch.randn(5, 7)
    with pytest.raises(ValueError, match=r"expected reduction to be one of .*, got 'average'"):
        getattr(functional, name)(x, x, "average")
