"""Bars of every contender against the floor, one PNG a case."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, OTHERS = "#d1495b", "#8d99ae"


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
        passes = list(dict.fromkeys(row.which for row in members))
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
                    row
                    for row in members
                    if (row.shape, row.dtype, row.which) == (shape, dtype, which)
                ]
                _bars(axes, chosen)
                axes.set_title(f"{shape} {dtype}, {which}", fontsize=9)
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


def _bars(axes: Axes, rows: list[Row]) -> None:
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
