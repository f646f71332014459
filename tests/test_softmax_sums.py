"""Sums of exponentials by rows and by columns, in one read of a matrix."""

from __future__ import annotations

import math

import pytest
import torch

from compile_losses import library
from tests.accuracy import assert_accurate

fused = torch.ops.fused
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
#: Tiles of 32 rows and of 128 to 256 columns, and what is left beside them.
SHAPES = [(1, 1), (5, 3), (1, 300), (300, 1), (70, 530), (64, 256), (33, 1031)]


def reference(x, factor=None):
    """By torch's ops, in the order of the op's results."""
    if factor is not None:
        x = x * factor.to(x.dtype)
    largest = [x.amax(1, keepdim=True), x.amax(0, keepdim=True)]
    sums = [(x - most).exp().sum(dim) for dim, most in zip((1, 0), largest, strict=True)]
    return largest[0].flatten(), sums[0], largest[1].flatten(), sums[1]


def check(x, factor=None):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    found = fused.softmax_sums(x, factor)
    eager = reference(x.to(wide), factor)
    exact = reference(x.double(), None if factor is None else factor.double())
    names = ("row_largest", "row_sum", "column_largest", "column_sum")
    for name, *results in zip(names, found, eager, exact, strict=True):
        assert_accurate(*results, name)
    again = fused.softmax_sums(x, factor)
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def layouts(x):
    """The same matrix, laid out in other ways."""
    rows, columns = x.shape
    yield x
    yield x.t().contiguous().t()
    yield torch.cat([x, x], 1)[:, :columns]
    yield torch.cat([x.t(), x.t()], 1).contiguous()[:, :rows].t()
    yield x.new_empty(rows * columns + 1)[1:].view(rows, columns).copy_(x)
    yield x.new_empty(rows, columns, 2)[..., 0].copy_(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers(shape, dtype, device):
    x = (20 * torch.randn(shape, device=device)).to(dtype)
    for laid_out in layouts(x):
        check(laid_out)


@pytest.mark.parametrize("factor", [14.3, -3.0, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_factor(dtype, factor, device):
    x = torch.randn(70, 530, device=device).to(dtype)
    for kind in (torch.float32, dtype):
        check(x, torch.tensor(factor, dtype=kind, device=device))
    check(x.t(), torch.tensor([factor], device=device))


def test_expanded(device):
    check(torch.randn(40, 1, device=device).expand(40, 70))
    check(torch.randn(1, 70, device=device).expand(40, 70))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_special_values(value, dtype, device):
    for row, column in ((slice(3, 4), slice(None)), (slice(None), slice(5, 6)), (7, 9)):
        x = torch.randn(100, 70, device=device).to(dtype)
        x[row, column] = value
        check(x)
    x[:] = value
    check(x)
    x[60:] = 1  # what a column has had so far is no number, or none yet
    check(x)
    x[:60] = 1
    x[60:] = value
    check(x)


def test_far_apart(device):
    """Rows and columns that are far below others keep their digits."""
    x = torch.randn(96, 300, device=device) - 300 * torch.arange(96, device=device)[:, None]
    check(x)
    check(x - 1000 * torch.arange(300, device=device))


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_empty(shape, device):
    found = fused.softmax_sums(torch.empty(shape, device=device), None)
    for size, largest, total in zip(shape, found[::2], found[1::2], strict=True):
        assert largest.tolist() == [-math.inf] * size
        assert total.tolist() == [0.0] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_op(dtype, device):
    x = torch.randn(40, 70, device=device).to(dtype)
    factor = torch.tensor(2.0, device=device)
    for arguments in ((x, None), (x.t(), factor), (x[:, ::2], None)):
        torch.library.opcheck(fused.softmax_sums.default, arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_body(dtype, device):
    """What computes the op without kernels, in several blocks of rows."""
    body = library.BODIES[fused.softmax_sums.default]
    x = (20 * torch.randn(300, 1000, device=device)).to(dtype)
    x[:150, 3] = -math.inf
    x[:, 4] = -math.inf
    x[5, 6] = math.nan
    for found, expected in zip(body(x, None), fused.softmax_sums(x, None), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.gpu
def test_large_matrix():
    """High tiles, and more than 2^31 elements."""
    x = torch.randn(1 << 16, (1 << 15) + 8, device="cuda", dtype=torch.bfloat16)
    row_largest, row_sum, column_largest, column_sum = fused.softmax_sums(x, None)
    assert torch.equal(row_largest, x.amax(1).float())
    assert torch.equal(column_largest, x.amax(0).float())
    for part in (slice(0, 100), slice(-100, None)):
        for found, largest, rows in (
            (row_sum, row_largest, x),
            (column_sum, column_largest, x.t()),
        ):
            exact = (rows[part].double() - largest[part, None].double()).exp().sum(1)
            torch.testing.assert_close(found[part].double(), exact, rtol=1e-5, atol=0)


def test_errors(device):
    x = torch.randn(3, 4, device=device)
    with pytest.raises(RuntimeError, match=r"expected input of shape \[rows, columns\], got \[3\]"):
        fused.softmax_sums(x[:, 0], None)
    with pytest.raises(RuntimeError, match=r"expected factor to hold one number, got shape \[2\]"):
        fused.softmax_sums(x, x[0, :2])
    with pytest.raises(RuntimeError, match="not differentiable"):
        fused.softmax_sums(x.requires_grad_(), None)
