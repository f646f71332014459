"""Products that are read by rows and by columns: what reads the columns gets one of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize.graph.memory import look_at
from compile_losses.recognize.heads.columns_apart import are_gone, read_columns_apart
from tests import contrastive_programs as programs
from tests.passes.graphs import dynamo, name_of
from tests.passes.outcomes import with_gradients


@pytest.fixture(autouse=True)
def small_chunks(chunks):
    chunks(8)


def apart(function, inputs):
    """The graph before and after, and the products that it then has."""
    before, after = (dynamo(function, *inputs) for _ in range(2))
    look_at(after.gm.graph)
    products = read_columns_apart(after.gm.graph)
    after.gm.graph.lint()
    after.gm.recompile()
    return before, after, products


def assert_same_numbers(after, before):
    found, right = (with_gradients(each.gm, each.inputs) for each in (after, before))
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        *((function, programs.PAIRS) for function in programs.APART),
        *((function, programs.MORE) for function in programs.UNEQUAL if function in programs.APART),
        (programs.hard_negatives, programs.MORE),
    ],
)
def test_columns_have_a_product_of_their_own(function, texts):
    inputs = programs.problem(texts=texts)
    before, after, products = apart(function, inputs)
    assert len(products) == 2
    assert not are_gone(products)
    assert_same_numbers(after, before)


def once_more(a, b, scale, *_):
    """Two transposed views share the second product."""
    logits = scale * (a @ b.T)
    columns = F.cross_entropy(logits.T, programs.own(logits)) - logits.t().logsumexp(-1).sum()
    return F.cross_entropy(logits, programs.own(logits)) + columns


def test_several_readers_of_the_columns():
    before, after, products = apart(once_more, programs.problem())
    assert len(products) == 2
    assert_same_numbers(after, before)


def cut_at_both_ends(a, b, scale, *_):
    """Of rows and of columns, before and after the product is scaled."""
    logits = a @ b.T
    columns = (logits[4:, -38:] * scale)[:, 1:].T
    return F.cross_entropy(logits * scale, programs.own(a)) + columns.logsumexp(-1).sum()


def steps_of_columns(a, b, scale, *_):
    logits = a @ b.T * scale
    return F.cross_entropy(logits, programs.own(a)) + logits[:, ::1].T.logsumexp(-1).sum()


@pytest.mark.parametrize("function", [cut_at_both_ends, steps_of_columns])
def test_slices(function):
    before, after, products = apart(function, programs.problem())
    assert len(products) == 2
    assert_same_numbers(after, before)


def accuracy_first(a, b, scale, *_):
    """The first that reads the columns records no gradients."""
    logits = scale * (a @ b.T)
    with torch.no_grad():
        right = logits.T.argmax(-1) == programs.own(logits)
    return programs.both(logits), right.double().mean()


def detached(a, b, scale, *_):
    logits = scale * (a @ b.T)
    with torch.no_grad():
        largest = logits.T.amax(-1)
    return programs.both(logits) + (a.sum(1) * largest).sum()


@pytest.mark.parametrize("function", [accuracy_first, detached])
def test_readers_without_gradients(function):
    before, after, products = apart(function, programs.problem())
    assert len(products) == 2
    assert_same_numbers(after, before)


def test_few_chunks(chunks):
    chunks(16)
    assert not apart(programs.open_clip, programs.problem())[2]


def returned(a, b, scale, *_):
    logits = scale * (a @ b.T)
    return programs.both(logits), logits.T


def written(a, b, scale, *_):
    logits = scale * (a @ b.T)
    columns = logits.T
    logits.mul_(2)
    return F.cross_entropy(logits, programs.own(logits)) + columns.logsumexp(-1).sum()


def scale_is_written(a, b, scale, *_):
    factor = scale.exp()
    logits = factor * (a @ b.T)
    with torch.no_grad():
        factor.add_(1)
    return programs.both(logits)


def a_scale_for_each_row(a, b, scale, rows, columns, weights, soft):
    return programs.both(weights[:, None] * (a @ b.T))


def a_mask(a, b, scale, *_):
    logits = a @ b.T
    return programs.both(logits.masked_fill(torch.eye(*logits.shape, dtype=torch.bool), -1e4))


def with_a_bias(a, b, scale, rows, columns, weights, soft):
    return programs.both(F.linear(a, b, weights[: len(b)]))


def few_columns(a, b, scale, *_):
    """They are less than chunks."""
    logits = a @ b.T
    return F.cross_entropy(logits, programs.own(a)) + logits[:, :20].T.logsumexp(-1).sum()


def picked_columns(a, b, scale, rows, columns, weights, soft):
    logits = a @ b.T
    picked = logits[:, columns.clamp(min=0)]
    return F.cross_entropy(logits, programs.own(a)) + picked.T.logsumexp(-1).sum()


def sliced_and_written(a, b, scale, *_):
    logits = a @ b.T
    columns = logits[:, :38].T
    loss = columns.logsumexp(-1).sum() + F.cross_entropy(logits.clone(), programs.own(a))
    with torch.no_grad():
        logits[0] = 0
    return loss


def by_columns_alone(a, b, scale, *_):
    return F.cross_entropy((a @ b.T).T, programs.own(b))


def of_many(a, b, scale, *_):
    logits = torch.stack([a, -a]) @ b.T
    return logits.logsumexp(-1).sum() + logits.transpose(1, 2).logsumexp(-1).sum()


def in_place(a, b, scale, *_):
    logits = a @ b.T
    return logits.logsumexp(-1).sum() + logits.T.exp_().sum()


@pytest.mark.parametrize(
    "function",
    [
        returned,
        written,
        scale_is_written,
        a_scale_for_each_row,
        a_mask,
        with_a_bias,
        few_columns,
        picked_columns,
        sliced_and_written,
        by_columns_alone,
        of_many,
        in_place,
    ],
)
def test_near_misses(function):
    before, after, products = apart(function, programs.problem())
    assert not products
    assert [name_of(n.target) for n in before.gm.graph.nodes] == [
        name_of(n.target) for n in after.gm.graph.nodes
    ]
