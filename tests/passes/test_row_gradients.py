"""Gradients of each row that a forward can compute, and why others can't be."""

from __future__ import annotations

import json

import pytest
import torch

from compile_losses.lower.node_relations import depends_on_tangents
from compile_losses.lower.row_gradients import RowGradients, row_gradients, values_of
from compile_losses.ops.linear.row_function import RowFunction
from tests.corpus.capture import inputs_for
from tests.passes.graphs import aten, fused, of_aten, one, text

ROWS, CLASSES = 6, 5
F64 = torch.float64
OPTIONS = (None, None, 0, -100, 0.0, None, 0.0, F64)


def step(gradient):
    """A joint graph whose losses have gradients that are a function of them, of what is known and
    of one tangent."""

    def joint(h, w, t, mask, tangents_1):
        losses = fused.linear_cross_entropy_forward(h, w, t, *OPTIONS)
        g = gradient(losses, mask, tangents_1)
        gradients = fused.linear_cross_entropy_backward(g, h, w, t, *OPTIONS, True, True, False)
        return losses, g, gradients[0], gradients[1]

    generator = torch.Generator().manual_seed(0)
    h, w = torch.randn(ROWS, 3, dtype=F64), torch.randn(CLASSES, 3, dtype=F64)
    t = torch.randint(CLASSES, (ROWS,), generator=generator)
    return of_aten(joint, h, w, t, torch.rand(ROWS, dtype=F64), torch.ones((), dtype=F64))


def found_in(gm):
    losses = one(gm.graph, fused.linear_cross_entropy_forward.default)
    (backward,) = (n for n in gm.graph.nodes if "_backward" in str(n.target))
    g = backward.args[0]
    return losses, g, row_gradients(losses, [g], depends_on_tangents(gm.graph))


BY_ROW = {
    "mask": lambda x, mask, d: mask * d,
    "mean": lambda x, mask, d: d.expand(ROWS) / ROWS,
    "masked mean": lambda x, mask, d: (d / mask.sum()) * mask,
    "function of the loss": lambda x, mask, d: torch.exp(-x) * d,
    "of loss and mask": lambda x, mask, d: torch.where(x > mask, x, 0.0) * mask * d,
    "of views": lambda x, mask, d: (x.view(2, 3).sigmoid() * mask.view(2, 3)).view(-1) * d,
    "negative": lambda x, mask, d: -(d * x.tanh()),
    "clamped": lambda x, mask, d: x.clamp(0.5, 2.0) * d,
    "of a number": lambda x, mask, d: x * mask.amax() * d,
    "of the first loss": lambda x, mask, d: x.detach() * d,
    "padded": lambda x, mask, d: aten.constant_pad_nd(d * mask[1:], [1, 0]),
    "two terms": lambda x, mask, d: x * d + mask * d,
}


@pytest.mark.parametrize("name", BY_ROW)
def test_by_row(name):
    """The function, evaluated, is the gradient for a tangent of 1, and what it reads is there."""
    gm = step(BY_ROW[name])
    losses, g, found = found_in(gm)
    assert isinstance(found, RowGradients), found
    assert found.tangent.name.startswith("tangents")
    assert all(known < losses for known in found.known)
    (output,) = gm.graph.find_nodes(op="output")
    output.args = ((losses, g, *found.known),)
    gm.graph.lint()
    gm.recompile()
    inputs = [*inputs_for(gm)[:4], torch.ones((), dtype=F64)]
    of_rows, expected, *known = gm(*inputs)
    (result,) = RowFunction(found.function, tuple(known))(slice(0, ROWS), [of_rows])
    torch.testing.assert_close(result.expand(ROWS), expected)


ACROSS = {
    "sum of losses": (lambda x, mask, d: x.sum() * mask * d, "other rows: sum"),
    "of its neighbour": (lambda x, mask, d: x.roll(1) * d, "other rows"),
    "cumulative": (lambda x, mask, d: x.cumsum(0) * d, "other rows: cumsum"),
    "part": (
        lambda x, mask, d: aten.constant_pad_nd(x[1:] * d, [1, 0]), "other rows: slice",
    ),
    "square of the tangent": (lambda x, mask, d: d * d * mask, "not linear"),
    "softmax": (lambda x, mask, d: x.softmax(0) * d, "other rows"),
    "random": (lambda x, mask, d: torch.bernoulli(x.sigmoid()) * d, "other rows: bernoulli"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACROSS)
def test_across_rows(name):
    function, words = ACROSS[name]
    gm = step(function)
    before = text(gm.graph)
    _, _, found = found_in(gm)
    assert isinstance(found, str)
    assert words in found
    assert text(gm.graph) == before


def test_several_tangents():
    def joint(h, w, t, tangents_1, tangents_2):
        losses = fused.linear_cross_entropy_forward(h, w, t, *OPTIONS)
        g = losses * tangents_1 + tangents_2
        return fused.linear_cross_entropy_backward(g, h, w, t, *OPTIONS, True, True, False)[0]

    h, w = torch.randn(ROWS, 3, dtype=F64), torch.randn(CLASSES, 3, dtype=F64)
    numbers = [torch.ones((), dtype=F64) for _ in range(2)]
    gm = of_aten(joint, h, w, torch.zeros(ROWS, dtype=torch.int64), *numbers)
    assert "more than one number from outside" in found_in(gm)[2]


def test_the_text_of_a_function():
    _, _, found = found_in(step(lambda x, mask, d: torch.exp(-x) * mask * d))
    steps = json.loads(found.function)["steps"]
    assert [name for name, *_ in steps][:3] == [
        "aten.neg.default", "aten.exp.default", "aten.mul.Tensor"
    ]  # fmt: skip


def test_values():
    gm = step(BY_ROW["mask"])
    losses = one(gm.graph, fused.linear_cross_entropy_forward.default)
    assert [v.shape for v in values_of(losses)] == [(ROWS,)]
