"""Contrastive losses of two batches of embeddings: time, peak memory and the chosen plan.

``python -m benchmarks contrastive`` compiles each loss with stock torch.compile, with this package,
and with this package and ``prefer_memory``. Each loss reads the product of all pairs of two batches
of embeddings, whose rows it normalises, and has a learned scale. Of up to 16384 pairs (8192 on a
CPU) the loss and all gradients are checked against float64; of more, torch's own ops would not fit
beside it. All contenders are timed in turns, and the peak memory is measured that each allocates
above its inputs, gradients included. A contender that has too little memory has a row that says so.
The dtype bfloat16 is that of autocast: embeddings and gradients are float32. A plot of each loss,
dtype and width has time and memory against the number of pairs, if the file has several.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import linear_steps, plots, report
from benchmarks.clock import Call, Clock
from benchmarks.contenders import version_of
from benchmarks.options import DTYPES, add_options, provenance
from benchmarks.workers import Figures, Worker, all_figures, leave_memory

#: Of more pairs nothing is checked.
MOST_CHECKED = {"cuda": 16_384, "cpu": 8192}
TEMPERATURE = 0.07
#: The name of the error of a contender with too little memory.
OUT_OF_MEMORY = "OutOfMemoryError"
#: Errors of so many roundings are allowed, whatever torch's own are.
LEAST_ULPS = 32


@dataclass(frozen=True)
class Shape:
    pairs: int
    width: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.pairs}x{self.width}"


def _own(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[0], device=logits.device)


def infonce(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """By rows alone, as multiple negatives ranking is."""
    logits = scale.exp() * image @ text.T
    return F.cross_entropy(logits, _own(logits))


def ntxent(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """SimCLR's, of half of the pairs, so that the matrix is as large as that of the others."""
    half = image.shape[0] // 2
    views = torch.cat([image[:half], text[:half]])
    logits = views @ views.T * scale.exp()
    own = torch.eye(2 * half, dtype=torch.bool, device=logits.device)
    return F.cross_entropy(logits.masked_fill(own, -math.inf), _own(logits).roll(half))


def siglip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = scale.exp() * image @ text.T + bias
    eye = torch.eye(logits.shape[0], device=logits.device, dtype=logits.dtype)
    return -F.logsigmoid((2 * eye - 1) * logits).sum() / logits.shape[0]


def _both(by_image: Tensor, by_text: Tensor) -> Tensor:
    own = _own(by_image)
    return (F.cross_entropy(by_image, own) + F.cross_entropy(by_text, own)) / 2


def clip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """As open_clip writes it for gathered features."""
    logits = scale.exp() * image @ text.T
    return _both(logits, logits.T)


