"""Losses without an op: the mean of a function of each element, forward and backward.

``python -m benchmarks elementwise`` compiles each loss with stock torch.compile, with this package,
and with stock's max-autotune, checks the losses and gradients of all three against float64 by the
rule of ``benchmarks/accuracy.py``, times them in turns, and measures the peak memory that each
allocates above the memory in use before. ``floor`` is the time to read the inputs and write the
gradients at the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import report
from benchmarks.clock import (
    Bandwidth,
    Call,
    Clock,
    make_clock,
    measure_bandwidth,
    peak_mib,
    ratio_of,
    time_in_turns,
)
from benchmarks.options import DTYPES, add_options, provenance
from benchmarks.workers import Figures, Worker, all_figures

Shape = tuple[int, int]
Cell = tuple[str, str, Shape]  # loss, dtype, shape
ULPS = 4
#: Elements worked on at a time in float64.
BLOCK = 1 << 22
#: Slower cells than this are measured for longer.
LIMIT = 1.02
#: Partial sums take no more, and don't count as more memory.
SLACK_MIB = 1.0


def focal(x: Tensor, t: Tensor) -> Tensor:
    """RetinaNet's, for each element, with alpha 0.25 and gamma 2, as in torchvision."""
    p = torch.sigmoid(x)
    ce = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    p_t = p * t + (1 - p) * (1 - t)
    return (0.25 * t + 0.75 * (1 - t)) * ce * (1 - p_t) ** 2


def sigmoid_focal(x: Tensor, t: Tensor) -> Tensor:
    return focal(x, t).mean()


def asymmetric(x: Tensor, t: Tensor) -> Tensor:
    """Multi-label classification: Ridnik et al., 2021, with gammas 1 and 4 and margin 0.05."""
    p = torch.sigmoid(x)
    q = (1 - p + 0.05).clamp(max=1)
    loss = t * torch.log(p.clamp(min=1e-8)) + (1 - t) * torch.log(q.clamp(min=1e-8))
    p_t = p * t + q * (1 - t)
    return -(loss * torch.pow(1 - p_t, t + 4 * (1 - t))).mean()


def charbonnier(x: Tensor, t: Tensor) -> Tensor:
    return torch.sqrt((x - t) ** 2 + 1e-6).mean()


def pseudo_huber(x: Tensor, t: Tensor) -> Tensor:
    return (torch.sqrt(1 + ((x - t) / 0.5) ** 2) - 1).mean() * 0.25


def log_cosh(x: Tensor, t: Tensor) -> Tensor:
    d = x - t
    return (d + F.softplus(-2 * d) - math.log(2)).mean()


def gaussian_nll(x: Tensor, log_variance: Tensor, t: Tensor) -> Tensor:
    return 0.5 * (log_variance + (x - t) ** 2 * torch.exp(-log_variance)).mean()


def poisson_nll(x: Tensor, t: Tensor) -> Tensor:
    return F.poisson_nll_loss(x, t)


def kl_to_normal(mean: Tensor, log_variance: Tensor) -> Tensor:
    """A VAE's: Kingma and Welling, 2014."""
    return (-0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(dim=1)).mean()


def bce_probabilities(p: Tensor, t: Tensor) -> Tensor:
    return F.binary_cross_entropy(p, t)


def hinge(x: Tensor, t: Tensor) -> Tensor:
    return F.relu(1 - x * (2 * t - 1)).mean()


def softplus_gan(x: Tensor) -> Tensor:
    """A generator's: Goodfellow et al., 2014."""
    return F.softplus(-x).mean()


def pinball(x: Tensor, t: Tensor) -> Tensor:
    d = t - x
    return torch.maximum(0.9 * d, -0.1 * d).mean()


def relative_error(x: Tensor, t: Tensor) -> Tensor:
    return ((x - t).abs() / (t.abs() + 1e-3)).mean()


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    return -F.logsigmoid(chosen - rejected).mean()


