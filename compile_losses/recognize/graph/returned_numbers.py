"""The numbers that a graph returns to be differentiated, and the reductions that make them.

This is for reports alone, and no graph is changed. A reduction that no site covers may be a loss
that was not recognised.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.graphs import ancestors
from compile_losses.recognize.graph.memory import bodies
from compile_losses.recognize.graph.symbolic_tensors import example
from compile_losses.sites import site_of
from compile_losses.torch_internals.ops import HigherOrderOperator, tree_leaves


@dataclass
class Returned:
    """A number that a graph returns and that needs a gradient.

    Attributes:
        node: the node that computes it.
        marks: of the sites that it is made of.
        reductions: the nodes that no site covers and that reduce a tensor of several elements.
    """

    node: Node
    marks: dict[int, None] = field(default_factory=dict)
    reductions: dict[Node, None] = field(default_factory=dict)


def returned_numbers(graph: Graph, marks: set[int]) -> list[Returned]:
    """The numbers that a graph returns or differentiates itself; its sites have these marks."""
    return _Scan(graph, marks).returned()


def of_parameters(reduction: Node) -> bool:
    """Whether a reduction reads parameters alone, as a penalty on weights does."""

    def tensors(node: Node) -> list[Node]:
        return [each for each in node.all_input_nodes if isinstance(example(each), Tensor)]

    inputs = [
        example(node)
        for node in ancestors([reduction], sources=tensors)
        if node is not reduction and node.op in ("placeholder", "get_attr")
    ]
    return bool(inputs) and all(isinstance(value, torch.nn.Parameter) for value in inputs)


def reads_a_function(reduction: Node) -> bool:
    """Whether a reduction reads the result of an autograd.Function, perhaps through ops of that
    result alone."""
    node = reduction
    while True:
        sources = [n for n in node.all_input_nodes if any(map(_has_gradient, _values(n)))]
        if len(sources) != 1:
            return False
        (node,) = sources
        if _is_higher_order(node):
            return getattr(node.target, "__name__", "") == "autograd_function_apply"


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _Scan:
    """One graph.

    Args:
        inside: whether it is the body of a higher-order op, in which tracing may not have noted
            which tensors need a gradient.
    """

    def __init__(self, graph: Graph, marks: set[int], *, inside: bool = False) -> None:
        self.graph = graph
        self.marks = marks
        self.inside = inside
        #: For each tensor the sites whose unreduced losses it is made of.
        self.below: dict[Node, dict[int, None]] = {}
        for node in graph.nodes:
            if (own := self._mark(node)) is not None:
                self.below[node] = {own: None}
            else:
                tensors = (n for n in node.all_input_nodes if not _is_number(n))
                self.below[node] = {m: None for n in tensors for m in self.below.get(n, ())}
                for _, body in bodies(node) if _is_higher_order(node) else ():
                    inner = (self._mark(n) for n in body.graph.nodes)
                    self.below[node].update(dict.fromkeys(m for m in inner if m is not None))

    def returned(self) -> list[Returned]:
        """The numbers that the graph returns or differentiates, without those that are made of
        nothing."""
        (output,) = self.graph.find_nodes(op="output")
        roots = dict.fromkeys(n for n in tree_leaves(output.args[0]) if isinstance(n, Node))
        for node in self.graph.nodes:
            is_call = node.target in ("backward", torch.autograd.backward, torch.autograd.grad)
            if is_call and node.args:
                roots |= dict.fromkeys(n for n in tree_leaves(node.args[0]) if isinstance(n, Node))
        found = [
            self._walk(root)
            for root in roots
            if isinstance(example(root), Tensor) and example(root).dim() == 0 and self._needs(root)
        ]
        return [one for one in found if one.marks or one.reductions]

    def _walk(self, root: Node) -> Returned:
        """Goes back through numbers to the sites and to the nodes that read larger tensors."""
        result = Returned(root)
        seen, waiting = {root}, [root]
        while waiting:
            node = waiting.pop()
            if (own := self._mark(node)) is not None:
                result.marks[own] = None
            elif _is_higher_order(node):
                for _, body in bodies(node):
                    for inner in _Scan(body.graph, self.marks, inside=True).returned():
                        result.marks |= inner.marks
                        result.reductions |= inner.reductions
            elif node.op in ("call_function", "call_method"):
                sources = [n for n in node.all_input_nodes if self._needs(n)]
                tensors = [n for n in sources if not self._is_of_numbers(n)]
                covered = {mark: None for n in tensors for mark in self.below[n]}
                result.marks |= covered
                if tensors and not covered:
                    result.reductions[node] = None
                waiting += [n for n in sources if n not in tensors and n not in seen]
                seen.update(sources)
        return result

    def _mark(self, node: Node) -> int | None:
        mark = site_of(node)
        return mark if mark in self.marks else None

    def _needs(self, node: Node) -> bool:
        """Whether a node holds a floating-point tensor that needs a gradient."""
        return any(
            isinstance(value, Tensor)
            and value.is_floating_point()
            and (value.requires_grad or self.inside)
            for value in _values(node)
        )

    def _is_of_numbers(self, node: Node, depth: int = 0) -> bool:
        """Whether a node is a number, several results that are read one by one, or made of numbers
        alone, as a stack is."""
        if _is_number(node) or (depth == 0 and not isinstance(example(node), Tensor)):
            return True
        if node.op not in ("call_function", "call_method") or depth > 3:
            return False
        sources = [n for n in node.all_input_nodes if self._needs(n)]
        return bool(sources) and all(self._is_of_numbers(n, depth + 1) for n in sources)


def _values(node: Node) -> Iterable[Any]:
    return tree_leaves(example(node))


def _is_number(node: Node) -> bool:
    value = example(node)
    return isinstance(value, Tensor) and statically_known_true(value.numel() == 1)


def _is_higher_order(node: Node) -> bool:
    return isinstance(node.target, HigherOrderOperator)