def clip_scaled(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """As transformers writes it: the product is scaled, not an embedding."""
    logits = torch.matmul(text, image.t()) * scale.exp()
    return _both(logits.t(), logits)


def clip_twice(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """As open_clip writes it for one process: two products."""
    return _both(scale.exp() * image @ text.T, scale.exp() * text @ image.T)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "infonce": infonce,
    "ntxent": ntxent,
    "siglip": siglip,
    "clip": clip,
    "clip_scaled": clip_scaled,
    "clip_twice": clip_twice,
}
Cell = tuple[str, Shape, str]


@dataclass(frozen=True)
class Row(report.Clocked):
    """A contender's figures in a cell; if it was wrong or failed, empty with a reason.

    ``ratio`` is the median ratio to stock's sample of the same turn, and ``range`` the range of
    most of these ratios. Memory is in MiB.
    """

    shape: str
    dtype: str
    loss: str
    contender: str
    ms: str
    ratio: str
    range: str
    peak_mib: str
    plan: str
    reason: str
    contender_version: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.device, self.shape, self.dtype, self.loss, self.contender

    @property
    def panel(self) -> tuple[str, ...]:
        """What one plot against the number of pairs is of."""
        return self.loss, self.dtype, f"{Shape.parse(self.shape).width} numbers each"

    @property
    def pairs(self) -> int:
        return Shape.parse(self.shape).pairs


class Problem:
    """Inputs of one cell, and their loss and gradients in a wider dtype."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        name, shape, dtype = cell
        self.loss, self.dtype, self.device = LOSSES[name], DTYPES[dtype], device
        self.is_checked = shape.pairs <= MOST_CHECKED[device.type]
        torch.manual_seed(0)
        image = torch.randn(shape.pairs, shape.width, device=device)
        text = image + torch.randn_like(image)
        scale, bias = torch.tensor([-math.log(TEMPERATURE), -10.0], device=device)
        self.tensors = [tensor.clone().requires_grad_() for tensor in (image, text, scale, bias)]

    def eager(self, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        narrow = self.dtype == torch.bfloat16 and image.dtype == torch.float32
        with torch.autocast(self.device.type, torch.bfloat16, enabled=narrow):
            return self.loss(F.normalize(image, dim=-1), F.normalize(text, dim=-1), scale, bias)

    @cached_property
    def expected(self) -> list[Tensor]:
        return self._results(self.eager, torch.float64)

    @property
    def allowed(self) -> list[float]:
        if not self.is_checked:
            return []
        # Terms of the scale's gradient cancel, so that torch's own error may be small by chance.
        least = LEAST_ULPS * torch.finfo(self.dtype).eps
        return [max(2 * error, least) for error in self.errors(self.eager)]

    def _results(self, step: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in self.tensors]
        value = step(*leaves)
        value.backward()
        return [value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def errors(self, step: Callable[..., Tensor]) -> list[float]:
        """The errors of the loss and the gradients; none of many pairs, of which the step runs."""
        leave_memory()
        results = self._results(step, torch.float32)
        if not self.is_checked:
            return []
        pairs = zip(results, self.expected, strict=True)
        return [linear_steps.relative_error(*pair) for pair in pairs]

    def next_call(self, step: Callable[..., Tensor]) -> Call:
        for tensor in self.tensors:
            tensor.grad = None
        return partial(self._step, step)

    def _step(self, step: Callable[..., Tensor]) -> Tensor:
        value = step(*self.tensors)
        value.backward()
        return value.detach()


#: The options of each contender, for stock None.
CONTENDERS: dict[str, dict[str, bool] | None] = {
    "stock": None,
    "ours": {},
    "ours_memory": {"prefer_memory": True},
}


def _compiled(problem: Problem, name: str) -> Callable[..., Tensor]:
    options = CONTENDERS[name]
    if options is None:
        return torch.compile(problem.eager)
    return torch.compile(problem.eager, backend="compile_losses", options=options)


def _plan(problem: Problem, options: dict[str, bool]) -> str:
    """The report of explain on each loss; empty where explain, which runs the loss without a
    compiler, has too little memory."""
    from compile_losses.report.explanation import explain_call

    try:
        sites = explain_call(problem.eager, tuple(problem.tensors), options=options).sites
    except torch.OutOfMemoryError:
        return ""
    return "; ".join(dict.fromkeys(", ".join(site.plan) for site in sites if site.plan))


class ContrastiveWorker(Worker[Cell]):
    def compile(self, cell: Cell) -> None:
        problem = self._problem(cell)
        for name in self.arguments.contender:
            problem.next_call(_compiled(problem, name))()

    def _problem(self, cell: Cell) -> Problem:
        torch._dynamo.reset()
        return Problem(cell, self.clock.device)

    def measure(self, cell: Cell) -> Figures:
        with self.alone:
            names, budget_s = self.arguments.contender, self.arguments.budget
            try:
                return measure(self._problem(cell), names, self.clock, budget_s)
            finally:
                torch._dynamo.reset()  # free memory for the next process

    def failed(self, reason: str) -> Figures:
        return {name: {"reason": reason} for name in self.arguments.contender}


def measure(
    problem: Problem, names: Sequence[str], clock: Clock, budget_s: float
) -> dict[str, dict[str, str]]:
    """The figures of the contenders, in their order."""
    builders = {name: partial(_compiled, problem, name) for name in names}

    def plan(name: str) -> str | None:
        options = CONTENDERS[name]
        return None if options is None else _plan(problem, options)

    return linear_steps.figures_of(builders, problem, problem.allowed, clock, budget_s, plan)


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    output: Path = arguments.output or report.default_output(device, "contrastive")
    table = report.kept(output, Row, append=arguments.append)
    cells = list(product(arguments.loss, arguments.shape, arguments.dtype))
    broken = False
    print(f"{'cell':<48}{'ms':>9}{'ratio':>8}{'range':>13}{'MiB':>8}  plan")
    with all_figures(ContrastiveWorker, arguments, cells) as measured:
        for (loss, shape, dtype), found in measured:
            stock_is_short = OUT_OF_MEMORY in found.get("stock", {}).get("reason", "")
            for name in arguments.contender:
                known = {
                    **provenance(arguments, device),
                    **{"loss": loss, "shape": str(shape)},
                    **{"dtype": dtype, "contender": name},
                    "contender_version": version_of(
                        "torch" if name == "stock" else "compile_losses"
                    ),
                    **found[name],
                }
                row = report.row_of(Row, known)
                table[row.key] = row
                # Where stock has too little memory, ours may have.
                is_short = OUT_OF_MEMORY in row.reason and stock_is_short
                broken |= name.startswith("ours") and bool(row.reason) and not is_short
                print(
                    f"{f'{shape} {dtype} {loss} {name}':<48}{row.ms:>9}{row.ratio:>8}"
                    f"{row.range:>13}{row.peak_mib:>8}  {row.plan}{row.reason}",
                    flush=True,
                )
            report.write(output, Row, table.values())
    print(f"wrote {output}")
    if arguments.plots:
        plots.draw(output)
    return int(broken)


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    parser = commands.add_parser(
        "contrastive", help="losses of all pairs of two batches", description=__doc__
    )
    choose = partial(parser.add_argument, nargs="+", help="default: all")
    choose("--loss", choices=LOSSES, default=list(LOSSES))
    choose("--contender", choices=CONTENDERS, default=list(CONTENDERS))
    cuda = torch.cuda.is_available()
    shape = Shape(16_384, 512) if cuda else Shape(2048, 256)
    parser.add_argument(
        "--shape", type=Shape.parse, nargs="+", default=[shape], help=f"PAIRSxWIDTH ({shape})"
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=["bfloat16" if cuda else "float32"]
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile (1)")
    add_options(parser, 0.5, append=True)
    parser.add_argument("--no-plots", dest="plots", action="store_false")
