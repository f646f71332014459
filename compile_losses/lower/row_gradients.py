"""Gradients of a linear layer's losses by row, which a forward can compute with them.

A joint graph has an unreduced loss and its gradients as two calls. The second computes all logits
again::

    losses = linear_cross_entropy_forward(...)
    of_input, of_weight, of_bias = linear_cross_entropy_backward(g, ...)

Often ``g`` is the tangent of the whole times a function of each row's own loss and of what the
forward knows: a mask over its sum, the advantages and the clipped ratios of PPO and GRPO. Then the
forward can make the gradients for a tangent of 1, a chunk of rows at a time, and the backward
scales them. If only input needs a gradient, ``g`` may be anything: the forward computes the
gradient of each row for a gradient of 1, and the backward multiplies it by ``g``.

If a forward returns several statistics of each row, each has its own ``g``, a function of all of
them. One of them may be K numbers of each row, the log-probabilities of picked classes. Then the
function works on values of one number a row and on values of several.

No values are tried: each op between the losses and ``g`` is known to work element by element, or
on the numbers of each row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.graphs import ancestors, copy_nodes, descendants, emit, move_before
from compile_losses.lower.early_sizes import key_of, size_node
from compile_losses.lower.elementwise.find import linear_part
from compile_losses.lower.known_factors import has_one_element, is_one_number
from compile_losses.op_traits import SAME_IF_AS_MANY, SCATTERS
from compile_losses.ops.linear.row_function import (
    COLUMN,
    JOIN,
    LARGEST,
    REPEAT,
    SLICE,
    SUM,
    encode,
    is_of_elements,
)
from compile_losses.ops.linear.row_statistics import LOG_PROBS
from compile_losses.ops.linear.steps import Operand, Step

aten = torch.ops.aten

_SPLIT = aten.split_with_sizes.default


@dataclass(frozen=True)
class RowGradients:
    """``g`` as the forward can compute it, for a tangent of 1.

    Attributes:
        tangent: what the gradients are to be multiplied by.
        function: see :mod:`compile_losses.ops.linear.row_function`.
        known: the tensors that the function reads.
    """

    tangent: Node
    function: str
    known: tuple[Node, ...]


def values_of(losses: Node) -> list[Tensor]:
    """The fakes of what a call computes of each row."""
    value = losses.meta["val"]
    return list(value) if isinstance(value, tuple | list) else [value]


def row_gradients(
    losses: Node, grad_outputs: Sequence[Node | None], backward: set[Node]
) -> RowGradients | str:
    """The function by which the forward computes the gradients of all rows, or why there is none.

    The graph changes only in that known nodes are moved, and added, before ``losses``.

    Args:
        losses: the call that holds the loss of each row, or several statistics of it.
        grad_outputs: of these, in the backward; None where there is none.
        backward: the nodes that depend on tangents.
    """
    given = [node for node in grad_outputs if node is not None]
    cone = set(ancestors(given))
    tangents = [n for n in cone if n.op == "placeholder" and n in backward]
    if len(tangents) != 1 or not is_one_number(tangents[0]):
        return "its gradients are made of more than one number from outside of the graph"
    (tangent,) = tangents
    late = set(descendants([losses]))
    several = next((v.shape[1] for v in values_of(losses) if v.dim() == 2), None)
    if several is not None and type(several) is not int:
        return "its picks are a number of classes that is a symbol"
    writer = _Writer(losses, tangent, several)
    inner = [n for n in losses.graph.nodes if n in cone and (n in late or n in backward)]
    inner = [n for n in inner if n not in (losses, tangent) and n not in writer.same]
    for node in inner:
        reason = writer.take(node, late)
        if reason is not None:
            return reason
    linear = set(linear_part(tangent, backward, moves=True))
    odd = next((n for n in inner if n in backward and n not in linear), None)
    if odd is not None:
        return f"its gradients are not linear in that of the whole: {odd.name}"
    return writer.result(grad_outputs)


class _Writer:
    """Writes the function of each row, and copies what it knows to before the losses.

    Attributes:
        steps: the nodes that work on each row's loss, and what is made of it.
        same: the losses, the steps and views of them, and which of the former holds their numbers.
        numbers: the values of the function: the losses, and the steps once they are written.
        columns: how many numbers of each row the statistic has that is [rows, K], else 1.
        has_column: whether it is there and has one.
        widths: how many numbers of each row the values of the function have.
        early: what depends on the tangent but on no loss, to be copied for a tangent of 1.
        known: the other tensors that the steps read, each with the shape in which it is read.
    """

    def __init__(self, losses: Node, tangent: Node, columns: int | None) -> None:
        self.losses, self.tangent = losses, tangent
        self.graph: Graph = losses.graph
        self.values = values_of(losses)
        # The first statistic is empty if no class is picked.
        self.rows = self.values[-1].shape[0]
        self.columns, self.has_column = columns or 1, columns == 1
        self.widths = {1, self.columns}
        self.steps: list[Node] = []
        self.numbers = {losses: 0}
        if isinstance(losses.meta["val"], tuple | list):
            self.numbers = {item: int(item.args[1]) for item in losses.users}  # type: ignore[arg-type]
        self.same: dict[Node, Node] = {value: value for value in self.numbers}
        self.early: list[Node] = []
        self.known: list[tuple[Node, tuple[Any, ...]]] = []

    def take(self, node: Node, late: set[Node]) -> str | None:
        """Adds a node to the function or to its known tensors, or says why neither can be done."""
        across = f"its gradients may depend on the losses of other rows: {node.name}"
        of_losses = [source for source in node.all_input_nodes if source in self.same]
        if not of_losses:
            if node in late:
                return across
            self.early.append(node)
            return None
        if any(source in late and source not in self.same for source in node.all_input_nodes):
            return across
        value: Any = node.meta.get("val")
        if self._is_split(node):
            self.widths.update(node.args[1])  # type: ignore[arg-type]
            self.same[node] = node  # only its parts are read
            return None
        if node.target in (JOIN, SLICE):
            self._widen(node)
        columns = self._columns(value)
        if columns is None:
            return across
        if self._is_of_rows(node, columns):
            self.known += [(s, tuple(s.meta["val"].shape)) for s in self._known_parts(node)]
            self.steps.append(node)
            self.same[node] = node
            return None
        if node.target in SAME_IF_AS_MANY and self._columns(of_losses[0].meta["val"]) == columns:
            self.same[node] = self.same[of_losses[0]]
            return None
        # If the result has as many numbers as the second argument, it is the second argument.
        if node.target in SCATTERS and has_as_many(node, node.args[1]):
            if node.args[1] not in self.same:
                return across
            self.same[node] = self.same[node.args[1]]  # type: ignore[index]
            return None
        if not is_of_elements(node.target):
            return across
        for source in node.all_input_nodes:
            if not isinstance(source.meta.get("val"), Tensor):
                return f"{node.name} takes a number that changes: a constant is taken along"
            if source not in self.same:
                self.known.append((source, tuple(value.shape)))
            elif self._columns(source.meta["val"]) != columns and not _is_column(source, node):
                return across
        self.steps.append(node)
        self.same[node] = node
        return None

    def _columns(self, value: Any) -> int | None:
        """How many numbers of each row a tensor has, if as many as a value of the function."""
        if isinstance(value, Tensor):
            for columns in sorted(self.widths):
                if statically_known_true(value.numel() == self.rows * columns):
                    return columns
        return None

    def _is_of_rows(self, node: Node, columns: int) -> bool:
        """Whether a node makes another number of numbers of those that each row has."""
        if node.target in (JOIN, SLICE):
            return self._is_along_rows(node)
        if node.target is operator.getitem:  # a part of a split
            return True
        source = node.args[0]
        if not isinstance(source, Node) or source not in self.same:
            return False
        before = self._columns(source.meta["val"])
        if before == columns:
            return False
        if node.target is aten.expand.default:
            return columns == self.columns and _is_column(source, node)
        if node.target not in (SUM, LARGEST) or node.kwargs:
            return False
        shape, dims = source.meta["val"].shape, node.args[1] if len(node.args) > 1 else []
        is_last = dims in ([-1], [len(shape) - 1])
        return is_last and bool(statically_known_true(shape[-1] == before))

    def _is_split(self, node: Node) -> bool:
        """Whether a node takes the numbers of each row apart."""
        if node.target is not _SPLIT or node.kwargs or node.args[0] not in self.same:
            return False
        source, sizes, *dim = node.args
        value, last = source.meta["val"], len(source.meta["val"].shape) - 1  # type: ignore[union-attr]
        if (dim or [0])[0] not in (-1, last) or type(value.shape[last]) is not int:
            return False
        whole = self._columns(value) == value.shape[last] != 1
        return whole and all(type(size) is int for size in sizes)  # type: ignore[union-attr]

    def _known_parts(self, node: Node) -> list[Node]:
        """Those of the tensors that a node joins that are made of no losses."""
        known = (source for source in node.all_input_nodes if source not in self.same)
        return [source for source in known if isinstance(source.meta["val"], Tensor)]

    def _is_along_rows(self, node: Node) -> bool:
        """Whether a node joins numbers of each row, or takes some of them in order."""
        if node.kwargs or len(node.args) < 2:
            return False
        given, dim, *rest = node.args
        sources: Any = [given] if node.target is SLICE else given
        shape = node.meta["val"].shape
        if not all(isinstance(s, Node) for s in sources):
            return False
        if dim not in (-1, len(shape) - 1) or not all(type(bound) is int for bound in rest):
            return False
        if node.target is SLICE and len(rest) != 2:
            return False
        shapes = [source.meta["val"].shape for source in sources]
        if not all(type(each[-1]) is int for each in (shape, *shapes)):
            return False
        if (shapes[0] if node.target is SLICE else shape)[-1] == 1:
            return False
        return all(
            statically_known_true(source.meta["val"].numel() == self.rows * each[-1])
            and (source not in self.same or each[-1] in self.widths)
            for source, each in zip(sources, shapes, strict=True)
        )

    def _widen(self, node: Node) -> None:
        """Takes a width in which a node joins, or takes, numbers of each row."""
        if self._is_along_rows(node):
            joined = [node, *self._known_parts(node)]
            self.widths |= {each.meta["val"].shape[-1] for each in joined}

    def result(self, grad_outputs: Sequence[Node | None]) -> RowGradients | str:
        """Emits the known tensors, and writes the function."""
        for gradient in grad_outputs:
            if gradient is not None and gradient not in self.same:
                self.known.append((gradient, tuple(gradient.meta["val"].shape)))
        sizes = [size for _, shape in self.known for size in shape]
        if not all(isinstance(size, int) or size_node(size, self.losses) for size in sizes):
            return "what its gradients are made of has sizes that are not known before it"
        if not self._move_sources():
            return "what its gradients are made of can't be computed before it"
        first = len(self.values)
        shapes = {_in_shape(*known): known for known in self.known}
        places = {known: first + i for i, known in enumerate(shapes)}
        numbers, steps = self.numbers, list[Step]()

        def add(op: Any, args: Sequence[Any], named: dict[str, Any] | None = None) -> Operand:
            steps.append((op, args, named or {}))
            return Operand(first + len(places) + len(steps) - 1)

        if self.has_column:  # one number a row has one dimension
            numbers |= {
                item: add(SUM, (Operand(LOG_PROBS), [1])).number
                for item, place in numbers.items()
                if place == LOG_PROBS
            }

        def part(source: Node) -> Operand:
            value = source.meta["val"]
            number = places.get(_in_shape(source, value.shape))
            found = Operand(numbers[self.same[source]] if number is None else number)
            return add(COLUMN, (found, 1)) if self._columns(value) == 1 else found

        for node in self.steps:
            value = node.meta["val"]

            def operand(source: Node, value: Tensor = value) -> Operand:
                if source not in self.same:
                    return Operand(places[_in_shape(source, value.shape)])
                found = Operand(numbers[self.same[source]])
                if self._columns(value) == 1 or self._columns(source.meta["val"]) != 1:
                    return found
                return add(COLUMN, (found, 1))

            if node.target is JOIN:
                made = add(JOIN, (list(map(part, node.args[0])), 1))  # type: ignore[arg-type]
            elif node.target is SLICE:
                made = add(SLICE, (operand(node.args[0]), 1, *node.args[2:]))  # type: ignore[arg-type]
                if self._columns(value) == 1:
                    made = add(SUM, (made, [1]))
            elif node.target is operator.getitem:
                source, *bounds = _part(node)
                made = add(SLICE, (operand(source), 1, *bounds))
                if self._columns(value) == 1:
                    made = add(SUM, (made, [1]))
            elif node.target in (SUM, LARGEST):
                made = add(node.target, (operand(node.args[0]), [1]))  # type: ignore[arg-type]
            elif node.target is aten.expand.default:
                made = add(REPEAT, (operand(node.args[0]), Operand(LOG_PROBS)))  # type: ignore[arg-type]
            else:
                made = add(node.target, *_mapped(node, operand))
            numbers[node] = made.number

        def number(gradient: Node | None) -> int | None:
            if gradient is None:
                return None
            value = gradient.meta["val"]
            if gradient in self.same:
                found = numbers[self.same[gradient]]
            else:
                found = places[_in_shape(gradient, value.shape)]
            is_column = self.has_column and value.dim() == 2
            return add(COLUMN, (Operand(found), 1)).number if is_column else found

        results = [number(gradient) for gradient in grad_outputs]
        text = encode(steps, results)
        if text is None:
            return "an op before their gradients has an argument that no text stands for"
        copies = self._copied()
        tensors = tuple(self._as_known(copies.get(n, n), shape) for n, shape in shapes.values())
        return RowGradients(self.tangent, text, tensors)

    def _move_sources(self) -> bool:
        """Moves the known nodes before the losses; False if that can't be done."""
        own = {self.tangent, self.losses, *self.early, *self.same}
        read = [source for node in self.early for source in node.all_input_nodes]
        read += [source for source, _ in self.known]
        return move_before([n for n in dict.fromkeys(read) if n not in own], self.losses)

    def _copied(self) -> dict[Node, Node]:
        """Copies of the early nodes for a tangent of 1, before the losses."""
        value: Tensor = self.tangent.meta["val"]
        options: dict[str, Any] = {
            "dtype": value.dtype,
            "device": value.device,
            "layout": torch.strided,
        }
        one = emit(self.losses, aten.full.default, (list(value.shape), 1), options, value=value)
        copies = {self.tangent: one}
        copy_nodes(self.early, copies, lambda _: self.losses, self.losses)
        return copies

    def _as_known(self, node: Node, shape: Sequence[Any]) -> Node:
        """One number as [] or [1], and anything else as [rows] or, with several a row, [rows, K].

        Args:
            shape: which it is read in.
        """
        value: Tensor = node.meta["val"]
        if has_one_element(value):
            is_number = value.dim() == 0
            return node if is_number else emit(self.losses, aten.reshape.default, (node, [1]))
        expanded = as_broadcast(node, shape, self.losses, self.losses)
        assert expanded is not None, "a size is not known"
        columns = self._columns(expanded.meta["val"])
        assert columns is not None
        return as_rows(expanded, columns, self.losses, self.losses)


