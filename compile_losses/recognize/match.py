"""The results of recognisers, matches and declined losses, and how a match becomes a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.graphs import ancestors, emit, erase_unused, replace_uses, undone_if_it_fails
from compile_losses.lazy import LazyOutput
from compile_losses.recognize.graph.memory import is_written
from compile_losses.recognize.graph.symbolic_tensors import (
    Value,
    computed_at,
    example,
    examples,
    fake_mode,
    put,
    sources,
)
from compile_losses.torch_internals.ops import OpOverload

aten = torch.ops.aten

#: In the place of a refusal: nobody has asked for it.
UNASKED = "nobody has asked the guards"


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
        refusal: why it may not be rewritten, once the guards have been asked; see
            :func:`compile_losses.recognize.guards.refusal`.
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
    refusal: str | None = field(default=UNASKED, init=False, compare=False)

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
        made = computed_at((self.args, self.kwargs, extra))
        nodes = (self.root, *self.interior, *self.detached, *made)
        return set(ancestors(nodes, until=inputs))

    def replace(self) -> list[Node]:
        """Puts the op in the root's place, and erases nodes that nothing uses any more.

        Returns:
            The nodes erased.
        """
        with undone_if_it_fails(self.root):
            node = self._emit()
        replace_uses(self.root, node)
        # Only the match's own nodes: dead-code elimination on a Dynamo graph would also erase
        # in-place operations, whose effect is not in their result.
        return erase_unused([self.root, *self.interior, *self.detached])

    def _emit(self) -> Node:
        """Puts the op, and the nodes that it needs, before the root."""
        root = self.root
        args = [put(argument, root) for argument in self.args]
        kwargs = {key: put(argument, root) for key, argument in self.kwargs.items()}
        values = [*self._before_steps(), example(root)]
        node = emit(root, self.overload, args, kwargs, value=values[0])
        for (function, rest), value in zip(self.steps, values[1:], strict=True):
            more = [put(argument, root) for argument in rest]
            node = emit(root, function, (node, *more), value=value)
        if self.steps and values[-1].dim() and is_written(root):  # numbers are no views
            node = emit(root, aten.clone.default, (node,), value=values[-1])
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
