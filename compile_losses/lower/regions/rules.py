"""The rules of ops: how each kind of op that keeps rows apart is computed of a chunk of rows.

A rule is asked about a node that calls its op. It says how the node is computed, or None if the op
mixes rows there, or reads what no step can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.lower.node_relations import filled_with, view_of
from compile_losses.lower.regions.steps import (
    CLASSES,
    COLUMN,
    LOGITS,
    NONE,
    NUMBER,
    Read,
    Step,
    same,
    same_shape,
    with_one,
)
from compile_losses.op_traits import FILLED, SAME_IF_AS_MANY, SCATTERS, TURNS
from compile_losses.ops.linear.region_program import (
    INDEXED,
    REDUCTIONS,
    REDUCTIONS_OF_ONE,
    SPREAD,
)
from compile_losses.torch_internals.ops import named_arguments, schema_of

if TYPE_CHECKING:
    from compile_losses.lower.regions.rows import Rows

aten = torch.ops.aten

#: Says how a node of some rows is computed, by its value and the axis of its classes.
Rule: TypeAlias = "Callable[[Rows, Node, Tensor, int], Step | None]"


def _in_another_shape(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """The same numbers in the same order; or a column's for all classes."""
    source = node.args[0]
    if not isinstance(source, Node):
        return None
    kind = rows.look_at(source, axis)
    like = rows.of_size(value.shape[axis]) if rows.is_logits(value, axis) else None
    spreads = node.target is aten.expand.default and like is not None
    if kind is None:
        spread = rows.read(source, LOGITS, value.shape, axis) if spreads else None
        if spread is None or spread.kind == LOGITS:
            return None
        return Step(LOGITS, SPREAD, (spread, like), axis=axis)
    read = rows.as_it_is(source)
    if kind == LOGITS:
        is_same = same_shape(value.shape, read.shape)
        new = read.axis if is_same else _axis_after(read, value.shape)
        return None if new is None else Step(LOGITS, None, (read,), axis=new)
    if rows.is_column(value):
        return Step(COLUMN, None, (read,))
    if spreads and same_shape(read.shape, with_one(value.shape, axis)):
        return Step(LOGITS, SPREAD, (read, like), axis=axis)
    return None