#: Each with its inputs: r is normally distributed, p in (0, 1); capitals are differentiated.
LOSSES: dict[str, tuple[Callable[..., Tensor], str]] = {
    function.__name__: (function, inputs)
    for function, inputs in (
        (sigmoid_focal, "Rp"),
        (asymmetric, "Rp"),
        (charbonnier, "Rr"),
        (pseudo_huber, "Rr"),
        (log_cosh, "Rr"),
        (gaussian_nll, "RRr"),
        (poisson_nll, "Rp"),
        (kl_to_normal, "RR"),
        (bce_probabilities, "Pp"),
        (hinge, "Rp"),
        (softplus_gan, "R"),
        (pinball, "Rr"),
        (relative_error, "Rr"),
        (bradley_terry, "RR"),
    )
}


@dataclass(frozen=True)
class Row(report.Clocked):
    """A cell's figures: medians, and the median ratios of neighbouring samples to stock's.

    ``floor_ms`` is the inputs' and gradients' bytes over a copy's bandwidth, and ``of_floor`` is
    ours over that.
    """

    loss: str
    dtype: str
    shape: str
    stock_ms: str
    ours_ms: str
    max_autotune_ms: str
    ratio: str
    max_autotune_ratio: str
    floor_ms: str
    of_floor: str
    stock_peak_mib: str
    ours_peak_mib: str
    reason: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.device, self.loss, self.dtype, self.shape


def make_inputs(cell: Cell, device: torch.device) -> list[Tensor]:
    loss, dtype, shape = cell
    generator = torch.Generator(device).manual_seed(0)
    options = {"dtype": DTYPES[dtype], "device": device, "generator": generator}
    return [
        (torch.rand(shape, **options) if kind in "pP" else torch.randn(shape, **options))  # type: ignore[arg-type]
        .clamp_(*((0.01, 0.99) if kind in "pP" else (-20, 20)))
        .requires_grad_(kind.isupper())
        for kind in LOSSES[loss][1]
    ]


class Run:
    """One contender, called again and again."""

    def __init__(self, function: Callable[..., Tensor], inputs: list[Tensor]) -> None:
        self.function, self.inputs = function, inputs
        self.leaves = [tensor for tensor in inputs if tensor.requires_grad]

    def next_call(self) -> Call:
        """The next call. Gradients are cleared before, untimed."""
        for leaf in self.leaves:
            leaf.grad = None
        return self.call

    def call(self) -> Tensor:
        loss = self.function(*self.inputs)
        loss.backward()
        return loss.detach()

    def results(self) -> tuple[float, list[Tensor]]:
        loss = self.next_call()()
        assert isinstance(loss, Tensor)
        return loss.item(), [leaf.grad for leaf in self.leaves if leaf.grad is not None]


def contenders(cell: Cell, inputs: list[Tensor], *, tuned: bool) -> list[Run]:
    """Stock's, ours, and perhaps stock's max-autotune."""
    torch._dynamo.reset()
    return contenders_of(LOSSES[cell[0]][0], inputs, tuned=tuned)


def contenders_of(
    function: Callable[..., Tensor], inputs: list[Tensor], *, tuned: bool = False
) -> list[Run]:
    """The same of a function, after a reset of Dynamo."""
    from compile_losses.backend import compile_losses as backend

    compile = partial(torch.compile, function, dynamic=False)
    compiled = [compile(), compile(backend=backend)]
    if tuned:
        compiled.append(compile(mode="max-autotune-no-cudagraphs"))
    return [Run(each, inputs) for each in compiled]


