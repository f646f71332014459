"""Losses of complex numbers, which torch's l1_loss and weights have, are left to torch, by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import compile_losses

CALLS = {
    "l1_loss": F.l1_loss,
    "l1_loss of a real target": lambda a, b: F.l1_loss(a, b.real),
    "l1_loss of a real input": lambda a, b: F.l1_loss(a.real, b),
    "written l1_loss": lambda a, b: (a - b).abs().mean(),
    "written mse_loss": lambda a, b: ((a - b).abs() ** 2).mean(),
    "weighted mse_loss": lambda a, b: F.mse_loss(a.real, b.imag, weight=b).abs(),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
REFUSED = [
    "mse_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits",
]  # fmt: skip


def pair():
    leaf = torch.randn(6, 10, dtype=torch.complex64, requires_grad=True)
    return leaf, torch.randn(6, 10, dtype=torch.complex64)


@pytest.mark.parametrize("name", CALLS)
def test_declined(name, no_code):
    function, (a, b) = CALLS[name], pair()
    (site,) = compile_losses.explain(function, a, b).losses
    assert site.status == "declined"
    assert "complex64" in site.reason, site.reason
    torch._dynamo.reset()
    results = []
    for call in (function, torch.compile(function, backend="compile_losses")):
        loss = call(a, b)
        results.append((loss, *torch.autograd.grad(loss, a)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """As torch refuses them, in eager code."""
    a, b = pair()
    with pytest.raises(Exception) as theirs:  # noqa: PT011  whatever torch raises
        getattr(F, name)(a, b)
    with pytest.raises(theirs.type):
        getattr(compile_losses.functional, name)(a, b)
