"""Training steps of a linear layer and cross entropy: time, and memory beside the gradients.

``python -m benchmarks linear`` checks every contender against a reference in a wider dtype, times
all of them in turns, and measures the peak memory of a step above its inputs and the gradients
that it returns. ``--sweep classes`` and ``--sweep rows`` measure and draw both against that size.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import linear_steps, plots, report
from benchmarks.clock import Call, Clock, make_clock
from benchmarks.contenders import UnavailableError
from benchmarks.linear_steps import Loss, Row, Shape
from benchmarks.options import DTYPES, provenance

BLOCK = 1 << 25

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
    """Inputs of one shape, and their loss and gradients in a wider dtype."""

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
        """The errors of the loss and the gradients."""
        self.clear()
        results = (self.step(loss), self.hidden.grad, self.weight.grad)
        return [
            linear_steps.relative_error(*pair) for pair in zip(results, self.expected, strict=True)
        ]


def measure(
    problem: Problem, names: Iterable[str], clock: Clock, budget_s: float, common: dict[str, str]
) -> list[Row]:
    """Figures of the contenders, in their order."""
    allowed = linear_steps.allowed_errors(problem.errors(_expression), problem.hidden.dtype)
    gradients = problem.hidden, problem.weight
    rows = linear_steps.measured(
        {name: BUILDERS[name] for name in names},
        problem,
        allowed,
        clock,
        budget_s,
        common,
        gradients,
    )
    problem.clear()
    return rows


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    clock = make_clock(device)
    kind = f"linear-{arguments.sweep}" if arguments.sweep else "linear"
    output: Path = arguments.output or report.default_output(device, kind)
    results = linear_steps.Results(output, append=arguments.append)
    common = {
        **provenance(arguments, device),
        "dtype": arguments.dtype,
        "ignored": f"{arguments.ignored:g}",
    }
    print(linear_steps.HEADER)
    for shape in _shapes(arguments):
        torch._dynamo.reset()
        problem = Problem(shape, DTYPES[arguments.dtype], device, arguments.ignored)
        rows = measure(
            problem, arguments.contender, clock, arguments.budget, {**common, "shape": str(shape)}
        )
        print(*rows, sep="\n")
        results.add(rows)
        del problem
        gc.collect()
    print(f"wrote {output}")
    if arguments.plots:
        plots.draw(output)
    return int(results.broken)


def _shapes(arguments: argparse.Namespace) -> Iterable[Shape]:
    if arguments.sweep:
        (base,) = arguments.shape or [SIZES[arguments.device][0]]
        return base.swept(arguments.sweep)
    if arguments.shape:
        return arguments.shape
    return SMALL if arguments.size == "small" else SIZES[arguments.device]


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    summary = "a linear layer and cross entropy, with peak memory"
    parser = commands.add_parser("linear", help=summary, description=__doc__)
    linear_steps.add_step_options(parser, BUILDERS)
    parser.add_argument("--size", choices=("reference", "small"), default="reference")
    linear_steps.add_sweep(parser)
    parser.add_argument("--ignored", type=float, default=0.0, help="part of the targets (0)")