def in_blocks(
    function: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype
) -> Iterator[tuple[slice, float, list[Tensor]]]:
    """A loss and its gradients in eager mode, by blocks of rows: it is a mean over rows."""
    rows, cols = inputs[0].shape
    step = max(1, BLOCK // cols)
    for first in range(0, rows, step):
        block = slice(first, first + step)
        leaves = [
            tensor.detach()[block].to(dtype).requires_grad_(tensor.requires_grad)
            for tensor in inputs
        ]
        part = leaves[0].shape[0] / rows
        loss = function(*leaves) * part
        gradients = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])
        yield block, loss.item(), list(gradients)


def check(cell: Cell, inputs: list[Tensor], runs: list[Run]) -> None:
    """Errors at most twice those of eager torch in the same dtype, or a few ulp, by their norms."""
    function, dtype = LOSSES[cell[0]][0], DTYPES[cell[1]]
    results = [run.results() for run in runs]
    squares = [[0.0] * len(runs[0].leaves) for _ in range(len(runs) + 1)]
    sizes = [0.0] * len(runs[0].leaves)
    exact_loss = eager_loss = 0.0
    exact = in_blocks(function, inputs, torch.float64)
    for (block, loss, gradients), (_, narrow_loss, narrow) in zip(
        exact, in_blocks(function, inputs, dtype), strict=True
    ):
        exact_loss += loss
        eager_loss += narrow_loss
        for index, gradient in enumerate(gradients):
            sizes[index] += gradient.square().sum().item()
            found = [narrow[index], *(result[1][index][block] for result in results)]
            for square, each in zip(squares, found, strict=True):
                square[index] += (each.double() - gradient).square().sum().item()
    ulp = torch.finfo(dtype).eps
    names = ("stock", "ours", "max-autotune")
    for name, (loss, _), square in zip(names, results, squares[1:], strict=False):
        allowed = max(2 * abs(eager_loss - exact_loss), ULPS * ulp * abs(exact_loss))
        if not abs(loss - exact_loss) <= allowed:
            raise AssertionError(f"{name}: loss {loss}, in float64 {exact_loss}")
        for error, eager, size in zip(square, squares[0], sizes, strict=True):
            if not math.sqrt(error) <= max(2 * math.sqrt(eager), ULPS * ulp * math.sqrt(size)):
                raise AssertionError(f"{name}: gradient off by {math.sqrt(error / size):.2e}")


class ElementwiseWorker(Worker[Cell]):
    def compile(self, cell: Cell) -> object:
        inputs = make_inputs(cell, self.clock.device)
        runs = contenders(cell, inputs, tuned=self.arguments.tuned)
        return [run.next_call()() for run in runs]

    def measure(self, cell: Cell) -> Figures:
        inputs = make_inputs(cell, self.clock.device)
        runs = contenders(cell, inputs, tuned=self.arguments.tuned)
        bandwidth: Bandwidth = self.arguments.bandwidth
        with self.alone:
            check(cell, inputs, runs)
            moved = sum(t.nbytes for t in inputs) + sum(t.nbytes for t in runs[0].leaves)
            floor = bandwidth.floor_ms(moved, writes=True)
            return figures(runs, self.clock, self.arguments.budget, floor)

    def failed(self, reason: str) -> Figures:
        return {"reason": reason}


def figures(runs: list[Run], clock: Clock, budget_s: float, floor: float) -> Figures:
    """Of stock's, ours, and perhaps a third run, beside a floor in ms."""
    calls = [run.next_call for run in runs]
    times = time_in_turns(calls, clock, budget_s)
    if ratio_of(*times[:2]) > LIMIT:
        more = time_in_turns(calls, clock, 4 * budget_s)
        times = [a + b for a, b in zip(times, more, strict=True)]
    stock, ours, *tuned = (statistics.median(sample) for sample in times)
    peaks = [peak_mib(call, clock) for call in calls[:2]]
    return {
        "stock_ms": f"{stock:.4g}",
        "ours_ms": f"{ours:.4g}",
        "max_autotune_ms": f"{tuned[0]:.4g}" if tuned else "",
        "ratio": f"{ratio_of(*times[:2]):.3f}",
        "max_autotune_ratio": f"{ratio_of(times[0], times[2]):.3f}" if tuned else "",
        "floor_ms": f"{floor:.4g}",
        "of_floor": f"{ours / floor:.2f}",
        "stock_peak_mib": f"{peaks[0]:.2f}",
        "ours_peak_mib": f"{peaks[1]:.2f}",
        **clock.conditions(),
    }


