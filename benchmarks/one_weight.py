"""Several heads of one weight, and a draft of some classes: a step's time and peak memory.

``python -m benchmarks one_weight`` computes the losses below and their gradients with stock
torch.compile, with this package, and with this package and ``prefer_memory``. The loss and the
gradients are checked against float32 or float64. All contenders are timed in turns. ``peak_mib`` is
what a step allocates above its inputs, and ``beside_mib`` what it allocates besides its gradients.

- ``mtp``: multi-token prediction. Each depth has hidden states and labels of its own, and all read
  one weight; their mean cross entropies are added with weights.
- ``mtp_trunks``: the hidden states of each depth are made of those of the last by a small trunk.
- ``eagle``: the draft of EAGLE-3. Its head has some of the teacher's classes. Rows whose likeliest
  class is another one are left out.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import linear_steps, report
from benchmarks.clock import Call, Clock, make_clock
from benchmarks.linear_steps import Shape
from benchmarks.options import DTYPES, add_options, provenance

Step = Callable[..., Tensor]
#: Of all depths but the first together, as DeepSeek-V3 has it.
DEPTHS_WEIGHT = 0.3
#: The most classes of a draft; it has at most a fourth of the teacher's.
DRAFT_CLASSES = 32_000


@dataclass(frozen=True, kw_only=True)
class Row(linear_steps.Row):
    """With the memory besides gradients in MiB, what stock takes of both as 1, and the plan."""

    beside_mib: str = ""
    peak_ratio: str = ""
    beside_ratio: str = ""
    plan: str = ""

    def __str__(self) -> str:
        return (
            f"{super().__str__()}  peak {self.peak_ratio}, besides gradients {self.beside_mib} MiB "
            f"({self.beside_ratio})  {self.plan}"
        )


def _weighted(losses: Sequence[Tensor]) -> Tensor:
    return losses[0] + DEPTHS_WEIGHT / max(len(losses) - 1, 1) * sum(losses[1:])


def mtp(weight: Tensor, labels: Tensor, *hidden: Tensor) -> Tensor:
    pairs = zip(hidden, labels, strict=True)
    return _weighted([F.cross_entropy(F.linear(x, weight), each) for x, each in pairs])


def mtp_trunks(weight: Tensor, labels: Tensor, hidden: Tensor, *trunks: Tensor) -> Tensor:
    losses = [F.cross_entropy(F.linear(hidden, weight), labels[0])]
    for trunk, each in zip(trunks, labels[1:], strict=True):
        hidden = hidden + F.silu(F.linear(hidden, trunk))
        losses.append(F.cross_entropy(F.linear(hidden, weight), each))
    return _weighted(losses)


def eagle(
    weight: Tensor, hidden: Tensor, teacher: Tensor, taught: Tensor, d2t: Tensor, t2d: Tensor
) -> Tensor:
    """The cross entropy of a teacher's probabilities, as Li et al., 2025 train a draft."""
    with torch.no_grad():
        logits = F.linear(taught, teacher)
        counts = t2d[logits.argmax(-1)]
        probabilities = logits[..., d2t].float().softmax(-1)
    log_probs = F.linear(hidden, weight).float().log_softmax(-1)
    return -((log_probs * probabilities).sum(-1) * counts).mean()


LOSSES: Mapping[str, Step] = {"mtp": mtp, "mtp_trunks": mtp_trunks, "eagle": eagle}


