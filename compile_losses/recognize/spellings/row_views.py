"""Rows of logits: how targets pick their entries, and views that leave the classes alone."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.op_traits import PARTS, RESHAPES, TURNS, View
from compile_losses.recognize.graph.aten_replay import (
    AtenReplay,
    aten,
    compute,
    equal_sizes,
    same_sizes,
)
from compile_losses.recognize.graph.symbolic_tensors import Size, Value, example
from compile_losses.torch_internals.ops import tree_leaves

_SOFTMAXES = (aten._log_softmax.default, aten._softmax.default)
#: Views that may leave the classes of a row together.
VIEWS = (*TURNS, *PARTS, *RESHAPES)


class RowIndexError(Exception):
    """An index that does not pick one entry of each row, or several."""


def target_of_gather(value: Value, replay: AtenReplay) -> tuple[Value, int]:
    """``x.gather(dim, target.unsqueeze(dim))``: the target, shaped like the rows, and dim."""
    source, dim, index = value.args[:3]
    dim = dim % source.rank
    expected = list(source.fake.shape)
    if not expected:
        raise RowIndexError
    expected[dim] = 1
    if not equal_sizes(index.fake.shape, expected):
        raise RowIndexError
    rows = expected[:dim] + expected[dim + 1 :]
    resolved = unexpanded(replay.resolve(index), replay)
    if resolved.op in (aten.unsqueeze.default, aten.view.default):
        inner = resolved.args[0]
        if same_sizes(inner.fake.shape, rows):  # neither op changes the order of elements
            return replay.resolve(inner), dim
    target = compute(aten.squeeze.dim, resolved, dim)
    if target is None:
        raise RowIndexError
    return target, dim


def picks_of_gather(value: Value, replay: AtenReplay) -> Value:
    """``x.gather(-1, picks)``: the picks, shaped like the rows and then [K]."""
    source, dim, index = value.args[:3]
    rank = source.fake.dim()
    # gather takes an index of fewer rows as well, and then leaves the other rows out.
    if dim % source.rank != rank - 1 or index.fake.dim() != rank:
        raise RowIndexError
    if not equal_sizes(index.fake.shape[:-1], source.fake.shape[:-1]):
        raise RowIndexError
    if index.whole:
        return index
    if index.op is aten.remainder.Scalar:  # take_along_dim takes negative numbers
        classes, rest = index.args[1], unexpanded(index.args[0], replay)
        found = compute(aten.remainder.Scalar, rest, classes) if isinstance(classes, int) else None
    else:
        found = unexpanded(index, replay)
    if found is None:
        raise RowIndexError
    if not found.whole and any(isinstance(a, torch.SymInt) for a in tree_leaves(found.args)):
        raise RowIndexError  # the rewrite has no node for it
    return found


def unshaped(value: Value, replay: AtenReplay) -> Value:
    """A tensor before it was brought into another shape."""
    value = replay.resolve(value)
    while value.op in (*RESHAPES, aten.squeeze.dim, aten.unsqueeze.default):
        value = replay.resolve(value.args[0])
    return value


def unexpanded(value: Value, replay: AtenReplay) -> Value:
    """A tensor before it was expanded to the size that it has, and cut to its size again, as
    Categorical and take_along_dim do."""
    expanded = replay.resolve(value.args[0]) if value.op is aten.slice.Tensor else value
    if expanded.op is not aten.expand.default:
        return value
    inner = expanded.args[0]
    return replay.resolve(inner) if same_sizes(inner.fake.shape, value.fake.shape) else value


def target_of_index(value: Value, replay: AtenReplay) -> tuple[Value, int]:
    """``x[arange(rows), target]``, with an arange for every dimension but the last."""
    source, indices = value.args
    rows = list(source.fake.shape[:-1])
    if len(indices) != len(rows) + 1 or not rows:
        raise RowIndexError
    *positions, target = indices
    for dim, position in enumerate(positions):
        if not isinstance(position, Value) or not _is_arange(position, dim, rows, replay):
            raise RowIndexError
    classes = source.fake.shape[-1]
    if not isinstance(target, Value) or target.fake.dtype != torch.int64:
        raise RowIndexError
    if not equal_sizes(target.fake.shape, rows):
        raise RowIndexError
    if not isinstance(classes, int):
        base = replay.resolve(source)
        while not base.whole or base.op is not None:  # up to a tensor that the rewrite keeps
            if base.op is None or not base.args or not isinstance(base.args[0], Value):
                raise RowIndexError
            base = replay.resolve(base.args[0])
        if not statically_known_true(base.fake.shape[-1] == classes):
            raise RowIndexError
        classes = Size(base.node, base.fake.dim() - 1)
    # Indexing counts negative numbers from the end, and so must the target.
    negative = compute(aten.lt.Scalar, target, 0)
    wrapped = compute(aten.add.Scalar, target, classes)
    result = negative and wrapped and compute(aten.where.self, negative, wrapped, target)
    if not result:
        raise RowIndexError
    return result, len(rows)


def _is_arange(position: Value, dim: int, rows: list[Any], replay: AtenReplay) -> bool:
    """Whether an index counts along one dimension of the rows, and lies along it."""
    shape = [1] * (len(rows) - position.fake.dim()) + list(position.fake.shape)
    expected = [size if i == dim else 1 for i, size in enumerate(rows)]
    if not equal_sizes(shape, expected):
        return False
    base = replay.resolve(position)
    while base.op in (aten.unsqueeze.default, aten.view.default):
        base = replay.resolve(base.args[0])
    if base.op is aten.lift_fresh.default:  # a range of Python's
        while isinstance(base, Value) and base.op is aten.lift_fresh.default and base.args:
            base = base.args[0]
        constant = base.fake
        return type(constant) is torch.Tensor and constant.tolist() == [*range(len(constant))]
    node = base.node
    if base.op is not None or node.op != "call_function" or node.target is not torch.arange:
        return False
    bounds = [*node.args, *(node.kwargs[k] for k in ("start", "end") if k in node.kwargs)]
    if len(node.args) > 2 or len(bounds) not in (1, 2) or "step" in node.kwargs:
        return False
    if len(bounds) == 2 and bounds[0] != 0:
        return False
    return statically_known_true(operator.eq(example(bounds[-1]), rows[dim]))


def as_one_hot(value: Value, replay: AtenReplay) -> Value | None:
    """The classes, if a Value is ``F.one_hot(classes, C)``; else None."""
    node = value.node
    if not value.whole or getattr(node.target, "__name__", "") != "one_hot":
        return None
    arguments = [*node.args, *node.kwargs.values()]
    if len(arguments) != 2 or not isinstance(arguments[0], torch.fx.Node):
        return None
    return replay.of(arguments[0])


def pushed_under_softmax(value: Value, replay: AtenReplay) -> Value | None:
    """A view of a softmax as the softmax of a view, if the view leaves the classes together; else
    None."""
    inner = replay.resolve(value.args[0])
    if inner.op not in _SOFTMAXES:
        deeper = pushed_under_softmax(inner, replay) if inner.op in VIEWS else None
        if deeper is None:
            return None
        inner = deeper
    x, dim = inner.args[0], inner.args[1] % inner.rank
    place = View(value.op, value.args, inner.fake.shape, value.fake.shape).place_of(dim)
    if place is None:
        return None
    arguments = list(value.args[1:])
    if value.op in RESHAPES:
        arguments[0] = [_without_symbol(size, x) for size in arguments[0]]
        if arguments[0].count(-1) > 1:
            return None
    op = aten.view.default if value.op is aten._unsafe_view.default else value.op
    assert op is not None
    moved = compute(op, x, *arguments)  # None if x has other strides and no such view
    if moved is None:
        return None
    return Value(value.fake, value.node, inner.op, (moved, place, inner.args[2]))


def _without_symbol(size: Any, x: Value) -> Any:
    """A size as a rewrite may express it: a number, a size of a tensor in the graph, or -1."""
    if isinstance(size, int):
        return size
    for dim, candidate in enumerate(x.fake.shape if x.whole else ()):
        if statically_known_true(candidate == size):
            return Size(x.node, dim)
    return -1