def verdict(row: Row) -> str:
    marks = []
    if row.ratio and float(row.ratio) > LIMIT:
        marks.append("SLOWER")
    if row.ours_peak_mib and float(row.ours_peak_mib) > float(row.stock_peak_mib) + SLACK_MIB:
        marks.append("BIGGER")
    return " ".join([*marks, row.reason])


def geometric_means(rows: list[Row]) -> Iterator[str]:
    """Summaries of the ratios, for each dtype and shape."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.ratio:
            groups.setdefault((row.dtype, row.shape), []).append(row)
    for key, group in groups.items():
        ours = statistics.geometric_mean(float(row.ratio) for row in group)
        floor = statistics.geometric_mean(float(row.of_floor) for row in group)
        text = f"{' '.join(key)}: {len(group)} losses, ours {ours:.3f} of stock's time"
        if all(row.max_autotune_ratio for row in group):
            tuned = statistics.geometric_mean(float(row.max_autotune_ratio) for row in group)
            text += f", max-autotune {tuned:.3f}"
        yield f"{text}; ours {floor:.2f} of the floor"


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    output: Path = arguments.output or report.default_output(device, "elementwise")
    table = report.kept(output, Row, append=arguments.append)
    clock = make_clock(device)
    arguments.bandwidth = measure_bandwidth(clock)
    common = provenance(arguments, device)
    failed = 0
    measured_now: list[Row] = []
    cells = [
        (loss, dtype, shape)
        for shape in arguments.shape
        for loss in arguments.loss
        for dtype in arguments.dtype
    ]
    head = ("stock", "ours", "tuned", "ratio", "tuned", "floor", "MiB", "ours")
    print(f"{'cell':<42}" + "".join(f"{text:>9}" for text in head))
    with all_figures(ElementwiseWorker, arguments, cells) as measured:
        for (loss, dtype, shape), found in measured:
            failed += "ratio" not in found
            size = "x".join(map(str, shape))
            known = {**common, "loss": loss, "dtype": dtype, "shape": size, **found}
            row = report.row_of(Row, known)
            table[row.key] = row
            measured_now.append(row)
            columns = (row.stock_ms, row.ours_ms, row.max_autotune_ms, row.ratio,
                       row.max_autotune_ratio, row.of_floor, row.stock_peak_mib,
                       row.ours_peak_mib)  # fmt: skip
            text = "".join(f"{column:>9}" for column in columns)
            print(f"{f'{loss} {dtype} {size}':<42}{text}  {verdict(row)}", flush=True)
            report.write(output, Row, table.values())
    print(*geometric_means(measured_now), f"wrote {output}", sep="\n")
    return int(failed > 0)


def _shape(text: str) -> Shape:
    rows, cols = text.split("x")
    return int(rows), int(cols)


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    summary = "losses without an op, stock torch.compile against ours"
    parser = commands.add_parser("elementwise", help=summary, description=__doc__)
    choose = partial(parser.add_argument, nargs="+", help="default: all")
    choose("--loss", choices=LOSSES, default=list(LOSSES))
    choose("--dtype", choices=DTYPES, default=list(DTYPES))
    cuda = torch.cuda.is_available()
    shape = (8192, 8192) if cuda else (2048, 4096)
    parser.add_argument(
        "--shape", type=_shape, nargs="+", default=[shape], help="ROWSxCOLS ({}x{})".format(*shape)
    )
    parser.add_argument("--no-max-autotune", dest="tuned", action="store_false")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile (1)")
    add_options(parser, 0.2, append=True)
