"""The results of recognisers, matches and declined losses, and how a match becomes a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_losses.lazy import LazyOutput
from compile_losses.recognize.symbolic_tensors import (
    Value,
    computed_at,
    emit,
    example,
    examples,
    fake_mode,
    sources,
)
from compile_losses.torch_internals.graphs import EXAMPLE
from compile_losses.torch_internals.ops import OpOverload


@dataclass
class Match:
    """A loss that ``fused::op`` can compute.

    Attributes:
        root: the node that holds the loss; it is replaced.
        op: the name of the public fused op.
        args, kwargs: the op's arguments: nodes, Values computed from nodes, or constants.
        interior: nodes between the arguments and the root that the op makes superfluous. They are
            erased if nothing else uses them.
        detached: nodes that are superfluous as well and have no gradients, neither in the original
            nor in the op, whatever they are computed from.
        absorbed: the effects of these nodes beyond the op's plain meaning, in words.
        steps: functions, each with further arguments, that make the root of the op's result.
        notes: further remarks for the report.
        returned: the outputs of the graph that have to become lazy.
    """

    root: Node
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    interior: list[Node] = field(default_factory=list)
    absorbed: list[str] = field(default_factory=list)
    steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    returned: list[LazyOutput] = field(default_factory=list)
    detached: list[Node] = field(default_factory=list)

    @property
    def overload(self) -> OpOverload[..., Any]:
        return getattr(torch.ops.fused, self.op).default

    @property
    def inputs(self) -> list[Node]:
        """The nodes that the rewrite reads."""
        extra = [arguments for _, arguments in self.steps]
        return list(dict.fromkeys(sources((self.args, self.kwargs, extra))))

    @property
    def span(self) -> set[Node]:
        """The nodes that compute the root from the inputs, which the rewrite replaces."""
        inputs = set(self.inputs)
        extra = [arguments for _, arguments in self.steps]
        waiting = {
            self.root,
            *self.interior,
            *self.detached,
            *computed_at((self.args, self.kwargs, extra)),
        }
        span: set[Node] = set()
        while waiting:
            node = waiting.pop()
            span.add(node)
            waiting |= {n for n in node.all_input_nodes if n not in inputs and n not in span}
        return span

    def replace(self) -> list[Node]:
        """Puts the op in the root's place, and erases nodes that nothing uses any more.

        Returns:
            The nodes erased.
        """
        graph = self.root.graph
        before = self.root.prev
        try:
            with graph.inserting_before(self.root):
                node = self._emit(graph)
        except Exception:
            while self.root.prev is not before:  # as if nothing had been tried
                graph.erase_node(self.root.prev)
            raise
        self.root.replace_all_uses_with(node)
        # Only the match's own nodes: dead-code elimination on a Dynamo graph would also erase
        # in-place operations, whose effect is not in their result.
        erased = []
        for old in [self.root, *self.interior, *self.detached]:
            if not old.users:
                graph.erase_node(old)
                erased.append(old)
        return erased

    def _emit(self, graph: Graph) -> Node:
        """Inserts the op, and the nodes that it needs, at the graph's insertion point."""
        meta = self.root.meta
        args = [emit(graph, argument, meta) for argument in self.args]
        kwargs = {key: emit(graph, argument, meta) for key, argument in self.kwargs.items()}
        node = graph.call_function(self.overload, tuple(args), kwargs)
        node.meta = dict(meta)
        for (function, rest), value in zip(self.steps, self._before_steps(), strict=True):
            node.meta[EXAMPLE] = value
            more = [emit(graph, argument, meta) for argument in rest]
            node = graph.call_function(function, (node, *more))
            node.meta = dict(meta)
        return node

    def _before_steps(self) -> list[Tensor]:
        """The examples of the op's result and of the result of each step but the last."""
        values: list[Tensor] = []
        if self.steps:
            mode = fake_mode(example(self.root))
            assert mode is not None
            args, kwargs = examples((self.args, self.kwargs))
            with mode, torch.no_grad():
                values.append(self.overload(*args, **kwargs))
                for function, rest in self.steps[:-1]:
                    values.append(function(values[-1], *examples(rest)))
        # Computed examples have no gradients: the root's tells whether they need one.
        return [value.detach().requires_grad_(example(self.root).requires_grad) for value in values]


@dataclass(frozen=True)
class Decline:
    """A loss that was seen and is left to torch."""

    root: Node
    name: str
    reason: str


__all__ = ["Decline", "Match", "Value", "example"]
