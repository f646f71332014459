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
    of_product = Read(rows.product, LOGITS, ())
    spreads = node.target is aten.expand.default and rows.is_logits(value, axis)
    if kind is None:
        spread = rows.read(source, LOGITS, value.shape, axis) if spreads else None
        if spread is None or spread.kind == LOGITS:
            return None
        return Step(LOGITS, SPREAD, (spread, of_product), axis=axis)
    read = rows.as_it_is(source)
    if kind == LOGITS:
        is_same = same_shape(value.shape, read.shape)
        new = read.axis if is_same else _axis_after(read, value.shape)
        return None if new is None else Step(LOGITS, None, (read,), axis=new)
    if rows.is_column(value):
        return Step(COLUMN, None, (read,))
    if spreads and same_shape(read.shape, with_one(value.shape, axis)):
        return Step(LOGITS, SPREAD, (read, of_product), axis=axis)
    return None


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
    """A column that fills all of what it is put into."""
    source = node.args[1]
    if isinstance(source, Node) and rows.look_at(source) == COLUMN and rows.is_column(value):
        return Step(COLUMN, None, (rows.as_it_is(source),))
    return None


def _filled(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    number = filled_with(node)
    if number is None or not rows.is_logits(value, axis):
        return None
    like = Read(rows.product, LOGITS, ())
    dtype = {"dtype": value.dtype}
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
    **dict.fromkeys(SCATTERS, _scattered),
    **dict.fromkeys((*REDUCTIONS, *REDUCTIONS_OF_ONE), _reduced),
    **dict.fromkeys(INDEXED, _indexed),
}