class Problem:
    """A loss with its inputs, of which those that are trained get gradients."""

    def __init__(
        self, loss: str, shape: Shape, depths: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.loss = LOSSES[loss]
        rows, hidden, classes = shape.rows, shape.hidden, shape.classes

        def layer(outputs: int) -> Tensor:
            return torch.randn(outputs, hidden, device=device).div_(hidden**0.5).to(dtype)

        def states(count: int) -> list[Tensor]:
            return [torch.randn(rows, hidden, device=device).to(dtype) for _ in range(count)]

        labels = torch.randint(classes, (depths, rows), device=device)
        known: list[Tensor]
        if loss == "eagle":
            draft = min(DRAFT_CLASSES, classes // 4)
            d2t = torch.randperm(classes, device=device)[:draft].sort().values
            t2d = torch.zeros(classes, dtype=torch.bool, device=device).index_fill_(0, d2t, 1)
            trained = [layer(draft), *states(1)]
            known = [layer(classes), *states(1), d2t, t2d]
            self.inputs = [*trained, *known]
        elif loss == "mtp":
            trained = [layer(classes), *states(depths)]
            self.inputs = [trained[0], labels, *trained[1:]]
        else:
            trained = [layer(classes), *states(1), *(layer(hidden) for _ in range(depths - 1))]
            self.inputs = [trained[0], labels, *trained[1:]]
        self.trained = [tensor.requires_grad_() for tensor in trained]
        wide = torch.float64 if dtype == torch.float32 else torch.float32
        self.expected = self._results(self.loss, wide)

    def _results(self, step: Step, dtype: torch.dtype) -> list[Tensor]:
        inputs = [
            t.detach()
            .to(dtype if t.is_floating_point() else t.dtype)
            .requires_grad_(t.requires_grad)
            for t in self.inputs
        ]
        value = step(*inputs)
        return [value.detach(), *torch.autograd.grad(value, [t for t in inputs if t.requires_grad])]

    def errors(self, step: Step) -> list[float]:
        """The errors of the loss and of the gradients."""
        results = self._results(step, self.trained[0].dtype)
        pairs = zip(results, self.expected, strict=True)
        return [linear_steps.relative_error(*pair) for pair in pairs]

    def next_call(self, step: Step) -> Call:
        for tensor in self.trained:
            tensor.grad = None
        return partial(self._run, step)

    def _run(self, step: Step) -> Tensor:
        value = step(*self.inputs)
        value.backward()
        return value.detach()


def _stock(problem: Problem) -> Step:
    return torch.compile(problem.loss)


def _ours(problem: Problem, *, prefer_memory: bool) -> Step:
    options = {"prefer_memory": prefer_memory}
    return torch.compile(problem.loss, backend="compile_losses", options=options)


BUILDERS: dict[str, tuple[Callable[[Problem], Step], str]] = {
    "inductor": (_stock, "torch"),
    "ours": (partial(_ours, prefer_memory=False), "compile_losses"),
    "ours_memory": (partial(_ours, prefer_memory=True), "compile_losses"),
}


def _plan(problem: Problem, contender: str) -> str:
    """What explain reports of each loss."""
    from compile_losses.report.explanation import explain_call

    if not contender.startswith("ours"):
        return ""
    options = {"prefer_memory": contender == "ours_memory"}
    sites = explain_call(problem.loss, tuple(problem.inputs), options=options).sites
    return "; ".join(dict.fromkeys(", ".join(site.plan) or site.reason for site in sites))


def measure(loss: str, shape: Shape, clock: Clock, arguments: argparse.Namespace) -> list[Row]:
    dtype = DTYPES[arguments.dtype]
    problem = Problem(loss, shape, arguments.depths, dtype, clock.device)
    name = f"{loss} {shape}" if loss == "eagle" else f"{loss} {arguments.depths}x{shape}"
    common = provenance(arguments, clock.device) | {"dtype": arguments.dtype, "shape": name}
    builders = {
        each: (partial(build, problem), package)
        for each, (build, package) in BUILDERS.items()
        if each in arguments.contender
    }
    allowed = linear_steps.allowed_errors(problem.errors(problem.loss), dtype)
    found = linear_steps.measured(builders, problem, allowed, clock, arguments.budget, common)
    gradients = sum(tensor.nbytes for tensor in problem.trained) / (1 << 20)
    of_stock = {row.contender: row.peak_mib for row in found}.get("inductor")

    def made(row: linear_steps.Row) -> Row:
        if not row.peak_mib:
            return Row(**asdict(row))
        peak = float(row.peak_mib)
        figures = {"beside_mib": f"{peak - gradients:.1f}", "plan": _plan(problem, row.contender)}
        if of_stock:
            stock = float(of_stock)
            figures["peak_ratio"] = f"{peak / stock:.3f}"
            figures["beside_ratio"] = f"{(peak - gradients) / (stock - gradients):.3f}"
        return Row(**asdict(row), **figures)

    return [made(row) for row in found]


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    clock = make_clock(device)
    output: Path = arguments.output or report.default_output(device, "one_weight")
    table = report.kept(output, Row, append=arguments.append)
    broken = False
    print(linear_steps.HEADER)
    for loss in arguments.loss:
        rows = measure(loss, arguments.shape, clock, arguments)
        print(*rows, sep="\n", flush=True)
        table |= {row.key: row for row in rows}
        broken |= any(row.contender.startswith("ours") and row.reason for row in rows)
        report.write(output, Row, table.values())
        gc.collect()  # the next problem is as large
    print(f"wrote {output}")
    return int(broken)


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    parser = commands.add_parser(
        "one_weight", help="several heads of one weight, with peak memory", description=__doc__
    )
    choose = partial(parser.add_argument, nargs="+", help="default: all")
    choose("--loss", choices=LOSSES, default=list(LOSSES))
    choose("--contender", choices=BUILDERS, default=list(BUILDERS))
    cuda = torch.cuda.is_available()
    shape = Shape(8192, 2048, 128_256) if cuda else Shape(1024, 128, 16_000)
    parser.add_argument(
        "--shape",
        type=Shape.parse,
        default=shape,
        help=f"ROWSxHIDDENxCLASSES of each head ({shape})",
    )
    parser.add_argument("--depths", type=int, default=4, help="of multi-token prediction (4)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32")
    add_options(parser, 0.5, append=True)
