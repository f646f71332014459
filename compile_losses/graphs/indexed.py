"""A graph with answers about it, which are kept until it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch.fx import Graph

T = TypeVar("T")

#: How often the tools have changed a graph.
_versions: WeakKeyDictionary[Graph, int] = WeakKeyDictionary()


def version_of(graph: Graph) -> tuple[int, int]:
    """Another one after each change of a graph by the tools. The number of nodes is a part of it,
    so that most changes by others are seen as well."""
    return _versions.get(graph, 0), len(graph.nodes)


def changed(graph: Graph) -> None:
    """Notes that a graph has changed."""
    _versions[graph] = _versions.get(graph, 0) + 1


class Indexed:
    """A graph, and what several passes ask of it.

    It lives as long as a run of passes: between two runs, others change the graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._answers: dict[Callable[..., Any], tuple[tuple[int, int], Any]] = {}

    @property
    def version(self) -> tuple[int, int]:
        return version_of(self.graph)

    def ask(self, question: Callable[[Graph], T]) -> T:
        """What a function says of the graph, which is asked again only if the graph has changed.

        Args:
            question: reads the graph alone. Nobody changes its answer.
        """
        kept = self._answers.get(question)
        if kept is None or kept[0] != self.version:
            kept = self._answers[question] = self.version, question(self.graph)
        answer: T = kept[1]
        return answer
