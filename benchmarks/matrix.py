"""The compile matrix: losses after heads, stock torch.compile against this package.

``python -m benchmarks compile-matrix`` compiles the same step twice for each cell, checks that both
give the same loss and gradients, times them in turns, and measures the peak memory that either
allocates above the memory in use before. The plan is the one of ``compile_losses.explain``.
With ``--jobs`` on a GPU, as many processes first compile all the cells into the compiler's caches.
Then they compile each again from the caches, and one process at a time measures.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.clock import (
    Call,
    Clock,
    host_in_turns,
    peak_mib,
    range_of,
    ratio_of,
    time_in_turns,
)
from benchmarks.heads import HEADS, LOSSES, Shape
from benchmarks.options import DTYPES, add_options, provenance
from benchmarks.workers import Worker, all_figures

Cell = tuple[str, str, str, str]  # loss, head, dtype, mode
MODES = ("training", "inference")
#: Slower cells than this are measured for longer.
LIMIT = 1.03
#: No cell's host is to take more than this of stock's; so many calls of each are timed.
HOST_LIMIT, HOST_CALLS = 1.15, 60
#: Partial sums of a reduction take no more, and don't count as more memory.
SLACK_MIB = 1 / 16


@dataclass(frozen=True)
class Row(report.Clocked):
    """A cell's figures: medians, also of the ratios of ours to stock's in neighbouring samples.

    ``ratio`` is the median of these ratios, and ``range`` the range of most of them. ``host_us`` is
    the time until a call returns whose device had nothing to do. On a CPU the host is the device:
    there a small shape shows it.
    """

    loss: str
    head: str
    dtype: str
    mode: str
    shape: str
    stock_ms: str
    ours_ms: str
    ratio: str
    stock_peak_mib: str
    ours_peak_mib: str
    plan: str
    range: str = ""
    stock_host_us: str = ""
    ours_host_us: str = ""
    host_ratio: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return self.device, self.loss, self.head, self.dtype, self.mode, self.shape


class Step(nn.Module):
    """A head and a loss, and inputs for them."""

    def __init__(
        self, loss: str, head: str, shape: Shape, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = HEADS[head](shape).to(device, dtype)
        self.loss = LOSSES[loss].function
        wide = torch.float32 if head == "cast from bfloat16" else dtype
        self.inputs = (self.head.input(dtype, device), LOSSES[loss].target(shape, wide, device))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.head(x), target)

    def differentiated(self) -> list[Tensor]:
        x = self.inputs[0]
        leaves = [x] if x.is_floating_point() and self.head.differentiates_input else []
        return [*leaves, *self.head.parameters()]


class Run:
    """One compiled step, called again and again."""

    def __init__(self, step: Step, mode: str, compiled: Callable[..., Tensor]) -> None:
        self.step, self.mode, self.compiled = step, mode, compiled
        self.leaves = step.differentiated() if mode == "training" else []

    def next_call(self) -> Call:
        """The next call. Gradients are cleared before, untimed."""
        for leaf in self.leaves:
            leaf.grad = None
        return self.call

    def call(self) -> Tensor:
        if self.mode == "inference":
            with torch.no_grad():
                return self.compiled(*self.step.inputs)
        loss = self.compiled(*self.step.inputs)
        loss.backward()
        return loss.detach()

    def results(self) -> list[Tensor]:
        loss = self.next_call()()
        assert isinstance(loss, Tensor)
        return [loss.float(), *(leaf.grad.float() for leaf in self.leaves if leaf.grad is not None)]


def check(stock: Run, ours: Run, dtype: torch.dtype) -> None:
    """The same loss and gradients, by the norm of the difference."""
    narrow = dtype == torch.bfloat16 or isinstance(stock.step.head, HEADS["cast from bfloat16"])
    limit = 2e-2 if narrow else 1e-4
    for expected, actual in zip(stock.results(), ours.results(), strict=True):
        error = (actual - expected).norm() / expected.norm().clamp(min=1e-30)
        if not error <= limit:
            raise AssertionError(f"differs from stock torch.compile by {error:.2e}")


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    for cell in itertools.product(arguments.loss, arguments.head, arguments.dtype, arguments.mode):
        loss, head, dtype, _ = cell
        if head == "cast from bfloat16" and dtype != "bfloat16":
            continue  # the head is the same in either dtype
        yield loss, head, dtype, cell[3]


def compiled_runs(cell: Cell, shape: Shape, device: torch.device) -> list[Run]:
    """Stock's and ours, compiled, run, and checked against each other."""
    from compile_losses.backend import compile_losses as backend

    loss, head, dtype, mode = cell
    torch._dynamo.reset()
    step = Step(loss, head, shape, DTYPES[dtype], device)
    for leaf in step.differentiated():
        leaf.requires_grad_(mode == "training")
    stock = Run(step, mode, torch.compile(step))
    ours = Run(step, mode, torch.compile(step, backend=backend))
    check(stock, ours, DTYPES[dtype])
    return [stock, ours]


