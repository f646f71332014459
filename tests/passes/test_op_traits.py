"""What ops are, compared with what torch's own ops do and say."""

from __future__ import annotations

import pytest
import torch

from compile_losses import op_traits
from compile_losses.op_traits import FOLLOWED, TURNS, VIEWS, View, is_one_view, is_pointwise

aten = torch.ops.aten

#: Calls of views: a shape, the op, and its arguments but the first.
CALLS = [
    ((2, 3, 5), aten.permute.default, ([1, -1, 0],)),
    ((2, 3, 5), aten.transpose.int, (-1, 0)),
    ((2, 5), aten.t.default, ()),
    ((5,), aten.t.default, ()),
    ((2, 3, 5), aten.slice.Tensor, ()),
    ((2, 3, 5), aten.slice.Tensor, (-2, 1, 2)),
    ((2, 3, 5), aten.select.int, (1, 0)),
    ((2, 3, 5), aten.select.int, (-3, 0)),
    ((2, 3, 5), aten.unsqueeze.default, (0,)),
    ((2, 3, 5), aten.unsqueeze.default, (-1,)),
    ((2, 1, 5), aten.squeeze.dim, (1,)),
    ((2, 3, 5), aten.squeeze.dim, (1,)),
    ((2, 3, 5), aten.view.default, ([6, 5],)),
    ((2, 3, 5), aten.reshape.default, ([1, 6, 5],)),
    ((2, 3, 5), aten._unsafe_view.default, ([2, 15],)),
    ((2, 3, 5), aten.view.default, ([30],)),
]
#: The size of the dimension that is followed, of the second tensor.
OTHER = 7


@pytest.mark.parametrize(("shape", "op", "args"), CALLS)
def test_a_dimension_through_a_view(shape, op, args):
    """The same view of a tensor that has another size there has that size in the place found."""
    after = op(torch.empty(shape), *args).shape
    view = View(op, (None, *args), shape, after)
    for dim in range(len(shape)):
        place = view.place_of(dim)
        if place is None:
            continue
        other = [*shape[:dim], OTHER, *shape[dim + 1 :]]
        given = args
        if op in op_traits.RESHAPES:
            given = ([*after[:place], OTHER, *after[place + 1 :]],)
        expected = [*after[:place], OTHER, *after[place + 1 :]]
        assert list(op(torch.empty(other), *given).shape) == expected


def test_what_is_not_followed():
    def place(op, shape, dim, *args):
        after = op(torch.empty(shape), *args).shape
        return View(op, (None, *args), shape, after).place_of(dim)

    assert place(aten.slice.Tensor, (2, 5), 1, 1, 0, 3) is None
    assert place(aten.select.int, (2, 5), 1, -1, 0) is None
    assert place(aten.squeeze.dim, (2, 1), 1, 1) is None
    assert place(aten.view.default, (2, 6), 1, [4, 3]) is None
    assert place(aten.view.default, (2, 6), 0, [2, 6]) is None
    assert place(aten.expand.default, (1, 5), 1, [3, 5]) is None
    assert {op for _, op, _ in CALLS} == FOLLOWED


@pytest.mark.parametrize(("shape", "op", "args"), [call for call in CALLS if call[1] in TURNS])
def test_the_order_of_dimensions(shape, op, args):
    after = op(torch.empty(shape), *args).shape
    order = View(op, (None, *args), shape, after).order
    assert [shape[dim] for dim in order] == list(after)


def test_views_share_memory_by_their_schemas():
    """But for ``_unsafe_view``, whose schema hides it from autograd."""
    assert {op for op in VIEWS if not is_one_view(op)} == {aten._unsafe_view.default}
    assert op_traits.shares_memory(aten.split.Tensor)
    assert not is_one_view(aten.split.Tensor)
    assert op_traits.shares_memory(aten.add_.Tensor)
    assert not is_one_view(aten.add_.Tensor)
    assert not op_traits.shares_memory(torch.add)


def test_ops_of_elements():
    for op in (*op_traits.SCALINGS, *op_traits.SUMS):
        assert is_pointwise(op)
    assert not is_pointwise(aten.mm.default)
    assert not is_pointwise(torch.mul)


def test_the_dimensions_that_reductions_name():
    for op in (*op_traits.EXTREMES, aten.logsumexp.default, aten.sum.dim_IntList):
        ((place, _),) = op_traits.named_dims(op)
        assert place == (2 if op is aten.topk.default else 1)
    assert op_traits.named_dims(aten.topk.default) == ((2, -1),)
    assert op_traits.named_dims(aten.mul.Tensor) == ()
