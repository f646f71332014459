"""The fused ops in an ATen graph: which loss a call belongs to, which part it plays, and which
forward a gradient comes from."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from compile_losses.library import DECLARED, is_declared
from compile_losses.torch_internals.ops import OpOverload, named_arguments, schema_of

PARTS = ("forward", "backward", "with_grad", "ahead", "ahead_gradient")


#: A call of a fused op, the name of its loss and the part that it is.
Call: TypeAlias = tuple[Node, str, str]


def fused_call(node: Node) -> tuple[str, str] | None:
    """The loss and the part of a call of ``fused::<loss>_<part>``; None for any other node."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    if not is_declared(node.target):
        return None
    name = schema_of(node.target).name.removeprefix("fused::")
    for part in PARTS:
        if name.endswith(f"_{part}"):
            return name.removesuffix(f"_{part}"), part
    return None


def has_part(loss: str, part: str) -> bool:
    """Whether a loss has an op; one that is composed of others has no ``with_grad_``."""
    return f"{loss}_{part}" in DECLARED


def is_elementwise(loss: str) -> bool:
    """Whether a loss's forward returns nothing that its backward needs."""
    return len(schema_of(fused_op(loss, "forward")).returns) == 1


def fused_op(loss: str, part: str) -> OpOverload[..., Any]:
    return getattr(torch.ops.fused, f"{loss}_{part}").default


@dataclass(frozen=True)
class Loss:
    """A loss in a joint or inference graph.

    Attributes:
        name: of the loss.
        forward: the call of ``X_forward``.
        backwards: the calls of ``X_backward`` with the same arguments.
    """

    name: str
    forward: Node
    backwards: tuple[Node, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        return named_arguments(self.forward)

    @property
    def is_elementwise(self) -> bool:
        """Whether each element has a loss of its own, without statistics of its row."""
        return is_elementwise(self.name)

    @property
    def input(self) -> Node:
        return self.forward.args[0]  # type: ignore[return-value]

    @property
    def value(self) -> Node | None:
        """The node that holds the loss."""
        return result(self.forward, 0)

    def gradients(self) -> list[Node]:
        """The nodes that hold the gradients which the backward computes."""
        found = []
        for backward in self.backwards:
            named = named_arguments(backward)
            needs = [v for k, v in named.items() if k.startswith("needs_grad_")] or [True]
            nodes = (result(backward, i) for i, needed in enumerate(needs) if needed)
            found += [node for node in nodes if node is not None]
        return found


def result(call: Node, index: int) -> Node | None:
    """The node that holds one of a call's results; None where there is not exactly one."""
    if len(schema_of(call.target).returns) == 1:
        return call
    items = [u for u in call.users if u.target is operator.getitem and u.args[1] == index]
    return items[0] if len(items) == 1 else None


def find_calls(graph: Graph) -> list[Call]:
    """The calls of fused ops in a graph, in its order."""
    return [(node, *call) for node in graph.nodes if (call := fused_call(node))]


def find_losses(graph: Graph) -> list[Loss]:
    """The losses of a graph in its order, each with its gradients; not those composed of others."""
    calls = [call for call in find_calls(graph) if has_part(call[1], "with_grad_")]
    return [
        Loss(
            name,
            node,
            tuple(
                o for o, n, p in calls if (n, p) == (name, "backward") and same_arguments(node, o)
            ),
        )
        for node, name, part in calls
        if part == "forward"
    ]


def same_arguments(forward: Node, backward: Node) -> bool:
    """Whether two ops have the same arguments, but for what each has of its own."""
    left, right = named_arguments(forward), named_arguments(backward)
    return all(right[k] == v for k, v in left.items() if k in right)
