"""Runs the passes of a stage: those that are switched on, each counted, timed and dumped.

With COMPILE_LOSSES_DUMP=dir in the environment, each pass that changes a graph writes a file. Files
are numbered in the order of a process, and their names say which process, graph and pass they are
of. A file has the graph with a mark at each node that the pass took out or put in.
"""

from __future__ import annotations

import difflib
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_losses import switches
from compile_losses.graphs import Indexed, value_of
from compile_losses.passes import Pass, passes_of
from compile_losses.sites import shorten, site_of, source_of

T = TypeVar("T", bound=Indexed)


@dataclass
class Record:
    """What a pass did in this process.

    Attributes:
        runs: on how many graphs it ran.
        changes: how many of these it changed.
        seconds: how long it took, with what it ran inside of itself.
    """

    runs: int = 0
    changes: int = 0
    seconds: float = 0.0


_records: dict[str, Record] = {}


def records() -> dict[str, Record]:
    """What the passes did in this process, by their names; ``records().clear()`` begins anew."""
    return _records


class Pipeline(Generic[T]):
    """The passes of a stage, with the functions that do them.

    Args:
        stage: one of ``passes.STAGES``.
        actions: for each pass of the stage, by its short name, a function of a graph and what is
            asked of it.
    """

    def __init__(self, stage: str, **actions: Callable[[T], None]) -> None:
        listed = passes_of(stage)
        names = {each.short for each in listed}
        assert names == actions.keys(), f"{stage}: {sorted(names ^ actions.keys())}"
        self.passes = [(each, actions[each.short]) for each in listed]

    def run(self, indexed: T) -> None:
        for each, action in self.passes:
            if each.is_needed or switches.runs(each.name):
                with observed(each, indexed):
                    action(indexed)


@contextmanager
def observed(this: Pass, indexed: Indexed) -> Iterator[None]:
    """Counts, times and dumps what a pass does to a graph."""
    graph, version = indexed.graph, indexed.version
    folder = dump_folder()
    before = None if folder is None else listing(graph)
    record = _records.setdefault(this.name, Record())
    start = time.perf_counter()
    try:
        yield
    finally:
        took = time.perf_counter() - start
        record.runs += 1
        record.seconds += took
    if indexed.version == version:
        return
    record.changes += 1
    after = None if folder is None else listing(graph)
    if folder is not None and before is not None and after is not None and before != after:
        try:
            _write(folder, this, graph, before, after, took)
        except OSError as error:
            _warn(error)


def _warn(error: OSError) -> None:
    """Tells that a graph is not dumped, which is no fault of the pass."""
    warnings.warn(f"COMPILE_LOSSES_DUMP: {error}", RuntimeWarning, stacklevel=2)


def dump_folder() -> str | None:
    """Where graphs are dumped; None if they are not."""
    return os.environ.get("COMPILE_LOSSES_DUMP") or None


#: The numbers of files, and of graphs, in this process.
_files, _graphs = itertools.count(), itertools.count()
_numbers: WeakKeyDictionary[Graph, int] = WeakKeyDictionary()


def _write(
    folder: str, this: Pass, graph: Graph, before: list[str], after: list[str], seconds: float
) -> None:
    if graph not in _numbers:
        _numbers[graph] = next(_graphs)
    number = _numbers[graph]
    whole = len(before) + len(after)
    _, _, _, *lines = difflib.unified_diff(before, after, n=whole, lineterm="")
    text = "\n".join(
        [
            f"# {this.name}: {this.does}",
            f"# graph {number}, {1000 * seconds:.1f} ms; - took out, + put in",
            *lines,
            "",
        ]
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file in _files:  # of another process with this number there may be some
        path = Path(folder, f"{_process()}-{file:04}-graph{number}-{this.name}.txt")
        try:
            with path.open("x") as new:
                new.write(text)
        except FileExistsError:
            continue
        return


def _process() -> str:
    """The process, and its rank if it has one."""
    distributed = torch.distributed
    rank = ""
    if distributed.is_available() and distributed.is_initialized():
        rank = f"rank{distributed.get_rank()}-"
    return f"{rank}pid{os.getpid()}"


def listing(graph: Graph) -> list[str]:
    """A graph, a node a line: what it holds, what it calls, and the user's line."""
    return [_line(node) for node in graph.nodes]


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    given = [str(argument) for argument in node.args]
    given += [f"{name}={argument}" for name, argument in node.kwargs.items()]
    call = f" = {_called(node)}({', '.join(given)})" if node.op != "placeholder" else ""
    file, line = source_of(node)
    mark = site_of(node)
    notes = [f"{shorten(file)}:{line}"] * bool(line) + [f"loss {mark}"] * (mark is not None)
    where = f"  # {', '.join(notes)}" if notes and node.op != "placeholder" else ""
    return f"{node.name}: {_described(value_of(node))}{call}{where}"


def _called(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, str):
        return f"{node.op.removeprefix('call_')} {target}"
    name = str(getattr(target, "__name__", target))
    op = str(target)
    return op if op.startswith(("aten.", "prims.", "fused.")) else name


def _described(value: Any) -> str:
    """The dtype and the sizes of a tensor."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__ if value is not None else "None"
