"""Binary cross entropy of probabilities: torch's bounds of its logarithms and of its gradient.

No op takes probabilities. Where a sigmoid rounds to 0 or 1, the loss of its logits is another one:
torch bounds the logarithm of a probability at -100, and what the gradient is divided by at 1e-12.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compile_losses
from compile_losses.backend import compile_losses as backend
from tests.constants import move_gradients, set_constants

MOVED = "fused.keep_gradient"
#: Where float32's sigmoid is exact, where it rounds to 1, where torch's bound of the logarithm is
#: reached, and where it rounds to 0.
HURTING = (
    *(0.0, -0.5, 3.0, 15.0, -15.0, 16.0, 17.0, -17.0, 20.0, -20.0, 50.0, -50.0),
    *(88.0, -88.0, 100.0, -100.0, -104.0, 120.0, -120.0, math.inf, -math.inf, math.nan),
)
LABELS = (0.0, 1.0, 0.3)
ROWS, COLS = len(LABELS) * 4, len(HURTING) * 2


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    move_gradients(monkeypatch, longest_row=4096)


def logits(dtype, finite=False):
    values = torch.tensor(HURTING).repeat(ROWS, 2)
    values = values.nan_to_num(1.0, 30.0, -30.0) if finite else values
    return values.to(dtype).requires_grad_()


def labels(dtype):
    return torch.tensor(LABELS).repeat(4)[:, None].expand(ROWS, COLS).contiguous().to(dtype)


def weights(dtype):
    return torch.arange(ROWS * COLS).view(ROWS, COLS).remainder(5).to(dtype)


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.sigmoid, self.loss = nn.Sigmoid(), nn.BCELoss(reduction="sum")

    def forward(self, x, y, w):
        return self.loss(self.sigmoid(x), y)


LOSSES = {
    "mean": lambda x, y, w: F.binary_cross_entropy(torch.sigmoid(x), y),
    "sum": lambda x, y, w: F.binary_cross_entropy(x.sigmoid(), y, reduction="sum"),
    "module": Criterion(),
    "weight": lambda x, y, w: F.binary_cross_entropy(x.sigmoid(), y, weight=w),
    "weight, sum": lambda x, y, w: F.binary_cross_entropy(x.sigmoid(), y, w, reduction="sum"),
    "none": lambda x, y, w: (
        F.binary_cross_entropy(x.sigmoid(), y, reduction="none") * w
    ).mean(),
    "aten": lambda x, y, w: torch.ops.aten.binary_cross_entropy(x.sigmoid(), y, None, 1),
}  # fmt: skip


def results(function, inputs, factor=1.0):
    loss = function(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss * factor, inputs[:1])]


def stock(function):
    """The same ops as Inductor compiles, without its code."""
    return torch.compile(function, backend="aot_eager_decomp_partition")


def compared(function, inputs, factor=1.0, **options):
    ours = results(torch.compile(function, backend=backend, **options), inputs, factor)
    torch._dynamo.reset()
    return ours, results(stock(function), inputs, factor)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_where_a_sigmoid_rounds(name, dtype, dynamic, graphs, no_code):
    """The gradient is torch's, bit for bit, element by element, whatever the loss adds up to."""
    inputs = logits(dtype), labels(dtype), weights(dtype)
    (_, ours), (_, expected) = compared(LOSSES[name], inputs, dynamic=dynamic)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    if not dynamic:
        (joint,) = graphs["joint"]
        assert MOVED in joint


@pytest.mark.sampled(3)
@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_values(name, dtype, factor, no_code):
    """The bound of -100 counts in the value: logits of 30 and label 0 lose 100, and not 30."""
    inputs = logits(dtype, finite=True), labels(dtype), weights(dtype)
    ours, expected = compared(LOSSES[name], inputs, factor)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=0)
    by_logits = F.binary_cross_entropy_with_logits(*inputs[:2]).item()
    assert name != "mean" or not math.isclose(ours[0].item(), by_logits, rel_tol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_of_0_and_1(dtype, no_code):
    """Given as they are, without a sigmoid whose gradient is 0 there."""

    def loss(p, y):
        return F.binary_cross_entropy(p, y, reduction="sum")

    p = torch.tensor([0.0, 1.0, 1e-30, 1e-44, 1 - 2**-24, 0.5, math.nan, 2.0, -1.0, math.inf])
    p = p.repeat(ROWS, 2).to(dtype).requires_grad_()
    ours, expected = compared(loss, (p, labels(dtype)[:, :20]))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0, equal_nan=True)
    assert ours[1][0, 1] == torch.tensor(1e12, dtype=dtype)  # p = 1 of label 0


def test_report(monkeypatch):
    """It says what to write instead, or that the gradient is computed with the loss."""
    set_constants(monkeypatch, writes_over=False)
    x, y, w = logits(torch.float32, finite=True), labels(torch.float32), torch.randn(COLS, COLS)

    def behind_a_layer(x, y, w):
        return F.binary_cross_entropy((x @ w).sigmoid(), y)

    (taken,) = compile_losses.explain(LOSSES["mean"], x, y, w).losses
    assert (taken.status, taken.plan) == ("rewritten", ("elementwise, gradient in forward",))
    (left,) = compile_losses.explain(behind_a_layer, x, y, w).losses
    assert left.status == "declined"
    assert "F.binary_cross_entropy_with_logits of what the sigmoid is given" in left.reason
    (detail,) = left.details
    assert detail.startswith("gradient in backward: torch writes the gradient over")


def test_what_is_written_instead_is_taken():
    x, y = logits(torch.float32, finite=True), labels(torch.float32)
    (site,) = compile_losses.explain(F.binary_cross_entropy_with_logits, x, y).losses
    assert (site.op, site.status) == ("binary_cross_entropy_with_logits", "rewritten")
