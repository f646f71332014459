"""Sums and diagonals of matrices that are made element by element, taken of what these are made of.

Autograd sums up the gradient of a log-softmax. In torch's ops that gradient often is one number of
each row, scattered into zeros, whose sum is that number. And a diagonal of log-probabilities is
made of the diagonal of the logits and of a number of each row. So no loop goes through a matrix for
these, and the partitioner does not save a matrix for the backward because a diagonal views it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.graphs import emit, erase_unused, replace_uses, undone_if_it_fails
from compile_losses.lower.node_relations import filled_with, is_turned_matrix
from compile_losses.op_traits import ALIASES, is_pointwise

aten = torch.ops.aten


def take_parts_early(matrix: Node) -> None:
    """Changes what is read of matrices of the shape of one, or of that turned."""
    shape = matrix.meta["val"].shape
    graph = matrix.graph
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        _sum_early(node, shape)
    for node in graph.find_nodes(op="call_function", target=aten.diagonal_scatter.default):
        if _is_diagonal(node):
            _choose_diagonal(node)
    for node in graph.find_nodes(op="call_function", target=aten.diagonal.default):
        _take_diagonal(node, matrix)


def _take_diagonal(node: Node, matrix: Node) -> None:
    """Computes the diagonal of what is made of a square matrix of that matrix's diagonal."""
    rows, columns = matrix.meta["val"].shape
    source: Any = node.args[0]
    if len(node.args) != 1 or node.kwargs or not statically_known_true(rows == columns):
        return
    try:
        with undone_if_it_fails(node):
            taken = _diagonal_of(source, matrix, node, {})
    except _UnknownError:
        return
    replace_uses(node, taken)
    erase_unused([node])


def _diagonal_of(node: Node, matrix: Node, place: Node, known: dict[Node, Node]) -> Node:
    """The diagonal of a node.

    Raises:
        _UnknownError: it is not made of the matrix element by element.
    """
    if node in known:
        return known[node]
    value = node.meta.get("val")
    target: Any = node.target
    if not isinstance(value, Tensor):
        raise _UnknownError
    if value.dim() == 0:
        return node
    shape, square = value.shape, matrix.meta["val"].shape
    columns = [dim for dim in range(value.dim()) if statically_known_true(shape[dim] == 1)]
    if node is matrix:
        result = emit(place, aten.diagonal.default, (node,))
    elif value.dim() == 2 and len(columns) == 1:
        result = emit(place, aten.squeeze.dim, (node, columns[0]))
    elif value.dim() != 2 or columns or shape != square:
        raise _UnknownError
    elif is_turned_matrix(node) or target in (*ALIASES, aten.clone.default):
        result = _diagonal_of(node.args[0], matrix, place, known)  # type: ignore[arg-type]
    elif is_pointwise(target) or target is torch.ops.prims.convert_element_type.default:
        args = [
            _diagonal_of(each, matrix, place, known) if isinstance(each, Node) else each
            for each in node.args
        ]
        if any(isinstance(each, Node) for each in node.kwargs.values()):
            raise _UnknownError
        result = emit(place, target, args, node.kwargs)
    else:
        raise _UnknownError
    known[node] = result
    return result


def _is_diagonal(node: Node) -> bool:
    """Whether a node is a square matrix of zeros with other numbers on its diagonal."""
    if len(node.args) != 2 or node.kwargs or filled_with(node.args[0]) != 0:  # type: ignore[arg-type]
        return False
    rows, columns = node.meta["val"].shape
    return isinstance(rows, int) and rows == columns


def _choose_diagonal(node: Node) -> None:
    """Makes such a matrix element by element. Inductor would write the zeros."""
    value = node.meta["val"]
    counted = {"start": 0, "step": 1, "dtype": torch.int64, "device": value.device}
    counted["requires_grad"] = False
    places = emit(node, torch.ops.prims.iota.default, (value.shape[0],), counted)
    own = emit(node, aten.eq.Tensor, (emit(node, aten.unsqueeze.default, (places, 1)), places))
    numbers = emit(node, aten.unsqueeze.default, (node.args[1], 1))
    options = {"dtype": value.dtype, "device": value.device}
    zero = emit(node, aten.full.default, ([], 0), options)
    replace_uses(node, emit(node, aten.where.self, (own, numbers, zero)))
    erase_unused([node])


class _UnknownError(Exception):
    """A sum is not known without its terms."""


def _sum_early(node: Node, shape: Sequence[Any]) -> None:
    """Replaces a sum of each row of a gradient that is known from a number of each row.

    Autograd sums up the gradient of a log-softmax. In torch's ops that is often one number of each
    row, scattered into zeros.
    """
    source: Any = node.args[0]
    value = source.meta["val"]
    dims: Any = node.args[1]
    keeps = len(node.args) > 2 and bool(node.args[2])
    turned = tuple(reversed(tuple(shape)))
    if not keeps or len(dims) != 1 or tuple(value.shape) not in (tuple(shape), turned):
        return
    try:
        with undone_if_it_fails(node):
            total = _row_sum(source, dims[0] % 2, node)
    except _UnknownError:
        return
    replace_uses(node, total)
    erase_unused([node])


def _row_sum(node: Node, dim: int, place: Node) -> Node:
    """The sum along a dimension, which it keeps.

    Raises:
        _UnknownError: it takes more than numbers of rows.
    """
    value = node.meta["val"]
    target: Any = node.target
    if node.op != "call_function" or node.kwargs:
        raise _UnknownError
    if target is aten.scatter.value:
        zeros, along, index, number = node.args
        if along % 2 == dim and index.meta["val"].shape[dim] == 1 and filled_with(zeros) == 0:  # type: ignore[operator, union-attr, arg-type]
            size = [1 if d == dim else s for d, s in enumerate(value.shape)]
            if all(isinstance(s, int) for s in size):
                options = {"dtype": value.dtype, "device": value.device}
                return emit(place, aten.full.default, (size, number), options, like=node)
    elif target is aten.diagonal_scatter.default and _is_diagonal(node):
        return emit(place, aten.unsqueeze.default, (node.args[1], dim))
    elif target is aten.neg.default:
        return emit(place, target, (_row_sum(node.args[0], dim, place),))  # type: ignore[arg-type]
    elif target in (aten.add.Tensor, aten.sub.Tensor):
        terms = [_row_sum(each, dim, place) for each in node.args]  # type: ignore[arg-type]
        return emit(place, target, terms)
    elif target in (aten.mul.Tensor, aten.div.Tensor):
        left, right = node.args
        if target is aten.mul.Tensor and _is_column(left, dim):
            left, right = right, left
        if isinstance(left, Node) and _is_column(right, dim):
            return emit(place, target, (_row_sum(left, dim, place), right))
    elif target is aten.expand.default and _is_column(node.args[0], dim):
        count = value.shape[dim]
        if isinstance(count, int):
            return emit(place, aten.mul.Tensor, (node.args[0], count))
    raise _UnknownError


def _is_column(operand: Any, dim: int) -> bool:
    """Whether an operand has one number for all that is added up."""
    if not isinstance(operand, Node):
        return isinstance(operand, int | float)
    value = operand.meta["val"]
    if not isinstance(value, Tensor):
        return False
    return value.dim() == 0 or (value.dim() == 2 and statically_known_true(value.shape[dim] == 1))
