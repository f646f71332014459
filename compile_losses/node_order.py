"""Which nodes come before another in a graph, and their move to an earlier place.

Recognition and the passes on lower graphs share this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Node

from compile_losses.torch_internals.ops import is_pure


def move_before(
    nodes: list[Node], first: Node, may_move: Callable[[Node], bool] | None = None
) -> bool:
    """Moves what ``nodes`` are computed by to before ``first``; False where that can't be done.

    Args:
        may_move: whether a node may move; by default calls of ops that give the same anywhere, and
            the graph's constants.
    """
    late = later_sources(nodes, first)
    if first in late or not all(map(may_move or _may_move, late)):
        return False
    for node in late:
        first.prepend(node)
    return True


def later_sources(nodes: Iterable[Node], first: Node) -> list[Node]:
    """Nodes and what computes them, as far as that does not come before ``first``; in order."""
    late: set[Node] = set()
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in late and not node < first:
            late.add(node)
            work += node.all_input_nodes
    return sorted(late)


def _may_move(node: Node) -> bool:
    return node.op == "get_attr" or is_movable(node)


def is_movable(node: Node) -> bool:
    """Whether a call of an op gives the same wherever its arguments are there."""
    return node.op == "call_function" and is_pure(node.target)