def _cut(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """A part of the classes, one after another; or as many numbers as there were."""
    named = named_arguments(node)
    source, dim, start, end = (named[name] for name in ("self", "dim", "start", "end"))
    if not isinstance(source, Node):
        return None
    if same(source.meta["val"].numel(), value.numel()):
        return _in_another_shape(rows, node, value, axis)
    if named["step"] != 1 or isinstance(start, Node) or isinstance(end, Node):
        return None
    return _part(rows, node, source, dim, aten.slice.Tensor, (1, start, end))


def _looked_up(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """Classes that an index picks, the same of all rows; or what a table has of each row."""
    source: Any
    indices: Any
    source, indices = node.args
    given = [place for place, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return None
    (place,) = given
    index, table = indices[place], source.meta["val"]
    if table.dim() > 1:
        return _picked(rows, node, source, place, index)
    of_table = _known_vector(rows, source)
    if of_table is None or not rows.is_column(value) or rows.look_at(index) != COLUMN:
        return None
    if index.meta["val"].dtype != torch.int64:
        return None
    return Step(COLUMN, aten.index.Tensor, (of_table, [rows.as_it_is(index)]))


def _selected(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    source, dim, index = node.args
    return _picked(rows, node, source, dim, index)


def _picked(rows: Rows, node: Node, source: Any, dim: Any, index: Any) -> Step | None:
    """The classes that an index picks, the same of all rows."""
    of_index = _known_vector(rows, index)
    if of_index is None or index.meta["val"].dtype != torch.int64 or not isinstance(source, Node):
        return None
    selects = node.target is aten.index_select.default
    args = (1, of_index) if selects else ([None, of_index],)  # one of both takes negative places
    return _part(rows, node, source, dim, node.target, args)


def _known_vector(rows: Rows, node: Any) -> Read | None:
    """How all rows read the same vector; None if it is none, or not known before."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or value.dim() != 1:
        return None
    # What was looked at here and is not of the rows will never be.
    is_known = rows.look_at(node) is None and node not in rows.made
    return Read(node, CLASSES, tuple(value.shape)) if is_known else None


def _part(
    rows: Rows, node: Node, source: Node, dim: int, op: Any, args: Sequence[Any]
) -> Step | None:
    """A part of the classes.

    Args:
        op, args: what picks it, and what the op takes after the source.
    """
    value, of_source = node.meta["val"], source.meta["val"]
    axis = dim % of_source.dim() - of_source.dim()
    classes = value.shape[axis]
    if value.dim() != of_source.dim() or not isinstance(classes, int) or classes < 2:
        return None
    if rows.look_at_whole(source, axis) != LOGITS:
        return None
    read = rows.as_it_is(source)
    if read.axis != axis:
        return None
    rows.sizes.setdefault(classes, node)
    return Step(LOGITS, op, (read, *args), axis=axis)


def _put(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """Numbers of some classes that are added to those of all: the gradient of a part."""
    named = named_arguments(node)
    dim: Any
    if node.target is aten.index_put.default:
        base, indices, source = named["self"], named["indices"], named["values"]
        places = [place for place, index in enumerate(indices) if index is not None]
        if not named["accumulate"] or len(places) != 1:
            return None
        dim, index = places[0], indices[places[0]]
    else:
        base, dim, index, source = node.args
        if named["alpha"] != 1:
            return None
    of_index = _known_vector(rows, index)
    both = _whole_and_part(rows, value, base, source, dim)
    if both is None or of_index is None or index.meta["val"].dtype != torch.int64:
        return None
    whole, part, axis = both
    args = (whole, [None, of_index], part, True)
    if node.target is aten.index_add.default:
        args = (whole, 1, of_index, part)  # type: ignore[assignment]
    return Step(LOGITS, node.target, args, axis=axis)


def _whole_and_part(
    rows: Rows, value: Tensor, base: Any, source: Any, dim: int
) -> tuple[Read, Read, int] | None:
    """How logits and a part of the classes are read that is put into them; and the axis."""
    axis = dim % value.dim() - value.dim()
    if not rows.is_logits(value, axis):
        return None
    if rows.look_at(base, axis) != LOGITS or rows.look_at(source, axis) != LOGITS:
        return None
    whole, part = rows.as_it_is(base), rows.as_it_is(source)
    fits = same_shape(with_one(whole.shape, axis), with_one(part.shape, axis))
    return (whole, part, axis) if fits and whole.axis == part.axis == axis else None


def _axis_after(read: Read, after: Sequence[Any]) -> int | None:
    """Where the classes are in another shape of the same numbers; None if they are cut, or merged
    with rows."""
    place = read.axis % len(read.shape)
    first, classes, last = read.shape[:place], read.shape[place], read.shape[place + 1 :]
    for new, size in enumerate(after):
        sides = same(prod(first), prod(after[:new])), same(prod(last), prod(after[new + 1 :]))
        if same(size, classes) and all(sides):
            return new - len(after)
    return None


def _turned(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """Logits whose classes move, while the rows stay in their order."""
    source = node.args[0]
    if not isinstance(source, Node) or rows.look_at(source, axis) != LOGITS:
        return None
    read, order = rows.as_it_is(source), view_of(node).order
    place = read.axis % len(order)
    others = [dim for dim in order if dim != place]
    if others != sorted(others):
        return None
    return Step(LOGITS, None, (read,), axis=order.index(place) - len(order))


def _scattered(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """A part of the classes that is put into all; or a column that fills all of its place."""
    named = named_arguments(node)
    source, dim = named["src"], named["dim"]
    if node.target is aten.slice_scatter.default and rows.is_logits(value, axis):
        both = _whole_and_part(rows, value, named["self"], source, dim)
        start, end = named["start"], named["end"]
        if both is None or named["step"] != 1 or isinstance(start, Node) or isinstance(end, Node):
            return None
        whole, part, axis = both
        return Step(LOGITS, aten.slice_scatter.default, (whole, part, 1, start, end), axis=axis)
    if isinstance(source, Node) and rows.look_at(source) == COLUMN and rows.is_column(value):
        return Step(COLUMN, None, (rows.as_it_is(source),))
    return None


def _filled(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    number = filled_with(node)
    if number is None or not rows.is_logits(value, axis):
        return None
    like = rows.of_size(value.shape[axis])
    dtype = {"dtype": value.dtype}
    if like is None:
        return None
    return Step(LOGITS, aten.full_like.default, (like, number), dtype, axis)


def _reduced(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """A number of each row, of all classes."""
    named = named_arguments(node)
    names = [argument.name for argument in schema_of(node.target).arguments]
    source, dim = named.pop(names[0]), named.pop("dim")
    named.pop("keepdim", None)
    if not isinstance(source, Node) or any(isinstance(v, Node) for v in named.values()):
        return None
    of_source = source.meta["val"]
    dims = dim if isinstance(dim, list | tuple) else [dim]
    if not rows.is_column(value) or len(dims) != 1 or dims[0] is None:
        return None
    place = dims[0] % of_source.dim()
    kind = rows.look_at(source, place - of_source.dim())
    if kind is None:
        return None
    read = rows.as_it_is(source)
    if kind == COLUMN:
        is_one = node.target in _OF_ONE_NUMBER and same(of_source.shape[place], 1)
        is_plain = named.get("dtype") in (None, of_source.dtype) and value.dtype == of_source.dtype
        return Step(COLUMN, None, (read,)) if is_one and is_plain else None
    if place != read.axis % of_source.dim():
        return None
    options = {name: v for name, v in named.items() if v is not None}
    which: Any = [1] if node.target in REDUCTIONS else 1
    return Step(COLUMN, node.target, (read, which), {**options, "keepdim": True})


#: Of one number they are that number.
_OF_ONE_NUMBER = (*(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default),)


def largest_of_two(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """The largest logit of each row, or its place: one of two results."""
    both: Any
    index: Any
    both, index = node.args
    ops = EXTREMES_OF_TWO.get(both.target)
    if ops is None:
        return None
    named = named_arguments(both)
    source = named["self"]
    if rows.look_at(source, axis) != LOGITS or not rows.is_column(value):
        return None
    read, rank = rows.as_it_is(source), source.meta["val"].dim()
    if named["dim"] % rank != read.axis % rank:
        return None
    which: Any = [1] if index == 0 else 1
    return Step(COLUMN, ops[index], (read, which), {"keepdim": True})


#: What the results are of the ops that return the largest or smallest numbers and their places.
EXTREMES_OF_TWO: dict[Any, tuple[Any, Any]] = {
    aten.max.dim: (aten.amax.default, aten.argmax.default),
    aten.min.dim: (aten.amin.default, aten.argmin.default),
}


def _indexed(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """One class of each row is read, or written."""
    base: Any
    dim: Any
    base, dim, index, *rest = node.args
    if node.kwargs or not isinstance(index, Node):
        return None
    shape = base.meta["val"].shape
    axis = dim % len(shape) - len(shape)
    if not rows.is_logits(base.meta["val"], axis):
        return None
    of_base = rows.read(base, LOGITS, shape, axis)
    ones = with_one(shape, axis)
    if of_base is None or not same_shape(index.meta["val"].shape, ones):
        return None
    of_index = rows.read(index, COLUMN, ones)
    values = [_of_index(rows, each, ones) for each in rest]
    if of_index is None or of_index.kind == NUMBER or any(each is NONE for each in values):
        return None
    kind = COLUMN if node.target is aten.gather.default else LOGITS
    return Step(kind, node.target, (of_base, 1, of_index, *values), axis=axis)


def _of_index(rows: Rows, argument: Any, ones: Sequence[Any]) -> Any:
    """What is written to the class of each row: a number, or a column of the index's shape."""
    if not isinstance(argument, Node):
        return argument
    if not same_shape(argument.meta["val"].shape, ones):
        return NONE
    read = rows.read(argument, COLUMN, ones)
    return read if read is not None and read.kind == COLUMN else NONE


RULES: dict[Any, Rule] = {
    **dict.fromkeys((*FILLED, aten.full.default, aten.zeros.default, aten.ones.default), _filled),
    **dict.fromkeys(SAME_IF_AS_MANY, _in_another_shape),
    **dict.fromkeys(TURNS, _turned),
    aten.slice.Tensor: _cut,
    aten.index.Tensor: _looked_up,
    aten.index_select.default: _selected,
    **dict.fromkeys((aten.index_put.default, aten.index_add.default), _put),
    **dict.fromkeys(SCATTERS, _scattered),
    **dict.fromkeys((*REDUCTIONS, *REDUCTIONS_OF_ONE), _reduced),
    **dict.fromkeys(INDEXED, _indexed),
}
