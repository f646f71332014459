"""A softmax by rows and a softmax by columns of one matrix: one read finds what both need.

A contrastive loss in both directions reads the products of all pairs by rows and by columns. Of a
row or a column a softmax needs two numbers, the largest and a sum of exponentials. Here one call of
``fused::softmax_sums`` takes the place of all these reductions. What is left works element by
element, also in the backward, so that Inductor writes the gradient over the matrix in one loop.

The reductions are found after autograd, in torch's ops. So it does not matter how the losses are
written, what is weighted, smoothed or ignored. Losses that are ops become torch's ops first. If the
products are scaled after the matrix product, the call reads them unscaled, and the scaled matrix is
never in memory.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from compile_losses import implementations
from compile_losses.device_constants import constants_of
from compile_losses.graphs import emit, erase_unused, in_dtype, replace_uses
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import nbytes_of
from compile_losses.lower.decision import Decision
from compile_losses.lower.decompose import decompositions_of
from compile_losses.lower.early_parts import take_parts_early
from compile_losses.lower.fused_calls import Loss
from compile_losses.lower.known_factors import is_one_number, scaling_of
from compile_losses.lower.node_relations import filled_with, is_generated, is_turned_matrix
from compile_losses.op_traits import ALIASES, CASTS, QUOTIENTS, RESHAPES
from compile_losses.ops.checks import accumulation_type
from compile_losses.sites import in_words, site_of

aten = torch.ops.aten
fused = torch.ops.fused

#: Losses that are a softmax of their input's second dimension.
_LOSSES = ("cross_entropy", "cross_entropy_probabilities")

#: What is chosen for the losses of a matrix.
ONE_READ, TWO_READS = "one read by rows and columns", "read by rows and by columns apart"

#: Whether it divides, and the other operand.
Scaling: TypeAlias = tuple[Any, Any]


@dataclass(frozen=True)
class Matrix:
    """A matrix, which may be scaled: what several softmaxes are of."""

    node: Node
    scaling: Scaling | None


@dataclass(frozen=True)
class Softmax:
    """The reductions of a softmax.

    Attributes:
        largest: the ``amax`` of each row or column, which keeps the dimension.
        dim: which dimension of the argument is reduced.
        by_columns: whether the results are those of the matrix's columns.
        sums: the sums of exponentials relative to ``largest``.
        finite_sums: those relative to it, and to 0 where it is infinite.
    """

    largest: Node
    dim: int
    by_columns: bool
    sums: tuple[Node, ...]
    finite_sums: tuple[Node, ...]


def take_two_softmaxes(graph: AtenGraph) -> None:
    """Has one call read each large matrix of which there are softmaxes by rows and by columns."""
    losses: dict[Matrix, list[tuple[Loss, bool]]] = defaultdict(list)
    for loss in graph.losses:
        read = matrix_of(loss.input) if loss.name in _LOSSES else None
        if read is not None:
            losses[read[0]].append((loss, read[1]))
    softmaxes = _softmaxes(graph)
    for matrix in [*dict.fromkeys((*losses, *softmaxes))]:
        own = losses[matrix]
        directions = {turned for _, turned in own}
        directions |= {softmax.by_columns for softmax in softmaxes[matrix]}
        if len(directions) == 2:
            _take(graph, matrix, [loss for loss, _ in own])


def _reads_the_matrix(loss: Loss) -> str:
    """Why a loss without a decomposition is in the way."""
    return f"{loss.name} can't be decomposed, which reads the matrix"


def _take(graph: AtenGraph, matrix: Matrix, losses: Sequence[Loss]) -> None:
    """Replaces the reductions of one matrix, or says at its losses why they stay."""
    told = [(site_of(loss.forward), loss.name) for loss in losses]
    reason = _reason_against(matrix)
    found = decompositions_of(losses) if reason is None else reason
    if isinstance(found, Loss):
        found = _reads_the_matrix(found)
    if isinstance(found, str):
        graph.decisions += [Decision(*loss, TWO_READS, found) for loss in told]
        return
    for decomposition in found:
        decomposition.apply()
    _replace(matrix, _softmaxes(graph)[matrix])
    graph.decisions += [Decision(*loss, ONE_READ, "softmaxes of one matrix") for loss in told]


def _reason_against(matrix: Matrix) -> str | None:
    """Why the reductions of a matrix stay; None if a call replaces them."""
    value = matrix.node.meta["val"]
    if not implementations.has_kernels(value.device):
        return "there are no kernels"
    if nbytes_of(value) < constants_of(value.device).two_softmaxes_bytes:
        return "the matrix is small: calls would take longer than a read saves"
    if is_generated(matrix.node):
        return (
            f"{in_words(matrix.node)} is computed in the same loops, and would have to be written"
        )
    return None


def matrix_of(node: Node) -> tuple[Matrix, bool] | None:
    """The matrix that a node stands for, in a wider dtype at most, and whether it is turned."""
    turned, scaling = False, None
    while node.op == "call_function":
        source: Any = node.args[0] if node.args else None
        target: Any = node.target
        if target in CASTS:
            if accumulation_type(source.meta["val"].dtype) != node.meta["val"].dtype:
                break
        elif is_turned_matrix(node):
            turned = not turned
        elif scaling is None and (operands := scaling_of(node)) is not None:
            source, factor = operands
            if not isinstance(source, Node) or not _is_factor(factor, source):
                break
            scaling = (target in QUOTIENTS, factor)
        elif target not in (*ALIASES, aten.clone.default) and not _keeps_shape(node):
            break
        node = source
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 2 or not value.is_floating_point():
        return None
    return Matrix(node, scaling), turned


def _is_factor(factor: Any, of: Node) -> bool:
    """Whether all elements of a matrix are multiplied by one number, or divided by it."""
    if isinstance(factor, Node):
        of_number = is_one_number(factor) and factor.meta["val"].dim() <= 2
        return of_number and factor.meta["val"].device == of.meta["val"].device
    return isinstance(factor, int | float)


def _keeps_shape(node: Node) -> bool:
    if node.target not in RESHAPES:
        return False
    source: Any = node.args[0]
    return statically_known_true(sym_eq(source.meta["val"].shape, node.meta["val"].shape))


def _softmaxes(graph: AtenGraph) -> dict[Matrix, list[Softmax]]:
    """The softmaxes of each matrix, by rows or by columns."""
    found: dict[Matrix, list[Softmax]] = defaultdict(list)
    for node in graph.graph.find_nodes(op="call_function", target=aten.amax.default):
        values, dims, keeps = (*node.args, [], False)[:3]
        read = matrix_of(values)
        if read is None or len(dims) != 1 or not keeps:
            continue
        matrix, turned = read
        dim = dims[0] % 2
        finite = [each for each in map(_finite_reader, node.users) if each is not None]
        softmax = Softmax(
            node,
            dim,
            (dim == 0) != turned,
            tuple(_sums(node, matrix, dim)),
            tuple(total for each in finite for total in _sums(each, matrix, dim)),
        )
        if softmax.sums or softmax.finite_sums:
            found[matrix].append(softmax)
    return found


def _finite_reader(user: Node) -> Node | None:
    """The largest numbers with 0 in the place of infinite ones, from what reads their sizes."""
    for test in user.users if user.target is aten.abs.default else ():
        if test.target is aten.eq.Scalar and test.args[1] == float("inf"):
            for chosen in test.users:
                if chosen.target is aten.where.self and chosen.args[2] is user.args[0]:
                    zero: Any = chosen.args[1]
                    return chosen if filled_with(zero) == 0 else None
    return None


def _sums(largest: Node, matrix: Matrix, dim: int) -> list[Node]:
    """The sums of exponentials of a matrix relative to some numbers of its rows or columns."""
    found = []
    for difference in largest.users:
        if difference.target is not aten.sub.Tensor or difference.kwargs:
            continue
        values, other = difference.args
        read = matrix_of(values) if isinstance(values, Node) else None
        if other is not largest or read is None or read[0] != matrix:
            continue
        for exponential in difference.users:
            if exponential.target is aten.exp.default:
                found += [user for user in exponential.users if _is_sum(user, dim)]
    return found


def _is_sum(node: Node, dim: int) -> bool:
    if node.target is not aten.sum.dim_IntList:
        return False
    source: Any = node.args[0]
    dims: Any = node.args[1]
    return [d % source.meta["val"].dim() for d in dims] == [dim]


def _replace(matrix: Matrix, softmaxes: Sequence[Softmax]) -> None:
    """Puts one call in the place of the reductions."""
    place = min(softmax.largest for softmax in softmaxes)
    call = emit(place, fused.softmax_sums.default, (matrix.node, _factor(matrix, place)))
    values = call.meta["val"]
    results = [
        emit(place, operator.getitem, (call, index), like=call, value=value)
        for index, value in enumerate(values)
    ]
    for softmax in softmaxes:
        largest, total = results[2:] if softmax.by_columns else results[:2]
        for node in softmax.sums:
            replace_uses(node, _like(total, node, softmax.dim))
        for node in softmax.finite_sums:
            # Relative to 0, where the largest number is infinite.
            infinite = emit(
                node, aten.eq.Scalar, (emit(node, aten.abs.default, (largest,)), float("inf"))
            )
            alone = emit(node, aten.exp.default, (largest,))
            chosen = emit(node, aten.where.self, (infinite, alone, total))
            replace_uses(node, _like(chosen, node, softmax.dim))
        replace_uses(softmax.largest, _like(largest, softmax.largest, softmax.dim))
    own = [node for s in softmaxes for node in (*s.sums, *s.finite_sums, s.largest)]
    erase_unused(sorted(own, reverse=True))
    take_parts_early(matrix.node)


def _factor(matrix: Matrix, place: Node) -> Node | None:
    """The number that the matrix is multiplied by."""
    if matrix.scaling is None:
        return None
    divides, factor = matrix.scaling
    value = matrix.node.meta["val"]
    if not isinstance(factor, Node):
        options = {"dtype": accumulation_type(value.dtype), "device": value.device}
        args: Any = ([], 1 / factor if divides else factor)
        return emit(place, aten.full.default, args, options, like=matrix.node)
    return emit(place, aten.reciprocal.default, (factor,)) if divides else factor


def _like(vector: Node, node: Node, dim: int) -> Node:
    """Numbers of rows or columns in the shape and dtype of a reduction that they replace."""
    value = node.meta["val"]
    if value.dim() == 2:
        vector = emit(node, aten.unsqueeze.default, (vector, dim))
    return in_dtype(vector, value.dtype, node)
