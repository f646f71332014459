"""Losses without an op behind a layer: a step's time and peak memory.

``python -m benchmarks behind`` computes the losses of ``benchmarks/elementwise.py`` of what a layer
predicts, forward and backward, with stock torch.compile and with this package. Layers are a linear
one with a bias and without, a convolution, and a linear one with a layer norm. The loss and the
gradients, of the features and the layer, are checked against float64: their errors are at most
twice torch's, eager or compiled. On a GPU products of float32 are in tf32. Both are timed in turns.
``floor`` is the time of the layer by itself, forward and backward, and that to read prediction and
target once and to write the gradient.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import report
from benchmarks.clock import Clock, make_clock, measure_bandwidth, time_in_turns
from benchmarks.elementwise import LOSSES, Row, Run, contenders_of, figures, verdict
from benchmarks.linear_steps import allowed_errors, complaint, relative_error
from benchmarks.options import DTYPES, add_options, provenance

#: Those of one prediction.
BEHIND = [name for name, (_, inputs) in LOSSES.items() if inputs in ("Rp", "Rr", "R")]
LAYERS = ("linear", "linear_without_bias", "convolution", "normalised")
#: Rows, features and predictions of a linear layer.
LINEAR = {"cuda": [(8192, 1024, 8192), (16384, 1024, 16384)], "cpu": [(2048, 256, 4096)]}
#: Images, channels and height, the same of features and predictions.
CONVOLUTION = {"cuda": [(16, 64, 256)], "cpu": [(4, 32, 128)]}


@dataclass(frozen=True)
class Cell:
    """A loss, its layer and their sizes."""

    loss: str
    layer: str
    sizes: tuple[int, int, int]
    dtype: str

    @property
    def shape(self) -> str:
        return f"{'x'.join(map(str, self.sizes))} {self.layer}"


class Problem:
    """A loss and a layer, with their inputs."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell = cell
        self.loss, kinds = LOSSES[cell.loss]
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=device)
        first, features, last = cell.sizes
        if cell.layer == "convolution":
            shapes = [(first, features, last, last), (features, features, 3, 3), (features,)]
            fan_in = 9 * features
        else:
            shapes = [(first, features), (last, features), (last,)]
            fan_in = features
        x, weight, bias = map(draw, shapes)
        leaves = [x, weight * fan_in**-0.5, bias]
        if cell.layer == "linear_without_bias":
            leaves.pop()
        dtype = DTYPES[cell.dtype]
        self.leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        with torch.no_grad():
            shape = self.predicted(*self.leaves).shape
        targets = []
        if kinds[1:] == "p":
            targets.append(torch.rand(shape, generator=generator, device=device).to(dtype))
        elif kinds[1:]:
            targets.append(draw(shape).to(dtype))
        self.targets = targets
        self.inputs = [*self.leaves, *targets]

    def predicted(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.cell.layer == "convolution":
            return F.conv2d(x, weight, bias, padding=1)
        made = F.linear(x, weight, bias)
        return F.layer_norm(made, made.shape[1:]) if self.cell.layer == "normalised" else made

    def function(self, *inputs: Tensor) -> Tensor:
        count = len(self.leaves)
        return self.loss(self.predicted(*inputs[:count]), *inputs[count:])

    def alone(self, *leaves: Tensor) -> Tensor:
        """A sum has a gradient of ones, which are not read: it is the cheapest loss."""
        return self.predicted(*leaves).sum()

    def exact(self) -> list[Tensor]:
        """The loss and its gradients in float64."""
        wide = [each.detach().double() for each in self.inputs]
        leaves = [each.requires_grad_() for each in wide[: len(self.leaves)]]
        loss = self.function(*leaves, *wide[len(leaves) :])
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    def errors(self, run: Run, exact: list[Tensor]) -> list[float]:
        loss, gradients = run.results()
        found = [exact[0].new_tensor(loss), *gradients]
        return [relative_error(*pair) for pair in zip(found, exact, strict=True)]

    def moved(self) -> int:
        """Bytes of prediction and target, read once, and of the gradient, written once."""
        (x, *_), width = self.leaves, self.leaves[0].element_size()
        first, _, last = self.cell.sizes
        size = x.nbytes if self.cell.layer == "convolution" else first * last * width
        return 2 * size + sum(each.nbytes for each in self.targets)


def measured(cell: Cell, clock: Clock, arguments: argparse.Namespace) -> dict[str, str]:
    problem = Problem(cell, clock.device)
    torch._dynamo.reset()
    runs = contenders_of(problem.function, problem.inputs)
    exact = problem.exact()
    # Where the layer's rounding turns a kink, all are off: the rule takes the worse of torch's.
    torchs = [
        problem.errors(each, exact) for each in (Run(problem.function, problem.inputs), runs[0])
    ]
    allowed = allowed_errors(map(max, *torchs), DTYPES[cell.dtype])
    reason = complaint(problem.errors(runs[1], exact), allowed)
    if reason:
        return {"reason": reason}
    del exact
    layer = Run(torch.compile(problem.alone, dynamic=False), problem.leaves)
    (alone,) = time_in_turns([layer.next_call], clock, arguments.budget)
    floor = arguments.bandwidth.floor_ms(problem.moved(), writes=True)
    return figures(runs, clock, arguments.budget, floor + statistics.median(alone))


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    output: Path = arguments.output or report.default_output(device, "behind")
    table = report.kept(output, Row, append=arguments.append)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    clock = make_clock(device)
    arguments.bandwidth = measure_bandwidth(clock)
    common = provenance(arguments, device)
    cells = [
        Cell(loss, layer, sizes, dtype)
        for layer in arguments.layer
        for sizes in (CONVOLUTION if layer == "convolution" else LINEAR)[device.type]
        for loss in arguments.loss
        for dtype in arguments.dtype
    ]
    ratios: dict[str, list[float]] = {}
    failed = 0
    head = ("stock", "ours", "ratio", "floor", "MiB", "ours")
    print(f"{'cell':<64}" + "".join(f"{text:>9}" for text in head))
    for cell in cells:
        try:
            found = measured(cell, clock, arguments)
        except torch.OutOfMemoryError as error:
            found = {"reason": str(error).splitlines()[0]}
        failed += "ratio" not in found
        if "ratio" in found:
            ratios.setdefault(cell.layer, []).append(float(found["ratio"]))
        known = {**common, "loss": cell.loss, "dtype": cell.dtype, "shape": cell.shape, **found}
        row = report.row_of(Row, known)
        table[row.key] = row
        columns = (row.stock_ms, row.ours_ms, row.ratio, row.of_floor, row.stock_peak_mib,
                   row.ours_peak_mib)  # fmt: skip
        text = "".join(f"{column:>9}" for column in columns)
        print(f"{f'{cell.loss} {cell.dtype} {cell.shape}':<64}{text}  {verdict(row)}", flush=True)
        report.write(output, Row, table.values())
    for layer, found_ratios in ratios.items():
        mean = statistics.geometric_mean(found_ratios)
        print(f"{layer}: {len(found_ratios)} cells, ours {mean:.3f} of stock's time")
    print(f"wrote {output}")
    return int(failed > 0)


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    summary = "losses without an op behind a layer, stock torch.compile against ours"
    parser = commands.add_parser("behind", help=summary, description=__doc__)
    choose = partial(parser.add_argument, nargs="+", help="default: all")
    choose("--loss", choices=BEHIND, default=BEHIND)
    choose("--layer", choices=LAYERS, default=list(LAYERS))
    choose("--dtype", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    add_options(parser, 0.2, append=True)
