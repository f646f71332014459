"""Distillation from a teacher's linear layer into a student's: a step's time and peak memory.

``python -m benchmarks distillation`` computes the Kullback-Leibler divergence of two linear layers'
outputs at a temperature, and the gradients of the student's hidden states and weight, with stock
torch.compile, with this package compiled and called, and with Liger's fused linear Jensen-Shannon
loss if it computes the same. ``mixed`` adds the cross entropy of labels. ``--sweep classes`` and
``--sweep rows`` measure and draw time and memory against that size.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import linear_steps, plots, report
from benchmarks.clock import Call, Clock, make_clock
from benchmarks.contenders import UnavailableError
from benchmarks.linear_steps import Shape
from benchmarks.options import DTYPES, add_options, provenance

TEMPERATURE = 2.0
#: Of more rows two tensors of logits, and torch's results in float32, would not fit.
MOST_ROWS = 16_384
Step = Callable[..., Tensor]


def divergence(student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """The divergence of Hinton et al., 2015."""
    log_probs = F.log_softmax(student / TEMPERATURE, -1)
    probs = F.softmax(teacher / TEMPERATURE, -1)
    return F.kl_div(log_probs, probs, reduction="batchmean") * TEMPERATURE**2


def mixed(student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    return 0.5 * divergence(student, teacher, target) + 0.5 * F.cross_entropy(student, target)


LOSSES = {"divergence": divergence, "mixed": mixed}


class Problem:
    """Inputs of one shape; the teacher has twice the student's features."""

    def __init__(self, loss: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.loss, self.name = LOSSES[loss], loss

        def layer(hidden: int) -> tuple[Tensor, Tensor]:
            weight = torch.randn(shape.classes, hidden, device=device).div_(hidden**0.5)
            return torch.randn(shape.rows, hidden, device=device).to(dtype), weight.to(dtype)

        self.student = tuple(tensor.requires_grad_() for tensor in layer(shape.hidden))
        self.teacher = layer(2 * shape.hidden)
        self.target = torch.randint(shape.classes, (shape.rows,), device=device)
        wide = torch.float64 if dtype == torch.float32 else torch.float32
        self.expected = self._results(self.eager, wide)

    def eager(
        self, hidden: Tensor, weight: Tensor, taught: Tensor, teacher: Tensor, target: Tensor
    ) -> Tensor:
        with torch.no_grad():
            wanted = F.linear(taught, teacher)
        return self.loss(F.linear(hidden, weight), wanted, target)

    def _results(self, step: Step, dtype: torch.dtype) -> list[Tensor]:
        student = [tensor.detach().to(dtype).requires_grad_() for tensor in self.student]
        teacher = [tensor.to(dtype) for tensor in self.teacher]
        value = step(*student, *teacher, self.target)
        return [value.detach(), *torch.autograd.grad(value, student)]

    def errors(self, step: Step) -> list[float]:
        """The errors of the loss and the gradients."""
        results = self._results(step, self.student[0].dtype)
        pairs = zip(results, self.expected, strict=True)
        return [linear_steps.relative_error(*pair) for pair in pairs]

    def next_call(self, step: Step) -> Call:
        for tensor in self.student:
            tensor.grad = None
        return partial(self._run, step)

    def _run(self, step: Step) -> Tensor:
        value = step(*self.student, *self.teacher, self.target)
        value.backward()
        return value.detach()


def _stock(problem: Problem) -> Step:
    return torch.compile(problem.eager)


def _ours_compiled(problem: Problem) -> Step:
    return torch.compile(problem.eager, backend="compile_losses")


def _ours_eager(problem: Problem) -> Step:
    from compile_losses.linear import linear_softmax_kl_div

    if problem.name != "divergence":
        raise UnavailableError("not of this loss")

    def step(
        hidden: Tensor, weight: Tensor, taught: Tensor, teacher: Tensor, target: Tensor
    ) -> Tensor:
        value = linear_softmax_kl_div(
            hidden, weight, taught, target_weight=teacher, temperature=TEMPERATURE
        )
        return value * TEMPERATURE**2

    return step


def _liger(problem: Problem) -> Step:
    if problem.name != "divergence" or not torch.cuda.is_available():
        raise UnavailableError("not of this loss, or no CUDA device")
    from liger_kernel.transformers import LigerFusedLinearJSD

    # With beta 0 it is the forward divergence, averaged over the rows with labels.
    loss = LigerFusedLinearJSD(jsd_beta=0.0, temperature=TEMPERATURE)

    def step(
        hidden: Tensor, weight: Tensor, taught: Tensor, teacher: Tensor, target: Tensor
    ) -> Tensor:
        value: Tensor = loss(hidden, weight, taught, teacher, target)
        return value * TEMPERATURE**2

    return step


BUILDERS: dict[str, tuple[Callable[[Problem], Step], str]] = {
    "inductor": (_stock, "torch"),
    "ours_compiled": (_ours_compiled, "compile_losses"),
    "ours_eager": (_ours_eager, "compile_losses"),
    "liger": (_liger, "liger-kernel"),
}


def _draw(rows: list[linear_steps.Row], path: Path) -> None:
    """Writes a figure for each loss."""
    for name in LOSSES:
        lines = [
            replace(row, shape=row.shape.removeprefix(f"{name} "))
            for row in rows
            if row.shape.startswith(name)
        ]
        if lines:
            file = path.with_name(f"{path.stem}-{name}.png")
            print(f"wrote {plots.plot_steps(lines, file, plots.ABOVE_INPUTS)}")


def _shapes(arguments: argparse.Namespace) -> list[Shape]:
    shape: Shape = arguments.shape
    if not arguments.sweep:
        return [shape]
    return [each for each in shape.swept(arguments.sweep) if each.rows <= MOST_ROWS]


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    clock = make_clock(device)
    kind = f"distillation-{arguments.sweep}" if arguments.sweep else "distillation"
    output: Path = arguments.output or report.default_output(device, kind)
    results = linear_steps.Results(output, append=arguments.append)
    print(linear_steps.HEADER)
    for name in arguments.loss:
        for shape in _shapes(arguments):
            rows = _measure(name, shape, clock, arguments)
            print(*rows, sep="\n", flush=True)
            results.add(rows)
            gc.collect()  # the next problem is as large
    print(f"wrote {output}")
    if arguments.sweep:
        _draw(report.read(output, linear_steps.Row), output)
    return int(results.broken)


def _measure(
    name: str, shape: Shape, clock: Clock, arguments: argparse.Namespace
) -> list[linear_steps.Row]:
    dtype = DTYPES[arguments.dtype]
    problem = Problem(name, shape, dtype, clock.device)
    common = {
        **provenance(arguments, clock.device),
        "dtype": arguments.dtype,
        "shape": f"{name} {shape}",
    }
    builders = {
        each: (partial(build, problem), package)
        for each, (build, package) in BUILDERS.items()
        if each in arguments.contender
    }
    allowed = linear_steps.allowed_errors(problem.errors(problem.eager), dtype)
    return linear_steps.measured(builders, problem, allowed, clock, arguments.budget, common)


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    parser = commands.add_parser(
        "distillation", help="distillation into a head, with peak memory", description=__doc__
    )
    choose = partial(parser.add_argument, nargs="+", help="default: all")
    choose("--loss", choices=LOSSES, default=list(LOSSES))
    choose("--contender", choices=BUILDERS, default=list(BUILDERS))
    cuda = torch.cuda.is_available()
    shape = Shape(8192, 2048, 128_256) if cuda else Shape(2048, 64, 32_000)
    parser.add_argument(
        "--shape",
        type=Shape.parse,
        default=shape,
        help=f"ROWSxHIDDENxCLASSES of the student ({shape})",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32")
    linear_steps.add_sweep(parser)
    add_options(parser, 0.5, append=True)
