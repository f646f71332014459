"""What a recogniser returns, and how a match becomes a node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node


@dataclass
class Match:
    """A loss that ``fused::op`` can compute.

    Attributes:
        root: the node that holds the loss; it is replaced.
        op: the name of the public fused op.
        args, kwargs: the op's arguments, nodes or constants.
        interior: nodes between the arguments and the root that the op makes superfluous. They are
            erased where nothing else uses them.
        absorbed: what those nodes did beyond the op's plain meaning, in words.
        multiplier: the root is this many times the op's result.
        notes: what else the report should say.
    """

    root: Node
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    interior: list[Node] = field(default_factory=list)
    absorbed: list[str] = field(default_factory=list)
    multiplier: float = 1.0
    notes: list[str] = field(default_factory=list)

    @property
    def overload(self) -> torch._ops.OpOverload[..., Any]:
        return getattr(torch.ops.fused, self.op).default

    @property
    def inputs(self) -> list[Node]:
        return [a for a in (*self.args, *self.kwargs.values()) if isinstance(a, Node)]

    def replace(self) -> None:
        """Puts the op where the root stood, and erases what nobody uses any more."""
        graph = self.root.graph
        with graph.inserting_before(self.root):
            node = graph.call_function(self.overload, self.args, self.kwargs)
            node.meta = dict(self.root.meta)
            if self.multiplier != 1.0:
                node = graph.call_function(torch.mul, (node, self.multiplier))
                node.meta = dict(self.root.meta)
        self.root.replace_all_uses_with(node)
        # Only the match's own nodes: dead-code elimination on a Dynamo graph would take in-place
        # operations with it, whose effect is not in their result.
        for old in [self.root, *self.interior]:
            if not old.users:
                graph.erase_node(old)


@dataclass(frozen=True)
class Decline:
    """A loss that was seen and is left to torch."""

    root: Node
    name: str
    reason: str


def example(node: Any) -> Any:
    """The fake tensor or number recorded for a node in tracing; a constant stands for itself."""
    if not isinstance(node, Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))
