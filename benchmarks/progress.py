"""A progress bar if rich is installed, otherwise lines on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    def describe(self, text: str) -> None: ...
    def advance(self) -> None: ...
    def print(self, text: str) -> None: ...


class _Lines:
    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0

    def describe(self, text: str) -> None:
        print(f"[{self.done}/{self.total}] {text}", file=sys.stderr, flush=True)

    def advance(self) -> None:
        self.done += 1

    def print(self, text: str) -> None:
        print(text, flush=True)


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    try:
        from rich import progress as rich
    except ImportError:
        yield _Lines(total)
        return

    class Bar:
        def describe(self, text: str) -> None:
            bar.update(task, description=text)

        def advance(self) -> None:
            bar.advance(task)

        def print(self, text: str) -> None:
            bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    columns = (
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.description}"),
    )
    with rich.Progress(*columns) as bar:
        task = bar.add_task("", total=total)
        yield Bar()
