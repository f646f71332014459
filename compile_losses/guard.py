"""Keeps a fault of this package out of a user's compilation.

If recognition or lowering fails, the losses are left to torch. The reason goes into the report and
into one warning. With ``options={"strict": True}``, or COMPILE_LOSSES_STRICT=1 in the environment,
the failure ends the compilation instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from compile_losses.switches import is_set
from compile_losses.torch_internals.dynamo import RestartAnalysis

T = TypeVar("T")

_warned: set[str] = set()


@dataclass(frozen=True)
class Failure:
    """The reason for a failure, in the place of a result."""

    reason: str


def strict_by_default() -> bool:
    """Whether COMPILE_LOSSES_STRICT=1 is in the environment."""
    return is_set("COMPILE_LOSSES_STRICT")


def attempt(action: Callable[[], T], *, strict: bool | None = None) -> T | Failure:
    """The result of ``action``, or the reason for its failure.

    Args:
        action: if it raises, it has changed nothing.
        strict: whether its exceptions are raised; by default as the environment says.

    Raises:
        torch._dynamo.exc.RestartAnalysis: Dynamo's request to itself to trace a function anew.
    """
    try:
        return action()
    except Exception as error:
        if isinstance(error, RestartAnalysis) or (
            strict_by_default() if strict is None else strict
        ):
            raise
        lines = str(error).strip().splitlines()
        what = ": ".join([type(error).__name__, *lines[:1]])
        reason = f"internal error: {what}; please report it"
        if reason not in _warned:
            _warned.add(reason)
            warnings.warn(
                f"compile_losses: a loss is left to torch because of an {reason}. "
                "COMPILE_LOSSES_STRICT=1 raises it",
                RuntimeWarning,
                stacklevel=2,
            )
        return Failure(reason)


def is_restart(error: Exception) -> bool:
    """Whether it is Dynamo's request to itself to trace a function anew, and so no failure."""
    return isinstance(error, RestartAnalysis)


class Snapshot:
    """A copy of a graph's nodes, to restore the graph after an unfinished change."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = [(node, node.args, node.kwargs, dict(node.meta)) for node in graph.nodes]

    def restore(self) -> None:
        """Nodes that were erased come back as new ones, which may have other names."""
        graph, present = self.graph, set(self.graph.nodes)
        restored: dict[Node, Node] = {}

        def mapped(arguments: Any) -> Any:
            return map_arg(arguments, lambda node: restored.get(node, node))

        for node, args, kwargs, _ in self.nodes:
            if node not in present:
                copy = graph.create_node(
                    node.op, node.target, mapped(args), mapped(kwargs), node.name, node.type
                )
                restored[node] = copy
        for node, args, kwargs, meta in self.nodes:
            current = restored.get(node, node)
            if current is node and not (
                node.args is args and node.kwargs is kwargs and not restored
            ):
                node.args, node.kwargs = mapped(args), mapped(kwargs)
            current.meta = meta
        following: Node | None = None
        for node, *_ in reversed(self.nodes):
            current = restored.get(node, node)
            if following is not None:
                following.prepend(current)
            following = current
        kept = {restored.get(node, node) for node, *_ in self.nodes}
        for node in reversed(list(graph.nodes)):
            if node not in kept:
                graph.erase_node(node)
