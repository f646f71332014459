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

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from compile_losses.switches import is_set
from compile_losses.torch_internals.dynamo import RestartAnalysis
from compile_losses.torch_internals.ops import tree_leaves

T = TypeVar("T")

_warned: set[str] = set()


@dataclass(frozen=True)
class Failure:
    """The reason for a failure, in the place of a result."""

    reason: str


def is_strict(given: bool | None = None) -> bool:
    """Whether failures are raised; by default if COMPILE_LOSSES_STRICT=1 is in the environment."""
    return is_set("COMPILE_LOSSES_STRICT") if given is None else given


def attempt(
    action: Callable[[], T], *, strict: bool | None = None, warns: bool = True
) -> T | Failure:
    """The result of ``action``, or the reason for its failure.

    Args:
        action: if it raises, it has changed nothing, or the caller undoes what it has.
        strict: whether its exceptions are raised; by default as the environment says.
        warns: whether the user is told at once.

    Raises:
        torch._dynamo.exc.RestartAnalysis: Dynamo's request to itself to trace a function anew.
    """
    try:
        return action()
    except Exception as error:
        if is_restart(error):
            raise
        failure = failure_of(error)
        if is_strict(strict):
            raise
        if warns:
            warn_of(failure)
        return failure


def failure_of(error: Exception) -> Failure:
    lines = str(error).strip().splitlines()
    what = ": ".join([type(error).__name__, *lines[:1]])
    return Failure(f"internal error: {what}; please report it")


def warn_of(failure: Failure) -> None:
    """Warns once in a process."""
    if failure.reason not in _warned:
        _warned.add(failure.reason)
        warnings.warn(
            f"compile_losses: losses are left to torch: {failure.reason}. "
            "COMPILE_LOSSES_STRICT=1 raises it",
            RuntimeWarning,
            stacklevel=3,
        )


def is_restart(error: Exception) -> bool:
    """Whether it is Dynamo's request to itself to trace a function anew, and so no failure."""
    return isinstance(error, RestartAnalysis)


class Snapshot:
    """A copy of a graph's nodes, to restore the graph after an unfinished change."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._take()

    def _take(self) -> None:
        nodes = self.graph.nodes
        self.nodes = [(node, node.args, node.kwargs, dict(node.meta)) for node in nodes]
        self.names = {node: node.name for node in nodes}
        self.users = {node: list(node.users) for node in nodes}

    def is_intact(self) -> bool:
        """Whether the graph has the same nodes with the same arguments."""
        present = list(self.graph.nodes)
        return len(present) == len(self.nodes) and all(
            node is now and args is now.args and kwargs is now.kwargs
            for (node, args, kwargs, _), now in zip(self.nodes, present, strict=True)
        )

    def check(self) -> None:
        """Checks that a graph which was changed is one that torch can run.

        Raises:
            Exception: it is not.
        """
        if self.is_intact():
            return
        self.graph.lint()
        for node in self.graph.nodes:
            if node in self.names:
                continue
            for argument in tree_leaves((node.args, node.kwargs)):
                is_ours = type(argument).__module__.partition(".")[0] == __package__
                if is_ours or isinstance(argument, Tensor):
                    raise TypeError(f"{node.name} reads {argument}, which no graph can hold")

    def restore(self) -> None:
        """Nodes that were erased come back as new ones, which have the same names."""
        graph, present = self.graph, set(self.graph.nodes)
        restored: dict[Node, Node] = {}

        def mapped(arguments: Any) -> Any:
            return map_arg(arguments, lambda node: restored.get(node, node))

        for node, args, kwargs, _ in self.nodes:
            if node not in present:
                copy = graph.create_node(node.op, node.target, mapped(args), mapped(kwargs))
                copy.name, copy.type = self.names[node], node.type
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
        others = [node for node in graph.nodes if node not in kept]
        for node in others:  # which may read each other in any order
            node.args, node.kwargs = (), {}
        for node in others:
            graph.erase_node(node)
        for node, users in self.users.items():  # in the same order
            current = restored.get(node, node)
            current.users.clear()
            current.users.update(dict.fromkeys(restored.get(user, user) for user in users))
        self._take()
