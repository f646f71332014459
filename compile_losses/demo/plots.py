"""The figure of the demo's results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import TYPE_CHECKING

from compile_losses.demo.train import EARLY, EARLY_BOUND, LATE_BOUND, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STOCK_COLOR, OURS_COLOR, GRAY = "#9aa5b1", "#d1495b", "#52606d"
COLORS = (
    *("#d1495b", "#00798c", "#e09f1f", "#30638e", "#7b5ea7", "#66a182"),
    *("#a23e48", "#3fb5b0", "#b9770e", "#6a8caf", "#b39ddb", "#99c9a8"),
)
#: Curves that agree to the last bit are drawn here: a logarithmic axis has no zero.
SMALLEST = 1e-8


def write(results: Sequence[Result], large: int, device: str, path: Path) -> None:
    """Writes the figure to ``path``: all curves' differences, and the curves of the longest run.

    Times and memory are those of the first ``large`` results: others differ by chance.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15)
    figure = Figure(figsize=(13, 8.4), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"Stock torch.compile and compile_losses, side by side on {device}",
        fontsize=15,
        fontweight="bold",
    )
    (upper_left, upper_right), (lower_left, lower_right) = figure.subplots(2, 2)
    curves(upper_left, max(results, key=lambda result: len(result.stock.losses)))
    differences(upper_right, results)
    shown = results[:large]
    times = [(result.stock.step * 1e3, result.ours.step * 1e3) for result in shown]
    bars(lower_left, shown, "Median time of a training step, ms", times)
    memory = [(result.stock.peak_memory / 1e6, result.ours.peak_memory / 1e6) for result in shown]
    bars(lower_right, shown, "Peak memory of a training step, MB", memory)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=GRAY)
    figure.savefig(path, dpi=130)


def heading(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=12, pad=10)


def curves(axes: Axes, result: Result) -> None:
    steps = range(1, len(result.stock.losses) + 1)
    axes.plot(
        steps, result.stock.losses, label="stock torch.compile", color=STOCK_COLOR, linewidth=6
    )
    axes.plot(steps, result.ours.losses, label="compile_losses", color=OURS_COLOR, linewidth=1.5)
    heading(axes, f"{result.case.name}: training loss, nats")
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def differences(axes: Axes, results: Sequence[Result]) -> None:
    for result, color in zip(results, cycle(COLORS), strict=False):
        values = [max(value, SMALLEST) for value in accumulate(result.differences, max)]
        steps = range(1, len(values) + 1)
        axes.plot(steps, values, label=result.case.name, color=color, linewidth=1.8)
        axes.plot(steps[-1], values[-1], ".", color=color, markersize=8)
    longest = max(len(result.stock.losses) for result in results)
    early = min(EARLY, longest)
    axes.plot(
        [1, early, early, longest],
        [EARLY_BOUND, EARLY_BOUND, LATE_BOUND, LATE_BOUND],
        label="bound",
        color="black",
        linestyle=(0, (4, 3)),
        linewidth=1,
    )
    axes.axhline(2**-24, label="one rounding", color=GRAY, linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.set_ylim(SMALLEST / 2, LATE_BOUND * 4000)  # room for the legend
    heading(axes, "Largest relative difference of the two loss curves so far")
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8.5, ncols=4, loc="upper center")


def bars(
    axes: Axes, results: Sequence[Result], title: str, pairs: Sequence[tuple[float, float]]
) -> None:
    """Pairs of bars, relative to stock, with the absolute figures on them.

    The models differ a hundredfold: on an absolute axis most bars would be flat.
    """
    width = 0.38
    relative = [ours / (stock or 1.0) for stock, ours in pairs]
    places = range(len(pairs))
    heights = ([1.0] * len(pairs), relative)
    looks = (("stock torch.compile", STOCK_COLOR), ("compile_losses", OURS_COLOR))
    for side, (label, color) in enumerate(looks):
        where = [place + (side - 0.5) * (width + 0.02) for place in places]
        drawn = axes.bar(where, heights[side], width, color=color, label=label)
        figures = [f"{pair[side]:{'.0f' if pair[side] >= 1000 else '.3g'}}" for pair in pairs]
        axes.bar_label(drawn, figures, padding=2, fontsize=9, color=GRAY)
    heading(axes, title)
    axes.set_ylabel("relative to stock", color=GRAY)
    names = [result.case.name.replace(" ", "\n", 1) for result in results]
    axes.set_xticks(places, names, fontsize=9)
    axes.set_ylim(0, max(1.0, *relative) * 1.25)
    axes.axhline(1, color=GRAY, linewidth=0.8, linestyle=":")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")
