"""Sizes of a joint graph that are read from tensors, computed of the graph's inputs instead.

With symbolic shapes a gradient is expanded to a size that a node reads from a loss, or from a view
of it. Such a node depends on the loss, but its value does not. Here each size is computed at the
start of the graph, of the symbols that the inputs' sizes are. What is made of sizes alone is then
known before any loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node

from compile_losses.graphs import emit, erase_unused, replace_uses
from compile_losses.torch_internals.symbols import (
    Expression,
    computed,
    expression_of,
    symbols_of,
)

aten = torch.ops.aten


def compute_sizes_early(graph: Graph) -> None:
    """Computes of the inputs' symbols what a graph reads of the sizes of its own tensors.

    A size with a symbol that no input has stays as it is.
    """
    late = [node for node in graph.nodes if _is_late(node)]
    if not late:
        return
    inputs = graph.find_nodes(op="placeholder")
    known = {expression_of(n.meta["val"]): n for n in inputs if is_symbolic(n)}
    first: Node = next(node for node in graph.nodes if node.op != "placeholder")
    for symbol in symbols_of(*(node.meta["val"] for node in late)):
        found = None if symbol in known else _size_of_an_input(inputs, symbol)
        if found is not None:
            size = found[0].meta["val"].shape[found[1]]
            known[symbol] = emit(first, aten.sym_size.int, found, like=found[0], value=size)
    for node in late:
        expression = expression_of(node.meta["val"])
        if expression not in known:
            if not symbols_of(node.meta["val"]) <= known.keys():
                continue
            known[expression] = computed(expression, known, partial(emit, first, like=node))
        replace_uses(node, known[expression])
    erase_unused(reversed(late))


def _is_late(node: Node) -> bool:
    """Whether a node holds a size that it reads from a tensor, or that is made of such sizes."""
    return node.op == "call_function" and is_symbolic(node)


def is_symbolic(node: Node) -> bool:
    """Whether a node holds a size."""
    return isinstance(node.meta.get("val"), SymInt)


def _size_of_an_input(inputs: list[Node], symbol: Expression) -> tuple[Node, int] | None:
    """The first input with a size that is a symbol, and which size; None if no input has it."""
    for node in inputs:
        value: Any = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(size, SymInt) and expression_of(size) == symbol:
                return node, dim
    return None


def size_node(size: SymInt, place: Node) -> Node | None:
    """A node before another one that holds a size; None if there is none."""
    for node in place.graph.nodes:
        if node is place:
            break
        if is_symbolic(node) and expression_of(node.meta["val"]) == expression_of(size):
            return node
    return None


def key_of(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The sizes of a shape, a symbol's as an expression: symbols can't be keys."""
    return tuple(expression_of(size) if isinstance(size, SymInt) else size for size in shape)
