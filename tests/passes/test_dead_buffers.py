"""Buffers that are not read, returned or saved after a call."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lower.dead_buffers import (
    can_go_before,
    gradient_overwritable,
    is_computed_where_it_stands,
    overwritable,
    readers_of_buffer,
)
from tests.passes.graphs import aten, fused, of_aten, one

CE = (None, 1, -100, 0.0, torch.float32)


def given():
    return torch.randn(8, 4), torch.randn(4, 6), torch.randint(6, (8,))


def loss_of(y, t):
    return fused.cross_entropy_with_grad(y, t, *CE)


def alone(x, w, t):
    return loss_of(x @ w, t)


def a_view(x, w, t):
    return loss_of((x @ w).view(2, 4, 6).view(-1, 6), t)


def given_logits(x, w, t):
    return loss_of(x.repeat(1, 2)[:, :6], t)


def an_input(x, w, t):
    return loss_of(x[:, :6], t)


def returned(x, w, t):
    y = x @ w
    return *loss_of(y, t), y.view(-1)


def read(x, w, t):
    y = x @ w
    return *loss_of(y, t), y.sum(1)


def copied(x, w, t):
    return loss_of((x @ w).t().reshape(8, 6), t)


def two_views(x, w, t):
    y = x @ w
    return *loss_of(y.view(8, 6), t), *loss_of(y.view(8, 6), t)


REASONS = {
    alone: None,
    a_view: None,
    an_input: "input is an input of the graph, too",
    given_logits: "repeat is not a matrix product",
    returned: "input is returned, or saved for the backward",
    read: "sum_1 reads input, too",
}


@pytest.mark.parametrize("function", REASONS, ids=lambda f: f.__name__)
def test_overwritable(function):
    gm = of_aten(function, *given())
    call = one(gm.graph, "fused.cross_entropy_with_grad")
    assert overwritable(call.args[0], {call}) == REASONS[function]


def test_donated_inputs():
    gm = of_aten(an_input, *given())
    call = one(gm.graph, "fused.cross_entropy_with_grad")
    assert overwritable(call.args[0], {call}, donated=(0,)) is None
    assert overwritable(call.args[0], {call}, donated=(1,)) is not None


def test_inputs_of_one_memory():
    gm = of_aten(lambda x, w, t: loss_of(w, t[:4]), *given())
    first, second, _ = gm.graph.find_nodes(op="placeholder")
    call = one(gm.graph, "fused.cross_entropy_with_grad")
    with second.meta["val"].fake_mode:
        first.meta["val"] = second.meta["val"].view(-1)
    found = overwritable(call.args[0], {call}, donated=(1,))
    assert found == "two inputs of the graph share its memory"


def test_two_readers_by_two_views():
    gm = of_aten(two_views, *given())
    calls = [n for n in gm.graph.nodes if "with_grad" in n.name and n.target is not None]
    calls = [n for n in calls if str(n.target) == "fused.cross_entropy_with_grad.default"]
    found = overwritable(calls[0].args[0], set(calls))
    assert found == "input is read through two views"


def test_readers_of_a_buffer():
    def step(x, w, t):
        y = x @ w
        return y.view(-1).sin(), y.t().cos(), y.clone()

    gm = of_aten(step, *given())
    names = {node.name for node in readers_of_buffer(one(gm.graph, aten.mm.default))}
    assert names == {"sin", "cos", "clone"}


def test_what_can_go_before():
    def step(x, w, t):
        y = x @ w
        loss, unit = loss_of(y, t)
        return loss, unit, y.argmax(1), y.sin(), (y + unit).amax(1)

    gm = of_aten(step, torch.randn(64, 4), torch.randn(4, 48), torch.randint(48, (64,)))
    earlier = can_go_before(one(gm.graph, "fused.cross_entropy_with_grad"))
    assert earlier(one(gm.graph, aten.argmax.default))
    assert not earlier(one(gm.graph, aten.sin.default))  # computed where it is read
    assert not earlier(one(gm.graph, aten.amax.default))  # of the gradient


def test_computed_where_it_stands():
    def step(x):
        return x.amax(1), x[:, :2].amax(1), x.double().amax(1), x.double(), x.sin()

    gm = of_aten(step, torch.randn(8, 40))
    wide, narrow, of_cast = gm.graph.find_nodes(op="call_function", target=aten.amax.default)
    assert is_computed_where_it_stands(wide)
    assert not is_computed_where_it_stands(narrow)  # Inductor unrolls it
    assert is_computed_where_it_stands(of_cast.args[0])
    assert not is_computed_where_it_stands(one(gm.graph, aten.sin.default))


def test_gradients():
    gm = of_aten(lambda g, h: (g * 2, h.sin(), h.cos()), torch.ones(3), torch.ones(3))
    inputs = gm.graph.find_nodes(op="placeholder")
    g, h = inputs
    assert gradient_overwritable(g, inputs, owned=True) is None
    assert "not the backward's own" in gradient_overwritable(g, inputs, owned=False)
    assert "read again" in gradient_overwritable(h, inputs, owned=True)
    (product,) = g.users
    assert "not saved by the forward" in gradient_overwritable(product, inputs, owned=True)
    h.meta["val"] = g.meta["val"]
    assert "not the backward's own" in gradient_overwritable(g, inputs, owned=True)
