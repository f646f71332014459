"""Which gradients of a weight become one sum, and the call that makes it."""

from __future__ import annotations

import json

import pytest
import torch

from compile_losses.lower.one_weight import ONE_GRADIENT, join_heads
from tests.passes.graphs import aten, fused, indexed, of_aten, one

ROWS, HIDDEN, CLASSES = 5, 4, 9
F64 = torch.float64


def loss(h, w, target, *, dtype=F64):
    """The loss and the gradients of hidden states and weight."""
    found = fused.linear_cross_entropy_with_grad(
        h, w, target, None, None, 2, -100, 0.0, None, 0.0, dtype, True, True, False
    )
    return found[:3]


def tensors(dtype=F64):
    generator = torch.Generator().manual_seed(0)
    h, other, w, trunk = (
        torch.randn(*shape, generator=generator, dtype=F64).to(dtype)
        for shape in ((ROWS, HIDDEN), (ROWS, HIDDEN), (CLASSES, HIDDEN), (HIDDEN, HIDDEN))
    )
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    return h, other, w, trunk, target, torch.tensor(2.0, dtype=dtype)


def joined(h, other, w, trunk, target, tangents_1):
    first, of_h, one = loss(h, w, target)
    late = (other @ trunk).sin()
    second, of_late, two = loss(late, w, target)
    total = fused.scale(one, tangents_1) + fused.scale(two, tangents_1)
    return first + second, fused.scale(of_h, tangents_1) + fused.scale(of_late, tangents_1), total


def read_between(h, other, w, trunk, target, tangents_1):
    """What is made of the first result stands before the second call."""
    first, _, one = loss(h, w, target)
    shown = first.exp() * 2
    second, _, two = loss(other, w, target)
    return shown, second, fused.scale(two, tangents_1) + fused.scale(one, tangents_1)


def beside_others(h, other, w, trunk, target, tangents_1):
    """Another gradient of the weight stands in the sum, and two of them first."""
    found = [loss(x, w, target) for x in (h, other, h + other)]
    one, two, three = (fused.scale(each[2], tangents_1) for each in found)
    embedding = w.cos() * tangents_1
    return found[0][0] + found[1][0] + found[2][0], (two + three) + (embedding + one)


def turned(h, other, w, trunk, target, tangents_1):
    first, _, one = loss(h, w, target)
    second, _, two = loss(other, w, target)
    total = fused.scale(one, tangents_1).t() + fused.scale(two.t(), tangents_1)
    return first + second, total


def by_ones(h, other, w, trunk, target, tangents_1):
    first, _, one = loss(h, w, target)
    second, _, two = loss(other, w, target)
    number = (tangents_1 * 1.0).view(1)
    return first + second, fused.scale(one, number) + fused.scale(two, tangents_1)


def in_the_backward(h, other, w, trunk, target, tangents_1):
    def gradients(x):
        options = (None, None, 2, -100, 0.0, None, 0.0, F64, True, True, False)
        return fused.linear_cross_entropy_backward(tangents_1, x, w, target, *options)

    of_other, one, _ = gradients(other)
    made = of_other @ trunk.t()
    of_h, two, _ = gradients(h)
    return made, of_h, one + two


JOINED = (joined, read_between, beside_others, turned, by_ones, in_the_backward)


def other_numbers(h, other, w, trunk, target, tangents_1):
    first, _, one = loss(h, w, target)
    second, _, two = loss(other, w, target)
    return first + second, fused.scale(one, tangents_1) + fused.scale(two, tangents_1 * 0.5)


def one_of_another(h, other, w, trunk, target, tangents_1):
    first, of_h, one = loss(h, w, target)
    second, _, two = loss(other + of_h, w, target)
    return first + second, fused.scale(one, tangents_1) + fused.scale(two, tangents_1)


def read_besides(h, other, w, trunk, target, tangents_1):
    first, _, one = loss(h, w, target)
    second, _, two = loss(other, w, target)
    return first + second, one, fused.scale(one, tangents_1) + fused.scale(two, tangents_1)


def between_random_numbers(h, other, w, trunk, target, tangents_1):
    first, _, one = loss(h, w, target)
    noise = torch.rand_like(first)
    second, _, two = loss(other, w, target)
    total = fused.scale(one, tangents_1) + fused.scale(two, tangents_1)
    return first + second, noise, total


def subtracted(h, other, w, trunk, target, tangents_1):
    first, _, one = loss(h, w, target)
    second, _, two = loss(other, w, target)
    return first + second, fused.scale(one, tangents_1) - fused.scale(two, tangents_1)


def turned_once(h, other, w, trunk, target, tangents_1):
    """A square matrix and a turned one."""
    w = w[:HIDDEN]
    target = target % HIDDEN
    first, _, one = loss(h, w, target)
    second, _, two = loss(other, w, target)
    return first + second, fused.scale(one, tangents_1) + fused.scale(two, tangents_1).t()


def of_parts_of_a_tangent(h, other, w, trunk, target, tangents_1):
    first, _, one = loss(h, w, target)
    second, _, two = loss(other, w, target)
    both = torch.stack([tangents_1, tangents_1 * 3])
    return first + second, fused.scale(one, both[0]) + fused.scale(two, both[1])


def held_until_the_last(h, other, w, trunk, target, tangents_1):
    """What the first call reads is larger than the weight."""
    h = h.sin().repeat(20, 1)
    first, _, one = loss(h, w, target.repeat(20))
    second, _, two = loss(other, w, target)
    return first + second, fused.scale(one, tangents_1) + fused.scale(two, tangents_1)


APART = (
    *(other_numbers, one_of_another, read_besides, between_random_numbers, subtracted),
    *(turned_once, of_parts_of_a_tangent, held_until_the_last),
)


def planned(function, given, **options):
    before, after = (of_aten(function, *given) for _ in range(2))
    graph = indexed(after, losses=(), **options)
    join_heads(graph)
    after.graph.lint()
    after.recompile()
    return before, after, graph.decisions


def calls_of(gm):
    return gm.graph.find_nodes(op="call_function", target=fused.joined_heads.default)


@pytest.mark.parametrize("function", JOINED)
def test_joined(function):
    given = tensors()
    before, after, decisions = planned(function, given, prefer_memory=True)
    one(after.graph, fused.joined_heads.default)
    assert not [n for n in after.graph.nodes if "linear_cross_entropy" in str(n.target)]
    torch.testing.assert_close(after(*given), before(*given), rtol=1e-12, atol=1e-12)
    count = 3 if function is beside_others else 2
    assert [d.choice for d in decisions] == [ONE_GRADIENT] * count
    assert {d.reason for d in decisions} == {f"a sum over {count} heads"}


@pytest.mark.parametrize("function", APART)
def test_apart(function):
    given = tensors()
    before, after, decisions = planned(function, given, prefer_memory=True)
    assert not calls_of(after)
    assert not decisions
    if function is not between_random_numbers:
        torch.testing.assert_close(after(*given), before(*given))


def test_sums_in_the_dtype_that_the_gradients_are_added_up_in():
    def function(h, other, w, trunk, target, tangents_1):
        found = [loss(x, w, target, dtype=torch.float32) for x in (h, other)]
        one, two = (fused.scale(each[2], tangents_1).float() for each in found)
        return found[0][0] + found[1][0], one + two

    _, after, _ = planned(function, tensors(torch.bfloat16), prefer_memory=True)
    call = one(after.graph, fused.joined_heads.default)
    assert json.loads(call.args[1])["dtype"] == "float32"
    assert call.meta["val"][-1].dtype == torch.float32
    assert not after.graph.find_nodes(op="call_function", target=aten._to_copy.default)
