"""Softmaxes by rows and by columns of one matrix, which one call reads."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lower.two_softmaxes import TWO_READS, matrix_of, take_two_softmaxes
from tests.constants import set_constants
from tests.graphs import listing
from tests.passes.graphs import aten, fused, indexed, of_aten, returned

CALL = "fused.softmax_sums"


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    set_constants(monkeypatch, two_softmaxes_bytes=0)


def softmax(x, dim):
    exponentials = (x - x.amax(dim, keepdim=True)).exp()
    return exponentials / exponentials.sum(dim, keepdim=True)


def logsumexp(x, dim):
    largest = x.amax(dim, keepdim=True)
    largest = torch.where(largest.abs() == torch.inf, 0, largest)
    return (x - largest).exp().sum(dim).log() + largest.squeeze(dim)


def check(function, *inputs):
    """The graph that the pass leaves, with the numbers that it had."""
    gm = of_aten(function, *inputs)
    before = gm(*inputs)
    graph = indexed(gm)
    take_two_softmaxes(graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), before, equal_nan=True)
    return listing(gm.graph)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: softmax(x, 0) * softmax(x, 1),
        lambda x: (logsumexp(x, 0), logsumexp(x.t(), 0)),
        lambda x: (softmax(x.t().clone(), 1), logsumexp(x, 1)),
        lambda x: (softmax(x * 3, 1), softmax((x * 3).t(), 1)),
        lambda x: (softmax(x / 3, 1), softmax((x / 3).view(6, 7), 0)),
    ],
)
@pytest.mark.parametrize("value", [0.5, torch.inf, -torch.inf, torch.nan])
def test_taken(function, value):
    x = torch.randn(6, 7)
    x[2, 3] = x[4] = x[:, 5] = value
    graph = check(function, x)
    assert graph.count(CALL) == 1
    assert "aten.amax" not in graph
    assert "aten.sum.dim_IntList" not in graph


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (softmax(x, 1), logsumexp(x, 1)),
        lambda x: (softmax(x * 3, 1), softmax(x * 2, 0)),
        lambda x: (softmax(x, 1), x.amax(0, keepdim=True)),
        lambda x: (softmax(x, 1), (x - x.amax(0, keepdim=True)).exp().sum(1)),
        lambda x: (softmax(x, 1), (2 * x - x.amax(0, keepdim=True)).exp().sum(0)),
        lambda x: (softmax(x, 1), softmax(x[None], 1)),
        lambda x: softmax(softmax(x, 0), 1),
        lambda x: (softmax(x.sin(), 0), softmax(x.sin(), 1)),
        lambda x: (softmax(x.half().float(), 0), softmax(x, 1)),
    ],
)
def test_left(function):
    assert CALL not in check(function, torch.randn(6, 7))


def test_losses_become_torchs_ops_only_if_they_are_taken(monkeypatch):
    def function(x, t, u):
        return tuple(
            fused.cross_entropy_forward(*each, None, 1, -100, 0.0, torch.float32)[0]
            for each in ((x, t), (x.t(), u))
        )

    inputs = torch.randn(6, 7), torch.randint(7, (6,)), torch.randint(6, (7,))
    gm = of_aten(function, *inputs)
    graph = indexed(gm)
    set_constants(monkeypatch, two_softmaxes_bytes=1000)
    take_two_softmaxes(graph)
    assert [decision.choice for decision in graph.decisions] == [TWO_READS] * 2
    assert listing(gm.graph).count("fused.cross_entropy_forward") == 2
    set_constants(monkeypatch, two_softmaxes_bytes=0)
    left = check(function, *inputs)
    assert "fused.cross_entropy_forward" not in left
    assert left.count(CALL) == 1


def test_a_loss_that_stays():
    """Something else reads the statistics of a loss: all losses stay, with the reason."""

    def function(x, t, u):
        options = None, 1, -100, 0.0, torch.float32
        by_rows = fused.cross_entropy_forward(x, t, *options)
        return *by_rows, fused.cross_entropy_forward(x.t(), u, *options)[0]

    inputs = torch.randn(6, 7), torch.randint(7, (6,)), torch.randint(6, (7,))
    gm = of_aten(function, *inputs)
    graph = indexed(gm)
    before = listing(gm.graph)
    take_two_softmaxes(graph)
    assert listing(gm.graph) == before
    told = [(decision.choice, decision.reason) for decision in graph.decisions]
    assert told == [(TWO_READS, "cross_entropy can't be decomposed, which reads the matrix")] * 2


def test_matrix_of():
    def function(x, s):
        return (x.t() * s).float().t(), (s * x).half(), x / 2 * s, x * s[:, None]

    gm = of_aten(function, torch.randn(3, 3).bfloat16(), torch.tensor([2.0]))
    x, s = gm.graph.find_nodes(op="placeholder")
    found = [matrix_of(node) for node in returned(gm.graph)]
    assert found[0] is not None
    matrix, turned = found[0]
    assert (matrix.node, matrix.scaling, turned) == (x, (False, s), False)
    assert [each[0].node is x for each in found if each] == [True, False, False, True]
    assert aten.div.Tensor in (each[0].node.target for each in found if each)
