"""Losses of a product by rows and by columns: one call computes both."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize import rewrite
from tests import contrastive_programs as programs
from tests.constants import set_constants
from tests.passes.graphs import dynamo
from tests.passes.outcomes import with_gradients

fused = torch.ops.fused
JOINED = fused.two_way_cross_entropy.default


@pytest.fixture(autouse=True)
def small_chunks(chunks):
    chunks(8)


def rewritten(function, inputs, **options):
    """The graph before and after, and the ops of its losses."""
    before, after = (dynamo(function, *inputs) for _ in range(2))
    rewrite(after.gm, lowers=True, **options)
    after.gm.graph.lint()
    sites = after.gm.meta["compile_losses"].losses
    return before, after, [site.op for site in sites if site.status == "rewritten"]


def check(function, inputs, joined=1, **options):
    before, after, ops = rewritten(function, inputs, **options)
    assert len(after.gm.graph.find_nodes(op="call_function", target=JOINED)) == joined
    assert ops.count("two_way_cross_entropy") == joined
    found, right = (with_gradients(each.gm, each.inputs) for each in (after, before))
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    return after.gm.graph


ONE_PRODUCT = [
    *(programs.open_clip, programs.transformers_clip, programs.scaled_after, programs.widened),
    *(programs.divided, programs.smoothed, programs.symmetric_ranking),
]


@pytest.mark.parametrize("function", ONE_PRODUCT)
def test_products_that_are_read_by_columns(function):
    graph = check(function, programs.problem(), prefer_memory=True)
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    check(function, programs.problem(), joined=0)


def test_several_products():
    check(programs.widths, programs.problem(), joined=2, prefer_memory=True)


def two_products(a, b, scale, *_):
    """open_clip's, of features that are not gathered."""
    image, text = scale * a @ b.T, scale * b @ a.T
    loss = F.cross_entropy(image, programs.own(image)) + F.cross_entropy(text, programs.own(text))
    return loss / 2


def with_sums(a, b, scale, rows, columns, *_):
    by_rows = F.cross_entropy(a @ b.T / scale, rows, reduction="sum")
    return by_rows + F.cross_entropy(b @ a.T / scale, columns, reduction="sum")


def with_each_row(a, b, scale, rows, columns, *_):
    by_rows = F.cross_entropy(a @ b.T, rows, reduction="none")
    return by_rows.square().sum() + F.cross_entropy(b @ a.T, columns, reduction="none").sin().sum()


def negated(a, b, scale, rows, columns, *_):
    return F.cross_entropy(-a @ b.T, rows) + F.cross_entropy(b @ -a.T, columns)


def targets_later(a, b, scale, rows, columns, *_):
    by_rows = F.cross_entropy(a @ b.T, rows)
    shifted = torch.where(columns < 0, columns, (columns + 1) % len(a))
    return by_rows + F.cross_entropy(b @ a.T, shifted)


def three(a, b, scale, rows, columns, *_):
    """Two of them are a pair."""
    by_rows = F.cross_entropy(a @ b.T, rows) + F.cross_entropy(2 * a @ b.T, rows)
    return by_rows + F.cross_entropy(b @ (2 * a).T, columns)


@pytest.mark.parametrize(
    "function", [two_products, with_sums, with_each_row, negated, targets_later, three]
)
def test_products_of_a_program(function):
    texts = programs.PAIRS if function is two_products else programs.MORE
    check(function, programs.problem(texts=texts))


def test_autocast():
    _, _, ops = rewritten(programs.autocast(two_products), programs.problem(torch.float32))
    assert ops == ["two_way_cross_entropy"]


def another_scale(a, b, scale, rows, columns, *_):
    return F.cross_entropy(a @ b.T * scale, rows) + F.cross_entropy(b @ a.T * 3, columns)


def scaled_twice(a, b, scale, rows, columns, *_):
    by_columns = F.cross_entropy(scale * b @ (a * scale).T, columns)
    return F.cross_entropy(a @ b.T * scale, rows) + by_columns


def another_sign(a, b, scale, rows, columns, *_):
    return F.cross_entropy(a @ b.T, rows) + F.cross_entropy(-b @ a.T, columns)


def same_direction(a, b, scale, rows, columns, *_):
    return F.cross_entropy(a @ b.T, rows) + F.cross_entropy((b @ a.T).T, rows)


def other_options(a, b, scale, rows, columns, *_):
    by_columns = F.cross_entropy(b @ a.T, columns, label_smoothing=0.1)
    return F.cross_entropy(a @ b.T, rows) + by_columns


def class_weights(a, b, scale, rows, columns, weights, soft):
    by_columns = F.cross_entropy(b @ a.T, columns, weight=weights)
    return F.cross_entropy(a @ b.T, rows) + by_columns


def a_bias(a, b, scale, rows, columns, weights, soft):
    return F.cross_entropy(a @ b.T, rows) + F.cross_entropy(F.linear(b, a, weights), columns)


