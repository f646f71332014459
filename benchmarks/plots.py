"""One PNG a case: bars of every contender against the floor, or lines over many sizes."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, OTHERS = "#d1495b", "#8d99ae"
MOST_BARS = 8  # sizes; above that, lines
LINES = {"ours_kernel": "-", "ours_compiled": "--", "ours_eager": ":"}


def plot(rows: list[Row], directory: Path, stem: str) -> list[Path]:
    """Writes ``directory/stem-case.png`` for each case in ``rows``; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_case: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_case[row.case].append(row)
    written = []
    for case, members in by_case.items():
        problems = list(dict.fromkeys((row.shape, row.dtype) for row in members))
        figure = (_lines if len(problems) > MOST_BARS else _bars)(members, problems)
        first = members[0]
        commits = ", ".join(dict.fromkeys(row.commit for row in members))
        figure.suptitle(
            f"{case}: {first.device}, torch {first.torch}, commit {commits}", fontsize=10
        )
        path = directory / f"{stem}-{case}.png"
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
        written.append(path)
    return written


def _passes(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.which for row in rows))


def _bars(rows: list[Row], problems: list[tuple[str, str]]) -> Figure:
    """A grid of sizes and passes."""
    from matplotlib import pyplot

    passes = _passes(rows)
    figure, grid = pyplot.subplots(
        len(problems),
        len(passes),
        figsize=(5.5 * len(passes), 1.1 + 2.3 * len(problems)),
        squeeze=False,
        layout="constrained",
    )
    for axes_row, (shape, dtype) in zip(grid, problems, strict=True):
        for axes, which in zip(axes_row, passes, strict=True):
            chosen = [
                row for row in rows if (row.shape, row.dtype, row.which) == (shape, dtype, which)
            ]
            _draw_bars(axes, chosen)
            axes.set_title(f"{shape} {dtype}, {which}", fontsize=9)
    return figure


def _lines(rows: list[Row], problems: list[tuple[str, str]]) -> Figure:
    """Bandwidth against what differs between the sizes: the row's width, or the elements."""
    from matplotlib import pyplot

    widths = {_columns(shape) for shape, _ in problems}
    position, label = (
        (_elements, "elements of the input") if len(widths) == 1 else (_columns, "width of a row")
    )
    passes = _passes(rows)
    figure, (grid,) = pyplot.subplots(
        1, len(passes), figsize=(6.5 * len(passes), 4.5), squeeze=False, layout="constrained"
    )
    for axes, which in zip(grid, passes, strict=True):
        timed = sorted(
            (row for row in rows if row.which == which and row.ms),
            key=lambda row: position(row.shape),
        )
        for name in dict.fromkeys(row.contender for row in timed):
            members = [row for row in timed if row.contender == name]
            style = {"linestyle": LINES[name], "color": OURS} if name in LINES else {}
            axes.plot(
                [position(row.shape) for row in members],
                [float(row.tbps) for row in members],
                label=name,
                marker=".",
                **style,
            )
        if timed:  # the floor's bandwidth
            last = timed[-1]
            memory = float(last.tbps) * float(last.ms) / float(last.floor_ms)
            axes.axhline(memory, color="black", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(label)
        axes.set_ylabel("TB/s (dashed: what the memory can do)")
        axes.set_title(f"{problems[0][1]}, {which}", fontsize=9)
        axes.legend(fontsize=8)
        axes.tick_params(labelsize=8)
    return figure


def _columns(shape: str) -> int:
    return int(shape.rsplit("x", 1)[1])


def _elements(shape: str) -> int:
    return math.prod(map(int, shape.split("x")))


def _draw_bars(axes: Axes, rows: list[Row]) -> None:
    timed = [row for row in rows if row.ms]
    if not timed:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    times = [float(row.ms) for row in timed]
    names = [row.contender for row in timed]
    colours = [OURS if name.startswith("ours") else OTHERS for name in names]
    bars = axes.barh(names, times, color=colours)
    axes.bar_label(bars, labels=[row.ms for row in timed], padding=3, fontsize=7)
    floor = float(timed[0].floor_ms)
    axes.axvline(floor, color="black", linestyle="--", linewidth=1)
    axes.set_xlim(0, 1.15 * max(*times, floor))
    axes.set_xlabel(f"ms (dashed: memory floor {floor:.3g})", fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
