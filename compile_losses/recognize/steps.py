"""Recognition in steps: what a fault in one of them has changed is undone, and it is left out.

The graph, and the graphs inside it, are restored as a whole. The other steps are then done anew, so
that they see the graph as it is without the faulty one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NoReturn, TypeVar

from torch.fx import Graph, GraphModule

from compile_losses.guard import Failure, Snapshot, attempt, warn_of
from compile_losses.recognize.graph.memory import bodies

T = TypeVar("T")

#: So often a graph is gone through, at most. Then all of it is left to torch.
_MOST_TURNS = 6


class Graphs:
    """A graph and the graphs that its higher-order ops run, as they are before recognition.

    Args:
        module: whose graph it is, if it is to be recompiled.
    """

    def __init__(self, graph: Graph, module: GraphModule | None) -> None:
        self.snapshots = {graph: Snapshot(graph)}
        self.modules = {graph: module}
        waiting = [graph]
        while waiting:
            for node in waiting.pop().nodes:
                for _, body in bodies(node):
                    if body.graph not in self.snapshots:
                        self.snapshots[body.graph] = Snapshot(body.graph)
                        self.modules[body.graph] = body
                        waiting.append(body.graph)

    def check(self) -> None:
        """Compiles the graphs that were changed.

        Raises:
            Exception: a graph is none that torch can run.
        """
        changed = self._changed()
        for graph in changed:
            self.snapshots[graph].check()
        self._recompile(changed)

    def restore(self) -> None:
        changed = self._changed()
        for graph in changed:
            self.snapshots[graph].restore()
        self._recompile(changed)

    def _changed(self) -> list[Graph]:
        return [graph for graph, one in self.snapshots.items() if not one.is_intact()]

    def _recompile(self, graphs: list[Graph]) -> None:
        """Of modules inside others, each is compiled with these as well."""
        for graph in graphs:
            module = self.modules[graph]
            if module is not None:
                module.recompile()


class _AgainError(Exception):
    """A step failed after it may have changed the graphs."""


class Steps:
    """The steps of the recognition of one graph.

    Attributes:
        failures: of the steps that are left out, by their names.
        useless: the names of steps that are left out since what they changed was of no use.
        unexplained: what was wrong with the graph once, if no step is to blame.
    """

    def __init__(self, graphs: Graphs, strict: bool | None) -> None:
        self.graphs = graphs
        self.strict = strict
        self.failures: dict[Hashable, Failure] = {}
        self.useless: set[Hashable] = set()
        self.unexplained: Failure | None = None
        self._checks = False
        self._changes = False

    def repeat(self, turn: Callable[[], T]) -> T | Failure:
        """What a turn returns that goes through the graph without a fault, step by step.

        Returns:
            If there is no such turn, a failure; the graphs are as they were.
        """
        for _ in range(_MOST_TURNS):
            many = len(self.failures)
            found = attempt(lambda: self._turn(turn), strict=self.strict, warns=False)
            if isinstance(found, Failure):
                return self._give_up(found)
            if found is not None:
                wrong = attempt(self.graphs.check, strict=self.strict, warns=False)
                if not isinstance(wrong, Failure):
                    if self.unexplained is not None:
                        warn_of(self.unexplained)
                    return found[0]
                if self._checks:
                    return self._give_up(wrong)
                self._checks, self.unexplained = True, wrong  # by which step will be seen
            elif len(self.failures) > many:
                self.unexplained = None
            self.graphs.restore()
        return self._give_up(next(reversed(self.failures.values())))

    def run(self, name: Hashable, action: Callable[[], T]) -> T | Failure:
        """The result of a step, or why it is left out."""
        if name in self.failures:
            return self.failures[name]
        self._changes = False
        found = attempt(lambda: self._checked(action), strict=self.strict)
        if isinstance(found, Failure):
            self.failures[name] = found
            if self._changes:
                raise _AgainError
        return found

    def undo(self, name: Hashable) -> NoReturn:
        """Does all steps anew without one, whose change was of no use."""
        self.useless.add(name)
        raise _AgainError

    def changes(self) -> None:
        """What a step does from here on has to be undone if it fails."""
        self._changes = True

    def _turn(self, turn: Callable[[], T]) -> tuple[T] | None:
        try:
            return (turn(),)
        except _AgainError:
            return None

    def _checked(self, action: Callable[[], T]) -> T:
        result = action()
        if self._checks and self._changes:
            self.graphs.check()
        return result

    def _give_up(self, failure: Failure) -> Failure:
        self.graphs.restore()
        warn_of(failure)
        return failure
