"""Tensors that a rewrite computes: their examples, their sources, and their nodes."""

from __future__ import annotations

import torch

from compile_losses.recognize.graph.aten_replay import compute
from compile_losses.recognize.graph.symbolic_tensors import (
    Size,
    computed_alike,
    computed_at,
    example,
    examples,
    has_gradient,
    put,
    sources,
    whole,
)
from tests.passes.graphs import aten, dynamo, one, recognizer, returned, text


def graph():
    gm = dynamo(
        lambda x, t: (x.exp() + t, t * 2), torch.randn(3, 4, requires_grad=True), torch.randn(4)
    ).gm
    found_by, _ = recognizer(gm)
    return gm, found_by.replay


def test_examples():
    gm, _ = graph()
    x, _ = gm.graph.find_nodes(op="placeholder")
    assert example(x) is example(whole(x))
    assert example(Size(x, 1)) == 4
    assert examples(([Size(x, 0)], {"a": 2.5})) == ([3], {"a": 2.5})


def test_sources():
    gm, replay = graph()
    x, t = gm.graph.find_nodes(op="placeholder")
    total, _ = returned(gm.graph)
    value = replay.of(total)
    value.whole = False
    assert list(sources((value, Size(t, 0)))) == [one(gm.graph, "exp"), t, t]
    assert list(computed_at((value,))) == [total]
    made = compute(aten.neg.default, whole(x))
    assert list(sources(made)) == [x]
    assert list(computed_at(made)) == []
    assert has_gradient(made)
    assert not has_gradient(t)


def test_alike():
    gm, _ = graph()
    x, t = (whole(node) for node in gm.graph.find_nodes(op="placeholder"))
    assert computed_alike(compute(aten.mul.Tensor, x, 2), compute(aten.mul.Tensor, x, 2))
    assert not computed_alike(compute(aten.mul.Tensor, x, 2), compute(aten.mul.Tensor, x, 3))
    assert not computed_alike(compute(aten.neg.default, x), compute(aten.neg.default, t))
    assert not computed_alike(compute(aten.neg.default, x), compute(aten.exp.default, x))
    assert not computed_alike([1, 2], [1])
    assert not computed_alike(1, 1.0)
    assert not computed_alike(1, True)


def test_put():
    gm, _ = graph()
    x, _ = gm.graph.find_nodes(op="placeholder")
    total, _ = returned(gm.graph)
    value = compute(aten.mul.Tensor, compute(aten.neg.default, whole(x)), 2.0)
    node = put(value, total)
    size = put(Size(x, 1), total)
    assert node < total
    assert list(example(node).shape) == [3, 4]
    assert example(size) == 4
    lines = text(gm.graph).splitlines()
    assert "mul_tensor = aten.mul.Tensor(neg_default, 2.0)" in lines
    assert put(2.5, total) == 2.5
    assert put(whole(x), total) is x
