"""Which nodes come before another in a graph, and their move to an earlier place."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from compile_losses.torch_internals.ops import is_pure


def move_before(nodes: list[Node], first: Node) -> bool:
    """Moves what ``nodes`` are computed by to before ``first``; False where that can't be done."""
    late = later_sources(nodes, first)
    if first in late or not all(node.op == "get_attr" or is_movable(node) for node in late):
        return False  # the graph's constants are the same everywhere
    for node in late:
        first.prepend(node)
    return True


def later_sources(nodes: Iterable[Node], first: Node) -> list[Node]:
    """Nodes and what computes them, as far as that does not come before ``first``; in order."""
    order = {node: i for i, node in enumerate(first.graph.nodes)}
    late: set[Node] = set()
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in late and order[node] >= order[first]:
            late.add(node)
            work += node.all_input_nodes
    return sorted(late, key=order.__getitem__)


def is_movable(node: Node) -> bool:
    """Whether a call of an op gives the same wherever its arguments are there."""
    return node.op == "call_function" and is_pure(node.target)