def measure(
    cell: Cell, shape: Shape, clock: Clock, budget_s: float, alone: AbstractContextManager[object]
) -> dict[str, str]:
    """A cell's figures; times and memory are measured within ``alone``."""
    import compile_losses

    compiled = compiled_runs(cell, shape, clock.device)
    step, mode = compiled[0].step, compiled[0].mode
    with torch.set_grad_enabled(mode == "training"):
        told = compile_losses.explain(step, *step.inputs)
    plan = "; ".join(", ".join(site.plan) or f"declined: {site.reason}" for site in told.losses)
    runs = [run.next_call for run in compiled]
    with alone:
        times = time_in_turns(runs, clock, budget_s)
        if ratio_of(*times) > LIMIT:
            more = time_in_turns(runs, clock, 4 * budget_s)
            times = [a + b for a, b in zip(times, more, strict=True)]
        peaks = [peak_mib(run, clock) for run in runs]
        host = host_in_turns(runs, clock, HOST_CALLS)
    medians = [statistics.median(sample) for sample in times]
    return {
        "stock_ms": f"{medians[0]:.4g}",
        "ours_ms": f"{medians[1]:.4g}",
        "ratio": f"{ratio_of(*times):.3f}",
        "stock_peak_mib": f"{peaks[0]:.2f}",
        "ours_peak_mib": f"{peaks[1]:.2f}",
        "plan": plan,
        "range": range_of(*times),
        **host_figures(*host),
        **clock.conditions(),
    }


def host_figures(stock: list[float], ours: list[float]) -> dict[str, str]:
    if not stock:
        return {}
    return {
        "stock_host_us": f"{statistics.median(stock):.1f}",
        "ours_host_us": f"{statistics.median(ours):.1f}",
        "host_ratio": f"{ratio_of(stock, ours):.3f}",
    }


class MatrixWorker(Worker[Cell]):
    def compile(self, cell: Cell) -> object:
        return compiled_runs(cell, self.arguments.shape, self.clock.device)

    def measure(self, cell: Cell) -> dict[str, str]:
        arguments = self.arguments
        return measure(cell, arguments.shape, self.clock, arguments.budget, self.alone)

    def failed(self, reason: str) -> dict[str, str]:
        return {"plan": reason}


def verdict(row: Row) -> str:
    marks = []
    if row.ratio and float(row.ratio) > LIMIT:
        marks.append("SLOWER")
    if row.host_ratio and float(row.host_ratio) > HOST_LIMIT:
        marks.append("LATER")
    if (
        row.ours_peak_mib
        and float(row.ours_peak_mib) > 1.01 * float(row.stock_peak_mib) + SLACK_MIB
    ):
        marks.append("BIGGER")
    return " ".join(marks)


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    output: Path = arguments.output or report.default_output(device, "compile-matrix")
    rows = report.kept(output, Row, append=arguments.append)
    common = {"shape": "x".join(map(str, arguments.shape)), **provenance(arguments, device)}
    failed = 0
    print(
        f"{'cell':<58}{'stock':>9}{'ours':>9}{'ratio':>7}{'host us':>9}{'ratio':>7}{'MiB':>9}"
        f"{'ours':>9}  plan"
    )
    with all_figures(MatrixWorker, arguments, list(cells(arguments))) as measured:
        for cell, figures in measured:
            failed += "ratio" not in figures
            loss, head, dtype, mode = cell
            known = {**common, "loss": loss, "head": head, "dtype": dtype, "mode": mode, **figures}
            row = report.row_of(Row, known)
            rows[row.key] = row
            print(
                f"{' / '.join(cell):<58}{row.stock_ms:>9}{row.ours_ms:>9}{row.ratio:>7}"
                f"{row.ours_host_us:>9}{row.host_ratio:>7}"
                f"{row.stock_peak_mib:>9}{row.ours_peak_mib:>9}  {row.plan} {verdict(row)}",
                flush=True,
            )
            report.write(output, Row, rows.values())
    bad = [row for row in rows.values() if verdict(row)]
    print(f"{len(rows)} cells, {len(bad)} slower than {LIMIT}x or bigger; wrote {output}")
    return int(failed > 0)


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    summary = "losses after heads, stock torch.compile against ours"
    parser = commands.add_parser("compile-matrix", help=summary, description=__doc__)
    choose = partial(parser.add_argument, nargs="+", help="default: all")
    choose("--loss", choices=LOSSES, default=list(LOSSES))
    choose("--head", choices=HEADS, default=list(HEADS))
    choose("--dtype", choices=DTYPES, default=list(DTYPES))
    choose("--mode", choices=MODES, default=list(MODES))
    parser.add_argument("--shape", type=_shape, default=(2048, 4096), help="ROWSxCOLS (2048x4096)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile (1)")
    add_options(parser, 0.5, append=True)


def _shape(text: str) -> Shape:
    rows, cols = text.split("x")
    return int(rows), int(cols)
