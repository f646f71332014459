"""Loops over the samples of a batch, which Dynamo has unrolled, as one computation.

``torch.stack([f(row) for row in x])`` and ``torch.cat([f(part) for part in x.split(n)])`` hold as
many nodes of each kind as there are turns. If all turns run the same ops on pieces that make up
whole tensors, and each op works row by row, the result is ``f(x)``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.op_traits import PARTS, is_pointwise, named_dims
from compile_losses.recognize.graph.symbolic_tensors import Value, computed_alike, example, whole

aten = torch.ops.aten

#: From a Value that stands for a whole node to the Value of the op that made it.
Resolve: TypeAlias = Callable[[Value], Value]
#: The result of an op on some arguments; None if the op refuses them.
Compute: TypeAlias = Callable[..., Value | None]

JOINS = (aten.stack.default, aten.cat.default)
#: Ops along one dimension.
_ALONG = (
    *(aten._log_softmax.default, aten._softmax.default, aten.logsumexp.default),
    *(aten.sum.dim_IntList, aten.gather.default, aten.squeeze.dim, aten.unsqueeze.default),
    *PARTS,
)
#: Functions and methods that take a tensor apart along dimension 0.
_UNBINDS = (torch.unbind, aten.unbind.int, "unbind")
_SPLITS = (torch.split, torch.chunk, torch.functional.split, "split", "chunk")


def is_join(node: Node) -> bool:
    """Whether a node puts tensors together, as at the end of a loop over samples."""
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in ("stack", "cat", "concat", "concatenate")


def rejoined(value: Value, resolve: Resolve, compute: Compute) -> Value | None:
    """A stack or a concatenation at the end of a loop, as computed without the loop; else None."""
    pieces, *rest = value.args
    if rest not in ([], [0]) or value.kwargs or len(pieces) < 2:
        return None
    stacks = value.op is aten.stack.default
    found = join(list(pieces), stacks, resolve, compute)
    if found is None or found.op is None or found.whole:
        return None
    if found.fake.dtype != value.fake.dtype or not computed_alike(
        found.fake.shape, value.fake.shape
    ):
        return None
    return Value(value.fake, value.node, found.op, found.args, found.kwargs)


def join(pieces: list[Any], stacks: bool, resolve: Resolve, compute: Compute) -> Value | None:
    """Pieces of rows as they were computed of whole tensors; None if they are no such pieces."""
    if not all(isinstance(piece, Value) for piece in pieces):
        return None
    source = _source(pieces, stacks, resolve)
    if source is not None:
        return source
    first, *others = resolved = [resolve(piece) for piece in pieces]
    if first.op is None or any(other.op is not first.op for other in others):
        return None
    is_along = first.op in _ALONG
    if not is_along and not is_pointwise(first.op):
        return None
    ranks = {a.fake.dim() for piece in resolved for a in piece.args if isinstance(a, Value)}
    if len(ranks) != 1 or ranks == {0} or any(piece.kwargs for piece in resolved):
        return None
    if len({len(piece.args) for piece in resolved}) != 1:
        return None
    arguments: list[Any] = []
    for each in zip(*(piece.args for piece in resolved), strict=True):
        if isinstance(each[0], Value):
            joined = join(list(each), stacks, resolve, compute)
            if joined is None:
                return None
            arguments.append(joined)
        elif all(computed_alike(one, each[0]) for one in each):
            arguments.append(each[0])
        else:
            return None
    if is_along:
        ((place, _),) = named_dims(first.op)
        (rank,) = ranks
        given = arguments[place]
        # unsqueeze counts its dimension in the result.
        rank += first.op is aten.unsqueeze.default
        dims = [dim % rank for dim in (given if isinstance(given, list) else [given])]
        if 0 in dims and not stacks:
            return None
        dims = [dim + stacks for dim in dims]
        arguments[place] = dims if isinstance(given, list) else dims[0]
        if first.op is aten.select.int:
            return _without_dimension(*arguments, compute=compute)
    return compute(first.op, *arguments)


def _without_dimension(value: Value, dim: int, _: Any, *, compute: Compute) -> Value | None:
    """``x[:, 0]`` of the only class that ``gather`` has left; None if there are more."""
    if not statically_known_true(value.fake.shape[dim] == 1):
        return None
    return compute(aten.squeeze.dim, value, dim)


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor, along dimension 0.

    Attributes:
        tensor: the node that holds it.
        start, stop: which of its rows, of how many in all; any but the first piece's start may be a
            symbol.
    """

    tensor: Node
    start: int | SymInt
    stop: int | SymInt
    rows: int | SymInt


