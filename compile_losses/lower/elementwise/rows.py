"""Sums over large tensors, as sums over rows first.

Inductor cuts the sum of all elements into partial sums, in a loop of its own. It fuses a sum over
rows with other functions of the same elements. That sum leaves a number for each row, and a second
sum adds these numbers up.

Not every choice of rows is fused. On a GPU Inductor compares the loops of two kernels before it
merges any of their dimensions, so it fuses the sum with the gradient only if its loops are the
gradient's own dimensions, the innermost of them for the sum: a tensor of 8192x8192 that is summed
up in rows of 1024 takes two kernels, and one in rows of 8192 takes one (an H100, torch 2.11). For
the same reason a row's length is never a symbol, which Inductor can't divide the elements by
("CantSplit"); the number of rows may be one.

A row of more than 8192 elements is cut in two kernels again where there are few rows.

On a CPU Inductor merges the dimensions of a loop before it compares loops, so the loop over a
gradient's elements is not the sum's. A number that is read for each row, of ``fused::row_ones``,
keeps the rows' loop. There, too, Inductor fuses a sum only with what comes before it. If a loss and
its gradient take many functions, Inductor stores the results of some in loops over all elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.device_constants import constants_of
from compile_losses.graphs import ancestors, emit, is_view, move_before, replace
from compile_losses.lower.cost import hint_of
from compile_losses.lower.elementwise.find import Part
from compile_losses.lower.node_relations import is_generated
from compile_losses.op_traits import MEANS, TOTALS

aten = torch.ops.aten

#: The sums, each with the one that takes dimensions.
_SUMS: dict[Any, Any] = {op: ops[-1] for ops in (TOTALS, MEANS) for op in ops}


@dataclass(frozen=True)
class Sum:
    """A sum or a mean over a large tensor.

    Attributes:
        node: the call.
        row: the dimensions that are summed up first.
        is_whole: whether these are all dimensions of the call.
        shape: what the tensor is viewed as before, or None.
    """

    node: Node
    row: tuple[int, ...]
    is_whole: bool = False
    shape: tuple[int, ...] | None = None


def find_sums(loss: Node, gradients: Sequence[Tensor], before: set[Node]) -> list[Sum] | str:
    """The sums of tensors as large as a gradient that a loss is computed by; or why they can't be
    computed with the gradients. Where there are none, it is no loss of elements.

    Args:
        gradients: their values.
        before: what the gradients are computed by, where no such sum lies.
    """
    sizes = {_numel(value.shape): value for value in gradients}
    sums: list[Sum] = []
    for node in ancestors([loss], until=before, past=lambda node: _summed(node) not in sizes):
        like = sizes.get(_summed(node))
        if like is not None:
            found = _row_of(node, like)
            if found is None:
                return "no dimensions of the tensor make rows to add up in one loop with it"
            sums.append(found)
    return sums


def _numel(shape: Iterable[Any]) -> int:
    """By hints, so that no guard is added."""
    return math.prod(map(hint_of, shape))


def _summed(node: Node) -> int:
    """How many numbers a node adds up, -1 for no sum."""
    value = node.all_input_nodes[0].meta.get("val") if node.target in _SUMS else None
    if isinstance(value, Tensor) and value.is_floating_point():
        return _numel(value.shape)
    return -1


def _row_of(node: Node, like: Tensor) -> Sum | None:
    """A sum, with the dimensions of a row of it; None if no row of it is of a good length."""
    value: Tensor = node.all_input_nodes[0].meta["val"]
    dims: Any = node.args[1] if len(node.args) > 1 else None
    dims = {d % value.dim() for d in dims} if dims else set(range(value.dim()))
    if len(dims) == value.dim() and value.shape != like.shape and _is_static(value, like):
        row = _innermost(like, set(range(like.dim())))
        return None if row is None else Sum(node, row, shape=tuple(like.shape))
    row = _innermost(like if value.shape == like.shape else value, dims)
    return None if row is None else Sum(node, row, is_whole=set(row) == dims)


def _is_static(*values: Tensor) -> bool:
    return all(isinstance(size, int) for value in values for size in value.shape)


def _innermost(value: Tensor, dims: set[int]) -> tuple[int, ...] | None:
    """Of ``dims``, those that make a row; None where there are none."""
    constants = constants_of(value.device)
    longest = constants.longest_row
    numel = _numel(value.shape)
    row: list[int] = []
    length = 1
    for dim in sorted(range(value.dim()), key=lambda d: (hint_of(value.stride(d)), -d)):
        size = value.shape[dim]
        if size == 1:
            continue
        if dim not in dims or not isinstance(size, int) or (row and length * size > longest):
            break
        row.append(dim)
        length *= size
    if length < constants.shortest_row:
        return None
    if length > longest and numel // length < constants.many_rows:
        return None
    return tuple(sorted(row))


@dataclass(frozen=True)
class Rows:
    """The loop over the rows of a sum, for gradients that are computed in it.

    Attributes:
        sum: the call.
        shape: of a number for each row.
    """

    sum: Node
    shape: tuple[int, ...]


def rows_to_keep(sums: Sequence[Sum], gradients: Part) -> Rows | str | None:
    """The rows that gradients must read a number of, or why they can't; None where they need not.

    What the gradients are computed by is moved to before the sum where that is needed.
    """
    constants = constants_of(sums[0].node.meta["val"].device)
    if not constants.merges_loops:
        return None
    found = min(sums, key=attrgetter("node"))  # the first in the graph
    value: Tensor = found.node.all_input_nodes[0].meta["val"]
    shape = found.shape or tuple(value.shape)
    values = [gradient.meta["val"] for gradient in gradients.gradients]
    if not _is_static(value) or any(each.shape != shape for each in values):
        return "Inductor's loops over the gradient and over the rows of the sum are different ones"
    functions = _functions([*found.node.all_input_nodes, *gradients.operands])
    if functions + len(gradients.nodes) > constants.most_functions:
        return (
            "it and its gradient take so many functions that Inductor stores results between them"
        )
    if not move_before(gradients.operands, found.node):
        return "what it is computed from comes after the sum"
    one_a_row = tuple(1 if d in found.row else size for d, size in enumerate(shape))
    return Rows(found.node, one_a_row)


def _functions(nodes: Iterable[Node]) -> int:
    """How many calls compute nodes that Inductor may put in one loop."""

    def is_in_the_loop(node: Node) -> bool:
        return is_generated(node) or is_view(node)

    return sum(map(is_in_the_loop, set(ancestors(nodes, past=is_in_the_loop))))


def sum_in_rows(sums: Iterable[Sum], loss: Node) -> Node:
    """Rewrites sums; the loss, which may be one of them."""
    for found in sums:
        if not found.is_whole:
            total = _sum_rows_first(found)
            loss = total if found.node is loss else loss
    return loss


def _sum_rows_first(found: Sum) -> Node:
    """Replaces a sum by one of each row, and one of these; returns the node that holds the
    number."""
    node, target = found.node, found.node.target
    source = node.all_input_nodes[0]
    value: Tensor = source.meta["val"]
    result: Tensor = node.meta["val"]
    wide = torch.float64 if torch.float64 in (result.dtype, value.dtype) else torch.float32

    def call(op: Any, *args: Any) -> Node:
        return emit(node, op, args)

    if found.shape is not None:
        source = call(aten.reshape.default, source, list(found.shape))
        target = _SUMS[target]
        args: Any = (list(range(len(found.shape))), False)
    else:
        args = node.args[1:]
    if value.dtype != wide:
        source = call(torch.ops.prims.convert_element_type.default, source, wide)
    total = call(target, call(_SUMS[target], source, list(found.row), True), *args)
    if result.dtype != wide:
        total = call(torch.ops.prims.convert_element_type.default, total, result.dtype)
    if found.shape is not None and result.dim():
        total = call(aten.view.default, total, list(result.shape))
    replace(node, total)
    return total
