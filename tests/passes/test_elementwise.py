"""Gradients of elementwise losses that move into the forward: what is found, refused and moved."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from compile_losses.lower.elementwise import drop_markers, move_gradients, scalar_tangents
from compile_losses.lower.elementwise.find import find_parts, linear_part
from compile_losses.lower.elementwise.refuse import (
    is_materialised,
    memory_for,
    refusal,
    refusal_to_share,
)
from compile_losses.lower.elementwise.rows import find_sums, rows_to_keep, sum_in_rows
from compile_losses.lower.node_relations import depends_on_tangents
from tests.constants import set_constants
from tests.corpus.capture import SMALL, inputs_for
from tests.passes.graphs import aten, fused, indexed, of_aten, one, returned, text
from tests.passes.outcomes import assert_same, results_of

ROWS, COLUMNS = 8, 16


def given():
    return torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS), torch.tensor(2.0)


def square(x, t, tangents_1):
    """The loss, and its gradient as autograd writes it."""
    d = x - t
    return (d * d).sum(), tangents_1.expand(ROWS, COLUMNS) * 2 * d


def test_the_part_of_a_tangent():
    gm = of_aten(square, *given())
    (part,) = find_parts(indexed(gm))
    assert part.tangent is scalar_tangents(gm.graph)[0]
    assert [n.name for n in part.nodes] == ["expand", "mul_1", "mul_2"]
    assert [n.name for n in part.gradients] == ["mul_2"]
    assert [n.name for n in part.operands] == ["sub"]
    assert [n.name for n in indexed(gm).forward_outputs] == ["sum_1"]
    assert part.of([]).nodes == ()


#: Functions of a tangent that is expanded, d, and what is known, x.
LINEAR = {
    "product": lambda d, x: d * x,
    "quotient": lambda d, x: d / x,
    "negative": lambda d, x: -d,
    "sum": lambda d, x: d * x + d,
    "difference": lambda d, x: d - d * x,
    "chosen": lambda d, x: torch.where(x > 0, d, 0.0),
    "transposed": lambda d, x: d.t().clone(),
    "cast": lambda d, x: d.double(),
}
OTHERS = {
    "square": lambda d, x: d * d,
    "divided by it": lambda d, x: x / d,
    "a number added": lambda d, x: d + 1,
    "a tensor added": lambda d, x: d + x,
    "function": lambda d, x: d.exp(),
    "chosen by it": lambda d, x: torch.where(d > 0, d, 0.0),
    "a number chosen": lambda d, x: torch.where(x > 0, d, 1.0),
    "rounded": lambda d, x: torch.div(d, x, rounding_mode="floor"),
    "summed up": lambda d, x: d.sum(1),
    "part": lambda d, x: d[1:],
    "bounded": lambda d, x: d.clamp(min=0),
}
OF_ROWS = {
    "padded": (lambda d, x: aten.constant_pad_nd(d, [0, 0, 1, 0]), True),
    "padded with ones": (lambda d, x: aten.constant_pad_nd(d, [0, 0, 1, 0], 1.0), False),
    "summed up": (lambda d, x: d.sum(1), True),
    "part": (lambda d, x: d[1:], True),
    "joined": (lambda d, x: torch.cat([d, d]), True),
    "joined with another": (lambda d, x: torch.cat([d, x]), False),
    "scattered": (lambda d, x: torch.slice_scatter(torch.zeros_like(x), d[1:], 0, 1), True),
    "scattered over another": (lambda d, x: torch.slice_scatter(x, d[1:], 0, 1), False),
}


def last_is_linear(function, **options):
    gm = of_aten(
        lambda x, tangents_1: function(tangents_1.expand(4, 4), x),
        torch.ones(4, 4),
        torch.tensor(1.0),
    )
    (tangent,) = scalar_tangents(gm.graph)
    return returned(gm.graph)[0] in linear_part(tangent, depends_on_tangents(gm.graph), **options)


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_linear(name):
    assert last_is_linear({**LINEAR, **OTHERS}[name]) == (name in LINEAR)


@pytest.mark.parametrize("name", OF_ROWS)
def test_linear_by_rows(name):
    function, expected = OF_ROWS[name]
    assert last_is_linear(function, moves=True) == expected
    assert not last_is_linear(function)


def moved(gm):
    """The decisions."""
    graph = indexed(gm)
    move_gradients(graph)
    return graph.decisions


def check(function, *inputs, choice="gradient in forward", reason=""):
    """The decision, the graph and its numbers; a marker returns its arguments."""
    gm = of_aten(function, *(inputs or given()))
    numbers = inputs_for(gm)
    right = results_of(gm, numbers)
    (decision,) = moved(gm)
    assert (decision.choice, reason in decision.reason) == (choice, True), decision
    gm.graph.lint()
    drop_markers(indexed(gm))
    gm.recompile()
    assert_same(results_of(gm, numbers), right)
    return gm, decision


def test_moved():
    gm, decision = check(square)
    size = ROWS * COLUMNS * 4
    assert (decision.cost.moved, decision.stock.moved) == (3 * size + 4, 5 * size + 8)
    assert_expected_inline(
        text(gm.graph),
        """\