def _source(values: list[Value], stacks: bool, resolve: Resolve) -> Value | None:
    """The tensor whose pieces, all of them and in order, some values are; else None."""
    pieces: list[_Piece] = []
    place: int | SymInt = 0
    for value in values:
        piece = _piece(value, stacks, resolve)
        if piece is None or not computed_alike(piece.start, place):
            return None
        pieces.append(piece)
        place = piece.stop
    (first, *others) = pieces
    if not computed_alike(place, first.rows) or any(
        other.tensor is not first.tensor for other in others
    ):
        return None
    return whole(first.tensor)


def _piece(value: Value, stacks: bool, resolve: Resolve) -> _Piece | None:
    """The piece that a value is: a row without its dimension, for a stack, or some rows; else
    None."""
    node = value.node
    if value.whole and node.target is operator.getitem and isinstance(node.args[0], Node):
        parts, index = node.args
        if isinstance(example(parts), tuple | list) and isinstance(index, int):
            return _part(parts, index, stacks)  # type: ignore[arg-type]
    value = resolve(value)
    if value.op is not (aten.select.int if stacks else aten.slice.Tensor):
        return None
    tensor, *bounds = value.args
    rows = tensor.fake.shape[0] if tensor.fake.dim() else None
    if not tensor.whole or rows is None or (bounds and bounds[0] != 0):
        return None
    if not all(isinstance(bound, int | SymInt | None) for bound in bounds):
        return None
    if bounds[3:] not in ([], [1]):
        return None
    start = bounds[1] if len(bounds) > 1 and bounds[1] is not None else 0
    if statically_known_true(start < 0):
        start += rows
    # The size of the piece says where it ends, whatever the bound is.
    stop = start + (1 if stacks else value.fake.shape[0])
    return _Piece(tensor.node, start, stop, rows)


def _part(node: Node, index: int, stacks: bool) -> _Piece | None:
    """The piece at an index of a node that takes a tensor apart; None if that is not along
    dimension 0."""
    parts = parts_of(node)
    if parts is None or parts.dim != 0 or parts.are_rows != stacks:
        return None
    start, stop = parts.bounds(index)
    return _Piece(parts.tensor, start, stop, sum(parts.sizes))


@dataclass(frozen=True)
class Parts:
    """What a node takes a tensor apart into.

    Attributes:
        tensor: the node that holds it.
        dim: along which it is taken apart.
        sizes: of the parts, one after the other.
        are_rows: whether the parts lack the dimension.
    """

    tensor: Node
    dim: int
    sizes: list[Any]
    are_rows: bool

    def bounds(self, index: int) -> tuple[Any, Any]:
        """Where a part begins and ends."""
        start = sum(self.sizes[: index % len(self.sizes)])
        return start, start + self.sizes[index]


def parts_of(node: Node) -> Parts | None:
    """What a node takes a tensor apart into; None if it does something else."""
    are_rows = node.target in _UNBINDS
    if not (are_rows or node.target in _SPLITS) or not node.args:
        return None
    tensor, place = node.args[0], 1 if are_rows else 2
    dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else 0)
    if type(dim) is not int or not isinstance(tensor, Node):
        return None
    if not isinstance(example(tensor), Tensor):
        return None
    dim %= example(tensor).dim()
    sizes = [1 if are_rows else part.shape[dim] for part in example(node)]
    return Parts(tensor, dim, sizes, are_rows)
