"""Training steps of a linear layer and cross entropy: time, and memory beside the gradients.

``python -m benchmarks linear`` checks every contender against a reference in a wider dtype, times
all of them in turns, and measures the most memory that a step takes above its inputs and the
gradients that it returns. ``--sweep classes`` and ``--sweep rows`` measure and draw both against
that size.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import report
from benchmarks.clock import Call, Clock, make_clock
from benchmarks.contenders import Contender, UnavailableError
from benchmarks.matrix import cpu_peak_mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FEWEST_ROUNDS, ULPS, BLOCK = 5, 4, 1 << 25


@dataclass(frozen=True)
class Shape:
    rows: int
    hidden: int
    classes: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.hidden}x{self.classes}"


SIZES = {
    "cuda": (
        Shape(8192, 4096, 128_256),
        Shape(16_384, 2048, 32_000),
        Shape(8192, 1024, 151_936),
        Shape(4096, 8192, 262_144),
    ),
    "cpu": (Shape(4096, 128, 32_000), Shape(2048, 128, 128_256)),
}
SMALL = (Shape(2048, 32, 30_000),)
SWEEPS = {
    "classes": (8000, 16_000, 32_000, 64_000, 128_000, 256_000),
    "rows": (1024, 2048, 4096, 8192, 16_384, 32_768),
}


@dataclass(frozen=True)
class Row:
    """A contender's figures; empty where it was wrong or failed. Memory is in MiB."""

    shape: str
    dtype: str
    ignored: str
    contender: str
    ms: str
    peak_mib: str
    reason: str
    device: str
    torch: str
    contender_version: str
    commit: str


