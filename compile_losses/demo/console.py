"""What the demo writes to the terminal: progress bars and the table of results."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from compile_losses.demo.train import Result
from compile_losses.terminal import rich_console

BAR = 32
#: Seconds between two redraws of the plain bar; where nobody watches, between two lines.
REDRAW, NEXT_LINE = 0.2, 5.0


@contextmanager
def progress(name: str, steps: int) -> Iterator[Callable[[str], None]]:
    """A progress bar, by rich where it is installed. Yields what to call after each step."""
    if (console := rich_console()) is not None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, "{task.fields[state]}", console=console) as bars:
            task = bars.add_task(f"{name:<15}", total=steps, state="compiling")
            yield lambda state: bars.update(task, advance=1, state=f"loss {state}")
        return
    with plain_progress(name, steps) as tick:
        yield tick


@contextmanager
def plain_progress(name: str, steps: int) -> Iterator[Callable[[str], None]]:
    live = sys.stdout.isatty()
    start = shown = time.monotonic()
    done, last = 0, "compiling"

    def show(ending: str) -> None:
        bar = ("#" * (BAR * done // steps)).ljust(BAR, ".")
        line = f"{name:<15} [{bar}] {done}/{steps} {time.monotonic() - start:4.0f} s  {last}"
        print(f"\r{line}\033[K" if live else line, end=ending, flush=True)

    def tick(state: str) -> None:
        nonlocal done, last, shown
        done, last = done + 1, f"loss {state}"
        if time.monotonic() - shown >= (REDRAW if live else NEXT_LINE):
            shown = time.monotonic()
            show("" if live else "\n")

    if live:
        show("")
    yield tick
    show("\n")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def results_table(results: Sequence[Result]) -> str:
    """One line a model."""
    head = [
        "model",
        "steps",
        "first loss",
        "last loss",
        "curve diff",
        "grad diff",
        "ms stock",
        "ms ours",
        "speed-up",
        "MB stock",
        "MB ours",
    ]
    rows = [
        [
            result.case.name,
            str(len(result.ours.losses)),
            f"{result.ours.losses[0]:.4f}",
            f"{result.ours.losses[-1]:.4f}",
            f"{max(result.differences):.1e}",
            f"{result.gradient_difference:.1e}",
            f"{result.stock.step * 1e3:.2f}",
            f"{result.ours.step * 1e3:.2f}",
            f"{result.speedup:.2f}",
            f"{result.stock.peak_memory / 1e6:.1f}",
            f"{result.ours.peak_memory / 1e6:.1f}",
        ]
        for result in results
    ]
    return table(head, rows)
