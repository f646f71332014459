"""Heads of which not all rows count: ``python -m benchmarks.masked``.

Each line is a step of the head and its loss alone, in milliseconds and MiB above the inputs, with
a share of the rows masked at random. The mask of ``mean`` is in the labels (-100); that of the
others is a tensor, as of completions in reinforcement learning. A step is compiled once for all
masks. Ways:

- ``stock``: torch.compile;
- ``ours``: with this package;
- ``ours_memory``: with this package and ``prefer_memory``, only if it is asked for.

The ways and the masks take turns in a random order, and each has a step of its own first. ``bound``
is the time that the share of rows that count would take, of that without a mask, and 0.3 ms.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import report, tokens
from benchmarks.clock import Call, make_clock, peak_mib, time_in_turns
from benchmarks.linear_steps import Shape
from benchmarks.options import DTYPES, provenance

SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
LOSSES = ("mean", "masked_mean", "grpo_cross_entropy", "ppo_entropy")
WAYS = ("stock", "ours", "ours_memory")


@dataclass(frozen=True)
class Row(report.Provenance):
    """A way's time and memory for a share of masked rows."""

    shape: str
    dtype: str
    head: str
    loss: str
    way: str
    masked: float
    ms: float
    peak_mib: float
    bound_ms: float


class Problem:
    """A head and a loss, with batches that have the same mask in every way."""

    def __init__(self, loss: str, head: str, shape: Shape, dtype: torch.dtype, device: str) -> None:
        self.given = tokens.Problem((loss, head, shape), dtype, torch.device(device))
        batch = self.given.batch
        generator = torch.Generator(device).manual_seed(1)
        drawn = torch.rand(batch.mask.shape, generator=generator, device=device)
        self.batches = {}
        for share in SHARES:
            mask = (drawn >= share).float()
            target = batch.target
            if loss == "mean":
                target = target.masked_fill(mask == 0, -100)
            self.batches[share] = replace(batch, mask=mask, target=target)

    def compiled(self, way: str) -> Callable[..., Tensor]:
        given = {"backend": "inductor" if way == "stock" else "compile_losses"}
        if way == "ours_memory":
            given["options"] = {"prefer_memory": True}
        step = torch.compile(self.given.eager, dynamic=False, **given)
        self.call(step, 0.5)()
        return step

    def call(self, step: Callable[..., Tensor], share: float) -> Call:
        self.given.clear()

        def call() -> Tensor:
            value = self.given.value(step, self.given.tensors, self.batches[share])
            value.backward()
            return value.detach()

        return call


def measured(
    problem: Problem, ways: Sequence[str], device: str, budget: float
) -> dict[tuple[str, float], list[float]]:
    """Milliseconds and MiB of each way and share."""
    clock = make_clock(torch.device(device))
    steps = {way: problem.compiled(way) for way in ways}
    calls = {
        (way, share): partial(problem.call, steps[way], share)
        for way, share in itertools.product(ways, SHARES)
    }
    times = time_in_turns(list(calls.values()), clock, budget)
    return {
        key: [statistics.median(samples), peak_mib(call, clock)]
        for (key, call), samples in zip(calls.items(), times, strict=True)
    }


def draw(rows: list[Row], path: Path) -> None:
    """Writes a plot of time by the share of masked rows, for each shape, head and loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((row.shape, row.head) for row in rows))
    losses = list(dict.fromkeys(row.loss for row in rows))
    size = (3.2 * len(losses), 2.8 * len(panels))
    figure, grid = pyplot.subplots(
        len(panels), len(losses), figsize=size, squeeze=False, layout="constrained"
    )
    for (shape, head), axes_row in zip(panels, grid, strict=True):
        for loss, axes in zip(losses, axes_row, strict=True):
            own = [r for r in rows if (r.shape, r.head, r.loss) == (shape, head, loss)]
            if not own:
                axes.set_axis_off()
                continue
            for way, style in zip(WAYS, ("s-", "o-", "^-"), strict=True):
                found = [row for row in own if row.way == way]
                if not found:
                    continue
                axes.plot([r.masked for r in found], [r.ms for r in found], style, label=way)
            bound = [row for row in own if row.way == "ours"]
            axes.plot(
                [r.masked for r in bound], [r.bound_ms for r in bound], "k--", lw=0.8, label="bound"
            )
            axes.set_title(f"{loss}, {head}, {shape}", fontsize=8)
            axes.set_ylim(0)
            axes.set_xlabel("share of rows masked", fontsize=8)
            axes.set_ylabel("ms", fontsize=8)
    grid[0][-1].legend(fontsize=7)
    first = rows[0]
    figure.suptitle(f"{first.device}, {first.dtype}, torch {first.torch}", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masked", description=__doc__)
    cuda = torch.cuda.is_available()
    shape = Shape(8192, 2048, 128_256) if cuda else Shape(2048, 128, 16_000)
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=[shape])
    parser.add_argument("--loss", nargs="+", choices=tokens.LOSSES, default=list(LOSSES))
    parser.add_argument("--head", nargs="+", choices=tokens.HEADS, default=list(tokens.HEADS))
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS[:2]))
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for each line")
    parser.add_argument("--commit", default="", help="that is measured")
    parser.add_argument("--output", type=Path, required=True, help="a CSV file; a plot beside it")
    given = parser.parse_args()
    rows: list[Row] = []
    known = provenance(given, torch.device(given.device))
    for shape, head, loss in itertools.product(given.shape, given.head, given.loss):
        torch._dynamo.reset()
        problem = Problem(loss, head, shape, DTYPES[given.dtype], given.device)
        found = measured(problem, given.way, given.device, given.budget)
        for (way, share), (ms, mib) in found.items():
            bound = found[way, 0.0][0] * (1 - share) + 0.3
            figures = (round(ms, 3), round(mib), round(bound, 3))
            row = Row(str(shape), given.dtype, head, loss, way, share, *figures, **known)
            rows.append(row)
            print(f"{shape} {head} {loss} {way} {share}: {ms:.2f} ms, {mib:.0f} MiB", flush=True)
        del problem
        report.write(given.output, Row, rows)
    draw(rows, given.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