def _expression(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        raise UnavailableError("needs a CUDA device")


def _auto_chunker() -> Loss:
    if not hasattr(torch._inductor.config, "auto_chunker"):
        raise UnavailableError("this torch has no auto_chunker")
    return torch.compile(_expression, options={"auto_chunker.enable": True})


def _torch_chunked() -> Loss:
    if not hasattr(F, "linear_cross_entropy"):
        raise UnavailableError("this torch has no linear_cross_entropy")
    return partial(F.linear_cross_entropy, options=nn.LinearCrossEntropyOptions())


def _ours_eager() -> Loss:
    from compile_losses.linear import linear_cross_entropy

    return linear_cross_entropy


def _ours_compiled() -> Loss:
    from compile_losses.backend import compile_losses

    return torch.compile(_expression, backend=compile_losses)


def _liger() -> Loss:
    _needs_cuda()
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, target: loss(weight, hidden, target)


def _cut_cross_entropy() -> Loss:
    _needs_cuda()
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy


BUILDERS: dict[str, tuple[Callable[[], Loss], str]] = {
    "eager": (lambda: _expression, "torch"),
    "inductor": (lambda: torch.compile(_expression), "torch"),
    "inductor_auto_chunker": (_auto_chunker, "torch"),
    "torch_chunked": (_torch_chunked, "torch"),
    "ours_eager": (_ours_eager, "compile_losses"),
    "ours_compiled": (_ours_compiled, "compile_losses"),
    "liger": (_liger, "liger-kernel"),
    "cut_cross_entropy": (_cut_cross_entropy, "cut-cross-entropy"),
}


class Problem:
    """Inputs of one shape, and the loss and gradients that they have in a wider dtype."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float
    ) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(shape.rows, shape.hidden, device=device).to(dtype)
        weight = torch.randn(shape.classes, shape.hidden, device=device)
        self.weight = weight.div_(shape.hidden**0.5).to(dtype)
        self.target = torch.randint(shape.classes, (shape.rows,), device=device)
        self.target[torch.rand(shape.rows, device=device) < ignored] = -100
        self.hidden.requires_grad_()
        self.weight.requires_grad_()
        self.expected = self._reference(torch.float64 if dtype == torch.float32 else torch.float32)

    def _reference(self, dtype: torch.dtype) -> list[Tensor]:
        hidden, weight = self.hidden.detach(), self.weight.detach().to(dtype)
        count = (self.target != -100).sum().to(dtype)
        loss, grad_hidden, grad_weight = count.new_zeros(()), [], torch.zeros_like(weight)
        for rows in torch.arange(len(hidden)).split(max(1, BLOCK // len(weight))):
            block = hidden[rows].to(dtype).requires_grad_()
            logits = F.linear(block, weight).detach().requires_grad_()
            total = F.cross_entropy(logits, self.target[rows], reduction="sum") / count
            (gradient,) = torch.autograd.grad(total, logits)
            loss += total.detach()
            grad_hidden.append(gradient @ weight)
            grad_weight += gradient.t() @ block.detach()
        return [loss, torch.cat(grad_hidden), grad_weight]

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def step(self, loss: Loss) -> Tensor:
        value = loss(self.hidden, self.weight, self.target)
        value.backward()
        return value.detach()

    def next_call(self, loss: Loss) -> Call:
        self.clear()
        return partial(self.step, loss)

    def errors(self, loss: Loss) -> list[float]:
        """Of the loss and the gradients: the norm of the difference over the norm."""
        self.clear()
        results: list[Any] = [self.step(loss), self.hidden.grad, self.weight.grad]
        return [
            float((a.to(b.dtype) - b).norm() / b.norm())
            for a, b in zip(results, self.expected, strict=True)
        ]

    def peak_mib(self, loss: Loss, clock: Clock) -> float:
        call = self.next_call(loss)
        peak = clock.peak_mib(call)
        if peak is None:
            peak = cpu_peak_mib(self.next_call(loss))
        return peak - (self.hidden.nbytes + self.weight.nbytes) / (1 << 20)


def measure(problem: Problem, names: Iterable[str], clock: Clock, budget_s: float) -> list[Row]:
    """Figures of the contenders, in their order, without what all rows have in common."""
    dtype = problem.hidden.dtype
    eager = problem.errors(_expression)
    allowed = [max(2 * error, ULPS * torch.finfo(dtype).eps) for error in eager]
    rows: dict[str, Row] = {}
    ready: dict[str, Loss] = {}
    for name in names:
        build, distribution = BUILDERS[name]
        row = dict.fromkeys((field.name for field in fields(Row)), "")
        row |= {"contender": name}
        row["contender_version"] = Contender(name, lambda *_: _expression, distribution).version  # type: ignore[arg-type,return-value]
        try:
            loss = build()
            errors = problem.errors(loss)
            if all(error <= most for error, most in zip(errors, allowed, strict=True)):
                ready[name] = loss
            else:
                row["reason"] = "wrong: errors " + ", ".join(f"{error:.1e}" for error in errors)
        except (ImportError, UnavailableError) as error:
            row["reason"] = f"not run: {error}"
        except Exception as error:  # whatever it is, the others still count
            row["reason"] = (
                f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            )
        rows[name] = Row(**row)
    times: dict[str, list[float]] = {name: [] for name in ready}
    leads = {name: clock.lead_ms(partial(problem.next_call, loss)) for name, loss in ready.items()}
    spent = rounds = 0.0
    while rounds < FEWEST_ROUNDS or spent < budget_s * 1e3 * len(ready):
        for name, loss in ready.items():
            sample = clock.sample(partial(problem.next_call, loss), leads[name])
            times[name].append(sample)
            spent += 2 * sample  # a sample is two calls
        rounds += 1
    for name, loss in ready.items():
        peak = problem.peak_mib(loss, clock)
        median = statistics.median(times[name])
        rows[name] = replace(rows[name], ms=f"{median:.4g}", peak_mib=f"{peak:.1f}")
    problem.clear()
    return list(rows.values())


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    clock = make_clock(device)
    kind = f"linear-{arguments.sweep}" if arguments.sweep else "linear"
    output: Path = arguments.output or report.default_output(device, kind)
    common = {
        "dtype": arguments.dtype,
        "ignored": f"{arguments.ignored:g}",
        "device": report.device_name(device),
        "torch": torch.__version__,
        "commit": arguments.commit or report.current_commit(),
    }
    rows: list[Row] = []
    print(f"{'shape':<22}{'contender':<24}{'ms':>9}{'MiB':>10}")
    for shape in _shapes(arguments):
        torch._dynamo.reset()
        problem = Problem(shape, DTYPES[arguments.dtype], device, arguments.ignored)
        for row in measure(problem, arguments.contender, clock, arguments.budget):
            rows.append(replace(row, shape=str(shape), **common))
            print(f"{shape!s:<22}{row.contender:<24}{row.ms:>9}{row.peak_mib:>10}  {row.reason}")
        del problem
        gc.collect()
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows if not row.reason.startswith("not run"))
    print(f"wrote {output}")
    if arguments.sweep:
        print(f"wrote {draw(rows, arguments.sweep, output.with_suffix('.png'))}")
    return int(any(row.contender.startswith("ours") and not row.ms for row in rows))


def _shapes(arguments: argparse.Namespace) -> Iterable[Shape]:
    if arguments.sweep:
        (base,) = arguments.shape or [SIZES[arguments.device][0]]
        return [replace(base, **{arguments.sweep: size}) for size in SWEEPS[arguments.sweep]]
    if arguments.shape:
        return arguments.shape
    return SMALL if arguments.size == "small" else SIZES[arguments.device]


def draw(rows: list[Row], axis: str, path: Path) -> Path:
    """Time and memory of every contender against a size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    index = [field.name for field in fields(Shape)].index(axis)
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for panel, column, label in zip(
        panels, ("ms", "peak_mib"), ("ms a step", "MiB above inputs and gradients"), strict=True
    ):
        _lines(panel, [row for row in rows if row.ms], index, column)
        panel.set_xlabel(axis)
        panel.set_ylabel(label)
        panel.set_xscale("log", base=2)
    panels[0].legend(fontsize=8)
    first = rows[0]
    figure.suptitle(
        f"{first.device}, torch {first.torch}, {first.dtype}, commit {first.commit}", fontsize=10
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _lines(axes: Axes, rows: list[Row], index: int, column: str) -> None:
    for name in dict.fromkeys(row.contender for row in rows):
        own = [row for row in rows if row.contender == name]
        sizes = [int(row.shape.split("x")[index]) for row in own]
        style = "-" if name.startswith("ours") else "--"
        axes.plot(
            sizes, [float(getattr(row, column)) for row in own], style, marker="o", label=name
        )


def _shape(text: str) -> Shape:
    return Shape(*map(int, text.split("x")))


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    summary = "a linear layer and cross entropy, with peak memory"
    parser = commands.add_parser("linear", help=summary, description=__doc__)
    names = list(BUILDERS)
    parser.add_argument("--contender", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
    )
    parser.add_argument("--size", choices=("reference", "small"), default="reference")
    parser.add_argument("--shape", type=_shape, nargs="+", help="ROWSxHIDDENxCLASSES")
    parser.add_argument("--sweep", choices=SWEEPS, help="of one --shape, against this size")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--ignored", type=float, default=0.0, help="part of the targets (0)")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds a contender (0.5)")
    parser.add_argument("--output", type=Path, help="CSV file")
    parser.add_argument("--commit", help="the commit to record, where there is no git checkout")
