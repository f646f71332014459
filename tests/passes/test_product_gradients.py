"""Products of matrices that are scaled: which operand takes the factor, and when none does."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lower.product_gradients import overwrite_products
from compile_losses.lower.two_softmaxes import take_two_softmaxes
from tests.constants import set_constants
from tests.graphs import listing
from tests.passes.graphs import indexed, of_aten


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    set_constants(monkeypatch, two_softmaxes_bytes=0)


def both(x):
    wide = x.float()
    exponentials = [(wide - wide.amax(dim, keepdim=True)).exp() for dim in (0, 1)]
    by_columns, by_rows = (e / e.sum(dim, keepdim=True) for dim, e in enumerate(exponentials))
    return by_columns * by_rows


def check(function, dtype=torch.float32):
    """The graph that the passes leave, with nearly the numbers that it had."""
    torch.manual_seed(0)
    inputs = [torch.randn(6, 3, dtype=dtype), torch.randn(7, 3, dtype=dtype), torch.tensor(1.5)]
    gm = of_aten(function, *inputs)
    before = gm(*inputs)
    graph = indexed(gm)
    take_two_softmaxes(graph)
    overwrite_products(graph)
    gm.graph.lint()
    gm.recompile()
    allowed = {} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(gm(*inputs), before, **allowed)
    return listing(gm.graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, s: both(a @ b.T * s),
        lambda a, b, s: both(s.exp() * (a @ b.T)),
        lambda a, b, s: both(a @ b.T / s),
        lambda a, b, s: both(a @ b.T * 3),
        lambda a, b, s: both((a @ b.T).float() * s),
    ],
)
def test_the_smaller_operand_is_scaled(function, dtype):
    graph = check(function, dtype)
    assert "softmax_sums.default](args = (%mm_default, None)" in graph
    assert "aten.amax" not in graph


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, s: ((x := a @ b.T), both(x * s)),
        lambda a, b, s: ((x := a @ b.T), both(x * s), both(x * 2)),
        lambda a, b, s: ((x := a @ b.T), both(x * s), x.float().sum(1)),
    ],
)
def test_products_that_are_read_unscaled_too(function):
    graph = check(function)
    assert "softmax_sums" in graph
    assert "mm_default" not in graph


def test_small_factors_of_float16():
    assert "mm_default" not in check(lambda a, b, s: both(a @ b.T * 1e-7), torch.float16)


def test_a_product_that_is_written_somewhere():
    """A write that nothing reads is a reader, too."""

    def function(a, b, s, buffer):
        x = a @ b.T
        buffer.copy_(x)
        return both(x * s)

    buffer = torch.zeros(6, 7)
    gm = of_aten(function, torch.randn(6, 3), torch.randn(7, 3), torch.tensor(1.5), buffer)
    graph = indexed(gm)
    take_two_softmaxes(graph)
    overwrite_products(graph)
    assert "copy_" in listing(gm.graph)
    assert "mm_default" not in listing(gm.graph)
