"""Losses written out in float16: what torch keeps in float16's range stays in it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import compile_losses

# Sums of these lie above float16's largest number, 65504.
CASES = {
    "sum, mean": lambda a, b, w: ((a - b) ** 2).sum(dim=1).mean(),
    "divided": lambda a, b, w: ((a - b) ** 2 / 1000).sum(),
    "none, sum, mean": lambda a, b, w: F.mse_loss(a, b, reduction="none").sum(dim=1).mean(),
    "absolute": lambda a, b, w: (0.001 * (a - b).abs()).sum(),
    "weighted": lambda a, b, w: ((a - b) ** 2 * w).sum(dim=1).mean(),
    "two weights": lambda a, b, w: ((a - b) ** 2 * 1e-3 * (w * 300) * (w * 300)).mean(),
    "small weights": lambda a, b, w: ((a - b) ** 2 * 1e-3 * w).sum(),
    "torch's weight": lambda a, b, w: F.huber_loss(a, b, "none", 2.0, w).sum(dim=1).mean(),
    "cross entropy": lambda a, b, w: (
        F.cross_entropy(a * 9, b.argmax(1), reduction="none") / 1000
    ).sum(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", CASES)
def test_sums_out_of_range(case, inner):
    a, b = (torch.randn(4000, 60, dtype=torch.float16) for _ in range(2))
    a.requires_grad_()
    w = torch.rand(4000, 60).half() + 0.5
    function = CASES[case]
    (site,) = compile_losses.explain(function, a, b, w).losses
    assert site.status == "rewritten"
    compiled = torch.compile(
        function, backend="compile_losses", options={"inner_backend": inner}, dynamic=False
    )
    results = []
    for f in (compiled, function):
        loss = f(a, b, w)
        results.append((loss.detach(), *torch.autograd.grad(loss, a)))
    assert bool(results[1][0].isfinite())
    torch.testing.assert_close(*results, rtol=2e-2, atol=1e-4)


def test_reciprocals_out_of_range():
    """A variance whose reciprocal float16 does not hold."""
    a, b = (torch.randn(6, 10, dtype=torch.float16) * 1e-3 for _ in range(2))
    v = torch.full((6, 10), 1e-5, dtype=torch.float16)

    def loss(a, b, v):
        return ((a - b) ** 2 / v).sum()

    (site,) = compile_losses.explain(loss, a, b, v).losses
    assert site.status == "rewritten"
    compiled = torch.compile(loss, backend="compile_losses")
    exact = loss(a.double(), b.double(), v.double())
    torch.testing.assert_close(compiled(a, b, v).double(), exact, rtol=2e-3, atol=0)


def test_cast_of_one_argument():
    """A loss whose dtype is its target's, of a target that was cast."""
    x, t = torch.randn(6, 10), torch.rand(6, 10).bfloat16()

    def loss(x, t):
        return F.binary_cross_entropy_with_logits(x, t.float())

    (site,) = compile_losses.explain(loss, x, t).losses
    assert (site.status, site.reason) == ("rewritten", "absorbed a cast from bfloat16")
    compiled = torch.compile(loss, backend="compile_losses", options={"inner_backend": "eager"})
    torch.testing.assert_close(compiled(x, t), loss(x, t))