sub = aten.sub.Tensor(x_1, t_1)
mul = aten.mul.Tensor(sub, sub)
sum_dim_int_list = aten.sum.dim_IntList(mul, (1,), True)
sum_default = aten.sum(sum_dim_int_list)
full_default = aten.full((), 1, dtype=torch.float32, device=cpu, layout=torch.strided)
expand_1 = aten.expand(full_default, (8, 16))
mul_3 = aten.mul.Tensor(expand_1, 2)
mul_4 = aten.mul.Tensor(mul_3, sub)
scale_default = fused.scale(mul_4, tangents_1_1)
return (sum_default, scale_default)""",
    )


def test_two_gradients():
    def both(x, t, tangents_1):
        loss, of_x = square(x, t, tangents_1)
        return loss, of_x, -of_x

    gm, _ = check(both)
    assert text(gm.graph).count("fused.scale(") == 2


def test_a_mean_with_a_factor():
    def mean(x, t, tangents_1):
        d = x - t
        of_d = (tangents_1 * 0.5 / d.numel()).expand(ROWS, COLUMNS)
        return 0.5 * (d.abs() + 1).log().mean(), of_d * d.sign() / (d.abs() + 1)

    check(mean)


def keeps(function, words, *inputs):
    gm, _ = check(function, *inputs, choice="gradient in backward", reason=words)
    assert "keep_gradient" not in text(gm.graph)


def test_operands_of_a_reduction_stay():
    def softmax(x, t, tangents_1):
        p = (x - x.amax(1, keepdim=True)).exp()
        return (p * t).sum(), tangents_1 * p * t

    keeps(softmax, "in the same loop")


def test_random_numbers_of_the_backward_stay():
    def noisy(x, t, tangents_1):
        return (x * t).sum(), tangents_1 * torch.bernoulli(t.sigmoid()) * x

    gm = of_aten(noisy, *given())
    (decision,) = moved(gm)
    assert "random numbers" in decision.reason


def test_written_operands_stay():
    def written(x, t, tangents_1):
        loss, gradient = square(x, t, tangents_1)
        x.copy_(t)
        return loss, gradient

    keeps(written, "changed in place")


def test_float16_stays():
    def half(x, t, tangents_1):
        return (x * t).sum(), tangents_1 * t

    x, t, _ = given()
    keeps(half, "underflow in float16", x.half(), t.half(), torch.tensor(1.0).half())


def test_kept_where_memory_is_preferred():
    """Of inputs of the graph, which the caller may hold."""
    graph = indexed(of_aten(square, *given()), prefer_memory=True)
    move_gradients(graph)
    (decision,) = graph.decisions
    assert decision.choice == "gradient in backward"
    assert "memory is preferred" in decision.reason


def behind_a_product(x, t, tangents_1):
    y = x @ t.t()
    return (y * y).sum(), (tangents_1 * 2 * y) @ t


def test_what_the_forward_made_is_written_over():
    gm = of_aten(behind_a_product, *given())
    right = results_of(gm, inputs_for(gm))
    (decision,) = moved(gm)
    assert decision.choice == "gradient in forward"
    assert_same(results_of(gm, inputs_for(gm)), right)
    marker = one(gm.graph, fused.keep_gradient.default)
    assert marker.args[2].target is aten.mm.default


def through_another_layer(x, t, tangents_1):
    y = x @ t.t()
    return (y * y).sum() + (y @ x).sum(), (tangents_1 * 2 * y) @ t


def of_another_dtype(x, t, tangents_1):
    y = x @ t.t()
    return (y * y).sum(), (tangents_1 * 2 * y).bfloat16() @ t.bfloat16()


def not_a_product(x, t, tangents_1):
    y = x.cumsum(1)
    return (y * y).sum(), (tangents_1 * 2 * y) @ t.t()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (through_another_layer, "mm_1 reads mm, too"),
        (of_another_dtype, "none of it has the layout of"),
        (not_a_product, "none of it is a matrix product or a convolution"),
    ],
)
def test_what_else_reads_it_stays(function, words):
    gm = of_aten(function, *given())
    (decision, *_) = moved(gm)
    assert decision.choice == "gradient in backward"
    assert words in decision.reason


def test_the_write_comes_before_the_sums():
    def forward(x, t):
        y = x @ t.t()
        loss = (y * y).sum(1, keepdim=True).sum()
        found = fused.keep_gradient(loss, 2 * y, y)
        return found[0], found[1]

    gm = of_aten(forward, *given()[:2])
    right = results_of(gm, inputs_for(gm))
    drop_markers(indexed(gm))
    gm.graph.lint()
    gm.recompile()
    assert_same(results_of(gm, inputs_for(gm)), right)
    assert_expected_inline(
        text(gm.graph),
        """\
