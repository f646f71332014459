"""Calls of ``fused::linear_region`` for rows of a graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from compile_losses.graphs import emit, in_dtype
from compile_losses.lower.early_sizes import size_node
from compile_losses.lower.regions.rows import Rows
from compile_losses.lower.regions.steps import (
    CLASSES,
    COLUMN,
    LOGITS,
    NUMBER,
    End,
    NotOfRowsError,
    Read,
)
from compile_losses.lower.row_gradients import as_broadcast
from compile_losses.ops.linear.region_program import (
    Place,
    Product,
    Program,
    RowProduct,
    Sum,
    Total,
)
from compile_losses.ops.linear.steps import Operand

aten = torch.ops.aten
fused = torch.ops.fused


def needed(rows: Rows, targets: Iterable[Node], given: Mapping[Node, Any]) -> list[Node]:
    """The nodes that are computed for others, these among them, each after what it reads.

    Args:
        given: columns that are known, and so not computed.
    """
    order: dict[Node, None] = {}
    waiting = [(node, False) for node in reversed(list(targets))]
    while waiting:
        node, is_ready = waiting.pop()
        if node in order or node in given:
            continue
        if is_ready:
            order[node] = None
            continue
        waiting.append((node, True))
        step = rows.wholes.get(node) or rows.step(node)
        assert step is not None
        read = [r.node for r in step.reads if rows.step(r.node) is not None]
        waiting += [(each, False) for each in reversed(read)]
    return [node for node in order if node not in rows.wholes]


def known_reads(rows: Rows, nodes: Iterable[Node], given: Mapping[Node, Any] = {}) -> list[Read]:
    """What nodes read that is not computed with them, each once."""
    steps = filter(None, map(rows.step, nodes))
    reads = (read for step in steps for read in step.reads)
    return list(dict.fromkeys(r for r in reads if r.node in given or rows.step(r.node) is None))


class Writer:
    """Writes the program of some columns and ends, and the call.

    Args:
        place: the node before which the call is put.
        copies: what is read in the place of known nodes.
        given: columns that are known, each with the node that holds them as [rows].
    """

    def __init__(
        self, rows: Rows, place: Node, copies: Mapping[Node, Node], given: Mapping[Node, Node]
    ) -> None:
        self.of, self.place, self.copies, self.given = rows, place, copies, given
        self.rows: dict[Node, int] = {}
        self.shared: dict[Node, int] = {}

    def call(self, columns: Sequence[Node], ends: Sequence[End]) -> list[Node]:
        """The nodes that hold the columns, each as [rows], and the results of the ends.

        Args:
            columns: columns of the rows, and numbers of all logits, of which the column is meant.

        Raises:
            NotOfRowsError: a step has an argument that has no text, or a size that is not known.
        """
        row_products = [end for end in ends if not end.is_sum]
        sums = [end for end in ends if end.is_sum and end.other is not None]
        totals = [end for end in ends if end.other is None]
        nodes = needed(self.of, [*columns, *(end.logits for end in ends)], self.given)
        nodes += [column for column in columns if column in self.of.wholes]
        heads = [node for node in nodes if node in self.of.heads]
        products = tuple(self._product(node) for node in heads)
        reads = known_reads(self.of, nodes, self.given)
        known = tuple(self._known(read) for read in reads)
        numbers: dict[Any, int] = {node: i for i, node in enumerate(heads)}
        numbers |= {read: len(heads) + i for i, read in enumerate(reads)}
        steps: list[Any] = []

        def operand(argument: Any) -> Any:
            if isinstance(argument, list):
                return [operand(each) for each in argument]
            if not isinstance(argument, Read):
                return argument
            found = numbers.get(argument)
            return Operand(numbers[argument.node] if found is None else found)

        for node in nodes:
            step = self.of.wholes.get(node) or self.of.step(node)
            assert step is not None
            if node in self.of.heads:
                continue
            args = [operand(a) for a in step.args]
            if step.op is None:
                numbers[node] = args[0].number
                continue
            steps.append((step.op, args, {k: operand(v) for k, v in step.kwargs.items()}))
            numbers[node] = len(heads) + len(reads) + len(steps) - 1
        program = Program(
            products,
            known,
            tuple(steps),
            tuple(numbers[node] for node in columns),
            tuple(RowProduct(numbers[e.logits], self._shared(e.other)) for e in row_products),
            tuple(
                Sum(numbers[e.logits], self._of_rows(e.other), e.is_turned, self._classes(e))
                for e in sums
            ),
            tuple(Total(numbers[end.logits], self._classes(end)) for end in totals),
            (
                *(self._dtype(node) for node in columns),
                *(e.node.meta["val"].dtype for e in (*row_products, *sums, *totals)),
            ),
        )
        try:
            text = program.text()
        except TypeError as error:
            raise NotOfRowsError(str(error)) from error
        call = emit(
            self.place,
            fused.linear_region.default,
            (list(self.rows), list(self.shared), text),
            like=self.of.product,
        )
        results = [
            emit(self.place, operator.getitem, (call, i), like=self.of.product, value=value)
            for i, value in enumerate(call.meta["val"])
        ]
        order = [*columns, *(end.node for end in (*row_products, *sums, *totals))]
        places = dict(zip(order, results, strict=True))
        return [places[node] for node in (*columns, *(end.node for end in ends))]

    def _classes(self, end: End) -> int:
        """How many classes the logits of an end have."""
        step = self.of.step(end.logits)
        assert step is not None
        classes: int = end.logits.meta["val"].shape[step.axis]
        return classes

    def _dtype(self, column: Node) -> torch.dtype:
        whole = self.of.wholes.get(column)
        given = None if whole is None else whole.kwargs["dtype"]
        return given or column.meta["val"].dtype

    def _product(self, node: Node) -> Product:
        head = self.of.heads[node]
        bias = None if head.bias is None else self._shared(head.bias)
        return Product(self._of_rows(head.input), self._shared(head.columns), bias)

    def _known(self, read: Read) -> Place:
        if read.node in self.given:
            return Place(True, self._of_rows(self.given[read.node]))
        node = self.copies.get(read.node, read.node)
        value = node.meta["val"]
        if read.kind == NUMBER:
            flat = node if value.dim() == 0 else self._reshaped(node, [1])
            return Place(False, self._shared(flat))
        if read.kind == CLASSES:
            return Place(False, self._shared(self._reshaped(node, [-1])))
        assert read.kind in (COLUMN, LOGITS)
        if read.axis != -1:
            dims = list(range(value.dim()))
            dims.append(dims.pop(read.axis))
            node = emit(self.place, aten.permute.default, (node, dims), like=self.of.product)
            read = replace(read, shape=tuple(node.meta["val"].shape), axis=-1)
        whole = as_broadcast(node, read.shape, self.place, self.of.product)
        if whole is None:
            raise NotOfRowsError(f"the size of {node.name} is not known before it")
        columns = 1 if read.kind == COLUMN else read.shape[-1]
        flat = self._reshaped(whole, [-1, columns])
        return Place(True, self._of_rows(flat))

    def _reshaped(self, node: Node, shape: list[int]) -> Node:
        value = node.meta["val"]
        if value.dim() == len(shape) and (shape == [-1] or value.shape[-1] == shape[-1]):
            return node
        return emit(self.place, aten.reshape.default, (node, shape), like=self.of.product)

    def _of_rows(self, node: Any) -> int:
        return self.rows.setdefault(self.copies.get(node, node), len(self.rows))

    def _shared(self, node: Any) -> int:
        return self.shared.setdefault(self.copies.get(node, node), len(self.shared))


def result_of(flat: Node, node: Node, rows: Rows, place: Node) -> Node:
    """What takes the place of a column, or of a number of all logits.

    Args:
        flat: the column as [rows].

    Raises:
        NotOfRowsError: a size of it is not known there.
    """
    whole = rows.wholes.get(node)
    if whole is None:
        return in_shape_of(flat, node, place)
    op = aten.sum.default if whole.op is aten.sum.dim_IntList else aten.mean.default
    number = emit(place, op, (flat,), like=node)
    number = in_dtype(number, node.meta["val"].dtype, place, like=node)
    return in_shape_of(number, node, place)


def in_shape_of(node: Node, like: Node, place: Node) -> Node:
    """A result in the shape of the node that it takes the place of.

    Raises:
        NotOfRowsError: a size of it is not known there.
    """
    shape = like.meta["val"].shape
    if len(shape) == node.meta["val"].dim():
        return node
    sizes = [size if isinstance(size, int) else size_node(size, place) for size in shape]
    if None in sizes:
        raise NotOfRowsError(f"a size of {like.name} is not known before it")
    return emit(place, aten.reshape.default, (node, sizes), like=like)