def as_broadcast(node: Node, shape: Sequence[Any], place: Node, like: Node) -> Node | None:
    """A tensor in the shape that it is broadcast to; None if a size of that is not known there.

    Args:
        place, like: as for :func:`compile_losses.graphs.emit`.
    """
    if key_of(node.meta["val"].shape) == key_of(shape):
        return node
    sizes = [size if isinstance(size, int) else size_node(size, place) for size in shape]
    return None if None in sizes else emit(place, aten.expand.default, (node, sizes), like=like)


def as_rows(node: Node, columns: int, place: Node, like: Node) -> Node:
    """A tensor as [rows] or, with several numbers a row, [rows, columns]."""
    if node.meta["val"].dim() == (1 if columns == 1 else 2):
        return node
    flat = [-1] if columns == 1 else [-1, columns]
    return emit(place, aten.reshape.default, (node, flat), like=like)


def _in_shape(node: Node, shape: Sequence[Any]) -> tuple[Any, ...]:
    """A key for a tensor that is read in a shape, whose symbols can't be keys themselves."""
    return node, *key_of(shape)


def _part(node: Node) -> tuple[Node, int, int]:
    """What is split, and where a part of it starts and ends."""
    split: Any
    split, index = node.args
    source, sizes, *_ = split.args
    start = sum(sizes[:index])
    return source, start, start + sizes[index]


def _is_column(source: Node, node: Node) -> bool:
    """Whether a node has the shape of a source but for the last dimension, which is one of one."""
    *rows, last = source.meta["val"].shape or [None]
    *of_node, columns = node.meta["val"].shape or [None]
    return last == 1 and columns != 1 and len(rows) == len(of_node) and _same(rows, of_node)


def _same(rows: Sequence[Any], other: Sequence[Any]) -> bool:
    pairs = zip(rows, other, strict=True)
    return all(statically_known_true(one == two) for one, two in pairs)


def has_as_many(node: Node, argument: Any) -> bool:
    """Whether an argument holds as many numbers as a node."""
    value, given = node.meta["val"], argument.meta["val"]
    return bool(statically_known_true(value.numel() == given.numel()))


def _mapped(node: Node, operand: Callable[[Node], Operand]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a node, those that are nodes as operands."""

    def of(argument: Any) -> Any:
        return operand(argument) if isinstance(argument, Node) else argument

    return [of(a) for a in node.args], {k: of(v) for k, v in node.kwargs.items()}