def other_rows(a, b, scale, rows, columns, *_):
    by_columns = F.cross_entropy(b @ a.flip(0).T, columns)
    return F.cross_entropy(a @ b.T, rows) + by_columns


def divided_by_it(a, b, scale, rows, columns, *_):
    return F.cross_entropy(a @ b.T * scale, rows) + F.cross_entropy(b @ a.T / scale, columns)


def scaled_by_rows(a, b, scale, rows, columns, weights, soft):
    a_scaled = a * weights[:, None]
    return F.cross_entropy(a_scaled @ b.T, rows) + F.cross_entropy(b @ a.T, columns)


def without_gradient(a, b, scale, rows, columns, *_):
    with torch.no_grad():
        metric = F.cross_entropy(a @ b.T, rows)
    return metric + F.cross_entropy(b @ a.T, columns)


def written_between(a, b, scale, rows, columns, *_):
    a = a * 1
    by_rows = F.cross_entropy(a @ b.T, rows)
    with torch.no_grad():
        a.mul_(2)
    return by_rows.detach() + F.cross_entropy(b @ a.T, columns)


def squared(a, b, scale, rows, columns, *_):
    """Of a product with itself nothing is left when the operand is taken out."""
    return F.cross_entropy(a * a @ b.T, rows) + F.cross_entropy(b @ -a.T, columns)


def operand_written(a, b, scale, rows, columns, *_):
    a, b = a.detach().clone(), b.detach()
    by_rows = F.cross_entropy(a @ b.T, rows)
    a.mul_(2)
    return by_rows + F.cross_entropy(b @ a.T, columns) + scale


def source_written(a, b, scale, rows, columns, *_):
    """Between the losses, and between the operands that are computed alike."""
    a, b = a.detach().clone(), b.detach()
    by_rows = F.cross_entropy((a * 3) @ b.T, rows)
    a.mul_(2)
    return by_rows + F.cross_entropy(b @ (a * 3).T, columns) + scale


def source_written_before(a, b, scale, rows, columns, *_):
    a, b = a.detach().clone(), b.detach()
    scaled = a * 3
    a.mul_(2)
    by_rows = F.cross_entropy(scaled @ b.T, rows)
    return by_rows + F.cross_entropy(b @ (a * 3).T, columns) + scale


def factor_written(a, b, scale, rows, columns, *_):
    a, b, factor = a.detach(), b.detach(), scale.detach().clone()
    by_rows = F.cross_entropy(a @ b.T * factor, rows)
    factor.mul_(2)
    return by_rows + F.cross_entropy(b @ a.T * factor, columns) + scale


def target_written(a, b, scale, rows, columns, *_):
    columns = columns.clone()
    by_rows = F.cross_entropy(a @ b.T, rows)
    columns[3] = 1
    return by_rows + F.cross_entropy(b @ a.T, columns)


def target_of_the_loss(a, b, scale, rows, columns, *_):
    by_rows = F.cross_entropy(a @ b.T, rows)
    shifted = columns.clamp(min=0) * (by_rows > 0)
    return by_rows + F.cross_entropy(b @ a.T, shifted)


NEAR_MISSES = [
    *(another_scale, scaled_twice, another_sign, same_direction, other_options, class_weights),
    *(a_bias, other_rows, divided_by_it, scaled_by_rows, without_gradient, written_between),
    *(operand_written, source_written, source_written_before, factor_written, target_written),
    *(target_of_the_loss, squared),
]


@pytest.mark.parametrize("function", NEAR_MISSES)
def test_near_misses(function):
    check(function, programs.problem(texts=programs.MORE), joined=0)


def test_products_that_do_not_fit(monkeypatch):
    """Of them two are computed, though memory is not preferred."""
    inputs = programs.problem(torch.float32)
    matrix = programs.PAIRS**2 * 4
    for memory, joined in ((2 * matrix, 0), (2 * matrix - 1, 1), (None, 0)):
        monkeypatch.setattr("compile_losses.device_constants.memory_of", lambda device, m=memory: m)
        _, after, _ = rewritten(programs.open_clip, inputs)
        assert len(after.gm.graph.find_nodes(op="call_function", target=JOINED)) == joined


def test_losses_that_stay_two(monkeypatch):
    """Without memory preferred, two products are not worth the time if two calls compute them."""
    monkeypatch.setattr("compile_losses.device_constants.memory_of", lambda device: 1)
    for prefer_memory, expected in ((False, "cross_entropy"), (True, "linear_cross_entropy")):
        *_, ops = rewritten(programs.labelled, programs.problem(), prefer_memory=prefer_memory)
        assert set(ops) == {expected}


def test_few_rows(monkeypatch):
    """Of one chunk the matrix is held."""
    set_constants(monkeypatch, least_rows=64)
    *_, ops = rewritten(programs.open_clip, programs.problem(), prefer_memory=True)
    assert ops == ["cross_entropy"] * 2
