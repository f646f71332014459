"""PNG files of the figures in a CSV file.

For losses, one plot a case: bars of every contender against the floor, or lines over many sizes.
For contrastive losses, one plot: lines of time and memory over the number of pairs. For trainers,
one plot: bars of tokens a second and of memory. For steps of a linear layer and cross entropy, one
plot: bars of time and memory, or lines over one size.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import linear_steps, report
from benchmarks.report import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks import contrastive, trainers

OURS, OTHERS = "#d1495b", "#8d99ae"
OTHER_LINES = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown")
MOST_BARS = 8  # sizes; with more, lines
LINES = {"ours_kernel": "-", "ours_compiled": "--", "ours_eager": ":"}
#: Of a step of a linear layer. Other benchmarks count the gradients as memory of the step.
BESIDE_GRADIENTS = "MiB above inputs and gradients"
ABOVE_INPUTS = "MiB above inputs"


def draw(file: Path) -> None:
    """Draws a CSV file of losses or of steps into its folder, and prints the names."""
    from benchmarks import contrastive, trainers  # which draw their own results

    with file.open(newline="") as lines:
        columns = next(csv.reader(lines), [])
    try:
        if "case" in columns:
            written = plot(report.read(file, report.Row), file.parent, file.stem)
        elif "shape" in columns and set(columns) <= set(report.columns_of(linear_steps.Row)):
            written = [plot_steps(report.read(file, linear_steps.Row), file.with_suffix(".png"))]
        elif set(columns) == set(report.columns_of(contrastive.Row)):
            rows = report.read(file, contrastive.Row)
            written = [plot_pairs(rows, file.with_suffix(".png"))]
        elif set(columns) == set(report.columns_of(trainers.Row)):
            written = [plot_trainers(report.read(file, trainers.Row), file.with_suffix(".png"))]
        else:
            raise ValueError(
                f"{file}: expected losses, contrastive losses, trainers, or steps of a linear "
                f"layer and cross entropy, got the columns {', '.join(columns)}"
            )
    except ImportError:
        print("no plots: matplotlib is not installed", file=sys.stderr)
        return
    for path in written:
        print(f"wrote {path}")


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
        figure.suptitle(f"{case}: {_source(members)}", fontsize=10)
        path = directory / f"{stem}-{case}.png"
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
        written.append(path)
    return written


def plot_trainers(rows: Sequence[trainers.Row], path: Path) -> Path:
    """Bars of each way's contenders: tokens a second of a GPU, and memory of a rank, of which the
    light part are weights and the optimizer's state."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.ms]
    figure, (rates, memory) = pyplot.subplots(
        1, 2, figsize=(11, 1.2 + 0.26 * len(rows)), sharey=True, layout="constrained"
    )
    names = [f"{row.way}, {row.ranks}: {row.contender}" for row in rows]
    colors = [OURS if row.contender.startswith("ours") else OTHERS for row in rows]
    state = [float(row.state_mib or 0) for row in rows]
    places = range(len(rows))
    rates.barh(places, [float(row.tokens_per_s) for row in rows], color=colors)
    memory.barh(places, state, color=colors, alpha=0.4)
    memory.barh(places, [float(row.peak_mib or 0) for row in rows], left=state, color=colors)
    rates.set_yticks(places, names, fontsize=8)
    rates.invert_yaxis()
    rates.set_xlabel("tokens a second, of each GPU")
    memory.set_xlabel("MiB of the largest rank")
    figure.suptitle(_source(rows), fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _source(rows: Sequence[Row | linear_steps.Row | contrastive.Row | trainers.Row]) -> str:
    devices, torches, commits = (
        ", ".join(dict.fromkeys(getattr(row, column) for row in rows))
        for column in ("device", "torch", "commit")
    )
    return f"{devices}, torch {torches}, commit {commits}"


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
    """Bandwidth against the number that differs between the sizes: row width or elements."""
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
        axes.set_prop_cycle(color=OTHER_LINES)
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
        axes.legend(fontsize=8, markerscale=0.5)
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
    floor = float(timed[0].floor_ms)
    times = {row.contender: row.ms for row in timed}
    _horizontal(axes, list(times), list(times.values()), list(times.values()), floor)
    axes.axvline(floor, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel(f"ms (dashed: memory floor {floor:.3g})", fontsize=8)


def _horizontal(
    axes: Axes, names: list[str], figures: list[str], labels: list[str], least: float = 0.0
) -> None:
    """Labelled bars, none for an empty figure; the axis reaches ``least``."""
    lengths = [float(figure or 0) for figure in figures]
    colours = [OURS if name.startswith("ours") else OTHERS for name in names]
    bars = axes.barh(names, lengths, color=colours)
    axes.bar_label(bars, labels=labels, padding=3, fontsize=7)
    axes.set_xlim(0, 1.15 * max(*lengths, least) or 1)
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)


def plot_steps(rows: list[linear_steps.Row], path: Path, memory: str = BESIDE_GRADIENTS) -> Path:
    """Writes ``path``: time and peak memory of every contender; needs matplotlib.

    Args:
        memory: what the column of memory holds.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = {"ms": "ms a step", "peak_mib": memory}
    problems = list(dict.fromkeys(row.problem for row in rows))
    size = _only_size(problems)
    count = len(problems) if size is None else 1
    figure, grid = pyplot.subplots(
        count,
        len(figures),
        figsize=(11, 1.1 + 2.3 * count if size is None else 4.5),
        squeeze=False,
        layout="constrained",
    )
    for axes_row, problem in zip(grid, problems, strict=size is None):
        for axes, (column, label) in zip(axes_row, figures.items(), strict=True):
            if size is None:
                _step_bars(axes, [row for row in rows if row.problem == problem], column)
                axes.set_xlabel(label, fontsize=8)
            else:
                _step_lines(axes, rows, column, size)
                axes.set_ylabel(label)
    ranks = ", ".join(dict.fromkeys(_described(row)[1] for row in rows))
    figure.suptitle(f"{ranks}: {_source(rows)}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def plot_pairs(rows: list[contrastive.Row], path: Path) -> Path:
    """Writes ``path``: time and peak memory against the number of pairs, for each loss, dtype and
    width of several numbers; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    numbers: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for row in rows:
        numbers[row.panel].add(row.pairs)
    most = max(map(len, numbers.values()))
    panels = [panel for panel, own in numbers.items() if len(own) > 1 or most == 1]
    figures = {"ms": "ms a step", "peak_mib": ABOVE_INPUTS}
    figure, grid = pyplot.subplots(
        len(panels),
        len(figures),
        figsize=(11, 0.6 + 2.9 * len(panels)),
        squeeze=False,
        layout="constrained",
    )
    for axes_row, panel in zip(grid, panels, strict=True):
        own = sorted((row for row in rows if row.panel == panel), key=lambda row: row.pairs)
        for axes, (column, label) in zip(axes_row, figures.items(), strict=True):
            _lines_of(axes, own, column, lambda row: row.pairs)
            axes.set_ylabel(label)
            axes.set_title(", ".join(panel), fontsize=9)
            axes.set_xlabel("pairs")
    figure.suptitle(_source(rows), fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def _only_size(problems: list[tuple[str, ...]]) -> int | None:
    """The only size in which more than two problems differ, if there is one."""
    shapes = [shape.split("x") for shape, *_ in problems]
    varying = [i for i, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    alike = len({tuple(settings) for _, *settings in problems}) == 1
    return varying[0] if len(problems) > 2 and len(varying) == 1 and alike else None


def _described(row: linear_steps.Row) -> tuple[str, str]:
    """A problem's numbers and its ranks."""
    part = float(row.ignored)
    ignored = f", {part:.0%} ignored" if part else ""
    return f"{row.dtype}{ignored}", f"{row.ranks} rank" + "s" * (row.ranks != "1")


def _step_bars(axes: Axes, rows: list[linear_steps.Row], column: str) -> None:
    """Labels of one problem; a contender without a figure has its reason."""
    figures = [getattr(row, column) for row in rows]
    labels = [figure or row.reason[:40] for figure, row in zip(figures, rows, strict=True)]
    _horizontal(axes, [row.contender for row in rows], figures, labels)
    axes.set_title(", ".join((rows[0].shape, *_described(rows[0]))), fontsize=9)


def _step_lines(axes: Axes, rows: list[linear_steps.Row], column: str, size: int) -> None:
    _lines_of(axes, rows, column, lambda row: int(row.shape.split("x")[size]))
    axes.set_title(_described(rows[0])[0], fontsize=9)
    axes.set_xlabel(fields(linear_steps.Shape)[size].name)


def _lines_of(axes: Axes, rows: Sequence[Any], column: str, place: Callable[[Any], int]) -> None:
    """A line for each contender. Each one's rings are smaller than those below, so that lines that
    coincide are all seen.

    Args:
        place: of a row on the axis.
    """
    names = list(dict.fromkeys(row.contender for row in rows))
    positive = True
    for below, name in enumerate(names):
        own = [row for row in rows if row.contender == name and row.ms]
        values = [float(getattr(row, column)) for row in own]
        axes.plot(
            list(map(place, own)),
            values,
            "-" if name.startswith("ours") else "--",
            marker="o",
            markersize=3.5 + 2.2 * (len(names) - 1 - below),
            markerfacecolor="none",
            markeredgewidth=1.6,
            label=name,
        )
        positive = positive and min(values, default=1) > 0
    if positive:
        axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8, markerscale=0.5)
