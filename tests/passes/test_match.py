"""How a match becomes a node."""

from __future__ import annotations

import operator

import pytest
import torch
from expecttest import assert_expected_inline

from compile_losses.recognize.graph.symbolic_tensors import (
    Size,
    computed_alike,
    has_gradient,
    put,
    sources,
    whole,
)
from compile_losses.recognize.match import Match
from tests.passes.graphs import aten, dynamo, one, recognizer, text
from tests.passes.outcomes import assert_same, with_gradients


def pair():
    return torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)


def matched(function, *inputs):
    found = dynamo(function, *inputs)
    found_by, root = recognizer(found.gm)
    return found, next(c for c in found_by.candidates(root) if isinstance(c, Match))


def test_replaced():
    found, match = matched(lambda x, t: ((x - t) ** 2).sum(1).mean(), *pair())
    right = with_gradients(found.gm, found.inputs)
    erased = match.replace()
    assert next(n.name for n in erased) == "mean"
    found.gm.graph.lint()
    found.gm.recompile()
    assert_same(with_gradients(found.gm, found.inputs), right)
    assert_expected_inline(
        text(found.gm.graph),
        """\
mse_loss_default = fused.mse_loss(l_x_, l_t_, 2)
mul = mul(mse_loss_default, 0.25)
return (mul,)""",
    )


def test_what_others_read_stays():
    def step(x, t):
        d = (x - t) ** 2
        return d.mean(), d.amax()

    _found, match = matched(step, *pair())
    assert {n.name for n in match.interior} == {"d", "sub"}
    assert match.span == {match.root, *match.interior}
    erased = match.replace()
    assert [n.name for n in erased] == ["mean"]


def test_a_failure_leaves_the_graph(monkeypatch):
    found, match = matched(lambda x, t: ((x - t) ** 2).sum(), *pair())
    before = text(found.gm.graph)
    match.steps.append((torch.mul, (object(),)))

    def failing(*_):
        raise ValueError

    monkeypatch.setattr(match, "_before_steps", failing)
    with pytest.raises(ValueError):  # noqa: PT011
        match.replace()
    assert text(found.gm.graph) == before


def test_inputs_and_sources():
    _found, match = matched(lambda x, t: ((x - t) ** 2).sum(), *pair())
    x, t = match.args[:2]
    assert match.inputs == [x, t]
    assert list(sources((x, [Size(t, 0)], 3))) == [x, t]
    assert has_gradient(x)
    assert not has_gradient(t)


def test_values():
    found = dynamo(lambda x, t: (x.exp() + t, x.exp() + t, x.exp() - t), *pair())
    found_by, root = recognizer(found.gm)
    _, same, other = found.gm.graph.find_nodes(op="output")[0].all_input_nodes
    replay = found_by.replay
    assert replay.same(replay.of(root), replay.of(same))
    assert not replay.same(replay.of(root), replay.of(other))
    left, right = (replay.resolve(replay.of(node)) for node in (root, same))
    assert computed_alike(left, left)
    assert not computed_alike(left, replay.resolve(replay.of(other)))
    assert computed_alike([1, 2.0], [1, 2.0])
    assert not computed_alike([1], [2])
    assert right.op is aten.add.Tensor


def test_put():
    found = dynamo(lambda x, t: x.exp() * 1, *pair())
    graph = found.gm.graph
    _, root = recognizer(found.gm)
    node = one(graph, "exp")
    size = put(Size(node, 1), root)
    assert size.args == (node, 1)
    assert size.next is root
    assert size.meta["example_value"] == 5
    assert size.meta["stack_trace"] == root.meta["stack_trace"]
    assert put(whole(node), root) is node
    assert put(3, root) == 3
    assert one(graph, operator.mul) is root
