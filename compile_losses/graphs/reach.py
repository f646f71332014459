"""Which nodes of a graph are computed from which, and which come before another."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

from torch.fx import Node

from compile_losses.torch_internals.ops import is_pure


def ancestors(
    nodes: Iterable[Node],
    *,
    until: Container[Node] = (),
    past: Callable[[Node], bool] | None = None,
    sources: Callable[[Node], Iterable[Node]] = lambda node: node.all_input_nodes,
) -> Iterator[Node]:
    """Nodes, and what they are computed from.

    Args:
        nodes: where the search begins.
        until: nodes that are no results, but for ``nodes`` themselves, nor is what leads to them
            alone.
        past: whether the search goes on from a node, which is a result itself; by default always.
        sources: what a node is computed from; by default all that it reads.

    Yields:
        Each node once, before its sources; the last source of a node comes first.
    """
    yield from _reached(nodes, sources, until, past)


def descendants(
    nodes: Iterable[Node],
    *,
    past: Callable[[Node], bool] | None = None,
    users: Callable[[Node], Iterable[Node]] = lambda node: node.users,
) -> Iterator[Node]:
    """Nodes, and what is computed from them; as :func:`ancestors`, in the other direction."""
    yield from _reached(nodes, users, (), past)


def between(sources: Iterable[Node], node: Node, *, until: Container[Node] = ()) -> set[Node]:
    """The nodes that lead from some nodes to another one, without that one. A source is among them
    if it is made of a source.

    Args:
        until: nodes that no way leads through.
    """
    made, found = set(sources), set[Node]()
    for each in sorted(set(ancestors([node], until=until)) - {node}):
        if any(source in made for source in each.all_input_nodes):
            made.add(each)
            found.add(each)
    return found


def _reached(
    nodes: Iterable[Node],
    following: Callable[[Node], Iterable[Node]],
    until: Container[Node],
    past: Callable[[Node], bool] | None,
) -> Iterator[Node]:
    """Some nodes and those that a step leads to, each once; as :func:`ancestors`."""
    waiting = list(nodes)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        if past is None or past(node):
            new = [n for n in following(node) if n not in seen and n not in until]
            seen.update(new)
            waiting += new


def later_sources(nodes: Iterable[Node], first: Node) -> list[Node]:
    """Nodes and what computes them, as far as that does not come before ``first``; in order."""

    def is_late(node: Node) -> bool:
        return not node < first

    return sorted(filter(is_late, set(ancestors(nodes, past=is_late))))


def is_movable(node: Node) -> bool:
    """Whether a call of an op gives the same wherever its arguments are there."""
    return node.op == "call_function" and is_pure(node.target)
