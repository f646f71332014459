"""Sums and diagonals that are taken of what a matrix is made of."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lower.early_parts import take_parts_early
from tests.graphs import listing
from tests.passes.graphs import aten, of_aten


def check(function, *inputs):
    """The graph that the pass leaves, with the numbers that it had."""
    gm = of_aten(function, *inputs)
    before = gm(*inputs)
    (matrix,) = (n for n in gm.graph.find_nodes(op="placeholder") if n.meta["val"].dim() == 2)
    take_parts_early(matrix)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), before)
    return listing(gm.graph)


def picked(x, index, numbers):
    full = aten.full.default([6, 6], 0, dtype=x.dtype, device=x.device)
    return aten.scatter.value(full, 1, index.unsqueeze(1), -1.0) * numbers.unsqueeze(1)


def problem():
    return torch.randn(6, 6), torch.randint(6, (6,)), torch.randn(6)


@pytest.mark.parametrize(
    "change",
    [
        lambda g, c: g,
        lambda g, c: -g / 3,
        lambda g, c: 2 * g + c[:, None].expand(6, 6),
        lambda g, c: g - g * c[:, None],
        lambda g, c: g / c[:, None],
    ],
)
def test_sums(change):
    def function(x, index, numbers):
        gradient = change(picked(x, index, numbers), numbers)
        return gradient - x.exp() * gradient.sum(1, keepdim=True)

    assert "aten.sum" not in check(function, *problem())


def test_sums_that_stay():
    def other_way(x, index, numbers):
        return picked(x, index, numbers).sum(0, keepdim=True)

    def with_the_matrix(x, index, numbers):
        return (picked(x, index, numbers) * x).sum(1, keepdim=True)

    for function in (other_way, with_the_matrix):
        assert check(function, *problem()).count("aten.sum") == 1


def test_diagonals_of_zeros():
    def function(x, index, numbers):
        zeros = aten.full.default([6, 6], 0, dtype=x.dtype, device=x.device)
        gradient = aten.diagonal_scatter.default(zeros, numbers)
        sums = gradient.sum(0, keepdim=True) + gradient.sum(1, keepdim=True)
        return gradient - x.exp() * sums

    left = check(function, *problem())
    assert "aten.sum" not in left
    assert "diagonal_scatter" not in left


def test_diagonals():
    def function(x, index, numbers):
        logarithms = ((x.t() - numbers[:, None]) * 2 - numbers[None]).exp()
        return logarithms.diagonal() + torch.where(x > 0, x, 0.0).diagonal()

    left = check(function, *problem())
    assert left.count("aten.diagonal.default](args = (%x_1,)") == left.count("aten.diagonal")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, index, numbers: x.cumsum(1).diagonal(),
        lambda x, index, numbers: x.sin().diagonal(1),
        lambda x, index, numbers: (x @ x).exp().diagonal(),
    ],
)
def test_diagonals_that_stay(function):
    inputs = problem()
    before = listing(of_aten(function, *inputs).graph)
    assert check(function, *inputs) == before