t = aten.t(t_1)
mm = aten.mm(x_1, t)
mul = aten.mul.Tensor(mm, mm)
mul_1 = aten.mul.Tensor(mm, 2)
write_over_default = fused.write_over(mm, mul_1)
sum_1 = aten.sum.dim_IntList(mul, (1,), True)
sum_2 = aten.sum(sum_1)
return (sum_2, mm)""",
    )


def test_what_is_read_later_is_not_written_over():
    def forward(x, t):
        y = x @ t.t()
        found = fused.keep_gradient((y * y).sum(), 2 * y, y)
        return found[0], found[1], y @ x

    gm = of_aten(forward, *given()[:2])
    drop_markers(indexed(gm))
    assert "write_over" not in text(gm.graph)


@pytest.mark.parametrize("columns", [3, 64])
def test_gradients_of_more_than_what_is_read(columns):
    x, t = torch.randn(64, 1), torch.randn(1, columns)

    def of_vectors(x, t, tangents_1):
        return (x * t).sum(), tangents_1 * (x * t)

    keeps(of_vectors, "more memory than what they are computed from", x, t, torch.tensor(1.0))


def test_refusals():
    gm = of_aten(square, *given())
    graph = indexed(gm)
    (part,) = find_parts(graph)
    loss = one(gm.graph, aten.sum.default)
    assert refusal(graph, part, [loss], overwrites=True) is None
    assert refusal(graph, part, [loss], overwrites=False) is None
    assert refusal_to_share(part, part) is None
    assert memory_for(graph, part) == []
    assert is_materialised(part.gradients[0])
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert "budget" in refusal(graph, part, [loss], overwrites=True)
    with torch._inductor.config.patch("triton.cudagraphs", True):
        assert refusal(graph, part, [loss], overwrites=True) is None
        assert "CUDA graph" in refusal(graph, part, [loss], overwrites=False)


def test_nothing_that_pays(monkeypatch):
    for changes in ({"least_gradient_bytes": 1 << 20}, {"moves_gradients": False}):
        set_constants(monkeypatch, **{**SMALL, **changes})
        assert moved(of_aten(square, *given())) == []


def test_gradients_that_are_fused():
    def read(x, t, tangents_1):
        loss, gradient = square(x, t, tangents_1)
        return loss, gradient.sin().sum(1)

    assert moved(of_aten(read, *given())) == []


#: The dimensions that are summed up first, and whether these are all.
SUMS = {
    "sum": (lambda x: x.sum(), (1,), False),
    "mean": (lambda x: x.mean(), (1,), False),
    "of rows": (lambda x: x.sum(1).mean(), (1,), True),
    "of columns": (lambda x: x.sum(0).sum(), None, None),
    "of transposed": (lambda x: x.t().sum(), (0,), False),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums(name):
    function, row, whole = SUMS[name]
    gm = of_aten(lambda x: function(x.sin()), torch.randn(ROWS, COLUMNS))
    (loss,) = returned(gm.graph)
    sine = one(gm.graph, aten.sin.default)
    like = sine.meta["val"].t() if name == "of transposed" else sine.meta["val"]
    found = find_sums(loss, [like], set())
    if row is None:
        assert isinstance(found, str)
        return
    (sum_,) = found
    assert (sum_.row, sum_.is_whole) == (row, whole)
    x = torch.randn(ROWS, COLUMNS)
    right = gm(x)
    sum_in_rows(found, loss)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(x), right)


def test_rows_of_two_dimensions():
    gm = of_aten(lambda x: x.sin().sum(), torch.randn(4, 8, 8))
    (loss,) = returned(gm.graph)
    (found,) = find_sums(loss, [one(gm.graph, aten.sin.default).meta["val"]], set())
    assert found.row == (1, 2)


def test_rows_are_not_longer_than_a_loop():
    gm = of_aten(lambda x: x.sin().sum(), torch.randn(4, 4, 64))
    (loss,) = returned(gm.graph)
    (found,) = find_sums(loss, [one(gm.graph, aten.sin.default).meta["val"]], set())
    assert found.row == (2,)
    gm = of_aten(lambda x: x.sin().sum(), torch.randn(1, 65))
    (loss,) = returned(gm.graph)
    assert isinstance(find_sums(loss, [one(gm.graph, aten.sin.default).meta["val"]], set()), str)


def test_loops_that_are_merged(monkeypatch):
    """The gradient reads a number of each row, before the sum."""
    assert rows_to_keep(*_sums_and_part()) is None
    set_constants(monkeypatch, **{**SMALL, "merges_loops": True})
    rows = rows_to_keep(*_sums_and_part())
    assert rows.shape == (ROWS, 1)
    gm, _ = check(square)
    assert "fused.row_ones([8, 1]" in text(gm.graph) or "fused.row_ones((8, 1)" in text(gm.graph)
    set_constants(monkeypatch, **{**SMALL, "merges_loops": True, "most_functions": 2})
    assert "so many functions" in rows_to_keep(*_sums_and_part())


def _sums_and_part():
    gm = of_aten(square, *given())
    (part,) = find_parts(indexed(gm))
    values = [g.meta["val"] for g in part.gradients]
    return find_sums(one(gm.graph, aten.sum.default), values, set()), part
