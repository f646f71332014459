"""Losses of tokens over a language model's head: time, peak memory and the chosen plan.

``python -m benchmarks tokens`` compiles each loss and its linear layer with stock torch.compile,
with this package, and with this package and ``prefer_memory``. Where this package has a function
for loss and layer, it is called as well, and where Liger has one. The loss and the gradients are
checked against float32 or float64. All contenders are timed in turns, and the peak memory is
measured that each allocates above its inputs, gradients included. ``mean``, the mean linear cross
entropy, is the standard of comparison: it needs three products of matrices. In a ``frozen`` head
the weight needs no gradient. An ``adapted`` head is a frozen one with a trained adapter of low rank
(LoRA). ``--sweep classes`` and ``--sweep rows`` measure and draw time and memory against that size.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import linear_steps, plots, report
from benchmarks.clock import Call, Clock
from benchmarks.contenders import UnavailableError, version_of
from benchmarks.linear_steps import Shape
from benchmarks.options import DTYPES, add_options, provenance
from benchmarks.workers import Figures, Worker, all_figures

SEQUENCES = 8
HEADS = ("trained", "frozen", "adapted")
#: Of an adapter, and the factor of its product.
RANK, ALPHA = 16, 2.0
MOST_ROWS = 16_384
Cell = tuple[str, str, Shape]  # loss, head, shape
#: The clipping of a ratio of log-probabilities, as in PPO.
CLIP = 0.2
#: The factor of a z-loss, as in PaLM.
Z_LOSS = 1e-4


@dataclass(frozen=True)
class Batch:
    """The inputs of a loss beside the logits."""

    target: Tensor  # [sequences, tokens]; mask and old are, too
    mask: Tensor
    old: Tensor  # log-probabilities
    advantages: Tensor  # [sequences, 1]


def _float32(logits: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities as TRL computes them from float32 logits."""
    logits = logits.float()
    picked = torch.gather(logits, -1, target.unsqueeze(-1)).squeeze(-1)
    return picked - torch.stack([torch.logsumexp(sample, dim=-1) for sample in logits])


def _narrow(logits: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities as TRL computes them from bfloat16 logits."""
    rows = []
    for sample, labels in zip(logits, target, strict=True):
        all_classes = F.log_softmax(sample, dim=-1)
        rows.append(all_classes.gather(-1, labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return -losses.view(target.shape)


LogProbs = Callable[[Tensor, Tensor], Tensor]


def mean(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch.target.flatten())


def z_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The mean with the z-loss of Chowdhery et al., 2022, which needs float32."""
    return mean(logits, batch) + Z_LOSS * logits.float().logsumexp(-1).square().mean()


def masked_mean(logits: Tensor, batch: Batch) -> Tensor:
    return -(_cross_entropy(logits, batch.target) * batch.mask).sum() / batch.mask.sum()


def grpo(log_probs: LogProbs, logits: Tensor, batch: Batch) -> Tensor:
    """GRPO of Shao et al., 2024, without the divergence from a reference."""
    ratio = torch.exp(log_probs(logits, batch.target) - batch.old)
    clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
    losses = -torch.min(ratio * batch.advantages, clipped * batch.advantages)
    return ((losses * batch.mask).sum(-1) / batch.mask.sum(-1)).mean()


def dpo(log_probs: LogProbs, logits: Tensor, batch: Batch) -> Tensor:
    """DPO of Rafailov et al., 2023: the first half of the sequences is preferred to the second."""
    ratios = ((log_probs(logits, batch.target) - batch.old) * batch.mask).sum(-1)
    chosen, rejected = ratios.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def ppo_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """A clipped ratio and a bonus for entropy, as verl computes them from float32 logits."""
    logits = logits.float()
    entropy = torch.logsumexp(logits, -1) - (F.softmax(logits, -1) * logits).sum(-1)
    bonus = (entropy * batch.mask).sum(-1) / batch.mask.sum(-1)
    return grpo(_float32, logits, batch) - 0.01 * bonus.mean()


def accuracy(logits: Tensor, batch: Batch) -> Tensor:
    """The mean, with the token accuracy and the entropy that fine-tuning logs added to it."""
    loss = mean(logits, batch)
    with torch.no_grad():
        entropy = -(F.softmax(logits, -1) * F.log_softmax(logits, -1)).sum(-1).float()
        hits = (logits.argmax(-1) == batch.target).float()
    return loss + hits.mean() + entropy.mean()


def clamped(logits: Tensor, batch: Batch) -> Tensor:
    return mean(logits.clamp(-30, 30), batch)


def margin(logits: Tensor, batch: Batch) -> Tensor:
    """Additive margin softmax of Wang et al., 2018, of logits that are cosines."""
    own = F.one_hot(batch.target, logits.shape[-1]).to(logits.dtype)
    return mean(8 * (logits - 0.35 * own), batch)


def penalised(logits: Tensor, batch: Batch) -> Tensor:
    """With a penalty on the sum of squared probabilities."""
    squares = F.softmax(logits.float(), -1).square().sum(-1)
    losses = 0.1 * squares - _cross_entropy(logits, batch.target)
    return (losses * batch.mask).sum() / batch.mask.sum()


def hinge(logits: Tensor, batch: Batch) -> Tensor:
    """The sum over classes of Weston and Watkins, 1999: no softmax."""
    own = logits.gather(-1, batch.target.unsqueeze(-1))
    return (F.relu(1 + logits - own).float().sum(-1) * batch.mask).mean()


LOSSES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "mean": mean,
    "z_loss": z_loss,
    "masked_mean": masked_mean,
    "grpo_float32": partial(grpo, _float32),
    "grpo_bfloat16": partial(grpo, _narrow),
    "grpo_cross_entropy": partial(grpo, _cross_entropy),
    "dpo_float32": partial(dpo, _float32),
    "dpo_cross_entropy": partial(dpo, _cross_entropy),
    "ppo_entropy": ppo_entropy,
    "accuracy": accuracy,
    "clamped": clamped,
    "margin": margin,
    "penalised": penalised,
    "hinge": hinge,
}


@dataclass(frozen=True)
class Row(report.Clocked):
    """A contender's figures in a cell; if it was wrong or failed, empty with a reason.

    ``ratio`` is the median ratio to stock's sample of the same turn, and ``range`` the range of
    most of these ratios. Memory is in MiB.
    """

    shape: str
    dtype: str
    head: str
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
        return self.device, self.shape, self.dtype, self.head, self.loss, self.contender


class Problem:
    """Inputs of one cell, and their loss and gradients in a wider dtype."""

    def __init__(self, cell: Cell, dtype: torch.dtype, device: torch.device) -> None:
        name, head, shape = cell
        self.loss = LOSSES[name]
        torch.manual_seed(0)
        size = SEQUENCES, shape.rows // SEQUENCES
        self.hidden = torch.randn(*size, shape.hidden, device=device).to(dtype).requires_grad_()
        weight = torch.randn(shape.classes, shape.hidden, device=device)
        self.weight = weight.div_(shape.hidden**0.5).to(dtype).requires_grad_(head == "trained")
        sizes = [(RANK, shape.hidden), (shape.classes, RANK)] if head == "adapted" else []
        self.adapter = [
            torch.randn(*size, device=device).div_(size[1] ** 0.5).to(dtype).requires_grad_()
            for size in sizes
        ]
        target = torch.randint(shape.classes, size, device=device)
        with torch.no_grad():
            now = [
                _cross_entropy(F.linear(sample, self.weight).float()[None], labels[None])
                for sample, labels in zip(self.hidden, target, strict=True)
            ]
        self.batch = Batch(
            target,
            (torch.rand(size, device=device) > 0.2).float(),
            torch.cat(now) + 0.2 * torch.randn(size, device=device),
            torch.randn(SEQUENCES, 1, device=device),
        )

    @cached_property
    def expected(self) -> list[Tensor]:
        narrow = self.hidden.dtype
        return self._results(
            self.eager, torch.float64 if narrow == torch.float32 else torch.float32
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.hidden, self.weight, *self.adapter

    def eager(self, hidden: Tensor, weight: Tensor, batch: Batch, *adapter: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)
        if adapter:
            inner, outer = adapter
            logits = logits + ALPHA * F.linear(F.linear(hidden, inner), outer)
        return self.loss(logits, batch)

    def _results(self, step: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in self.tensors]
        value = self.value(step, leaves, self.batch)
        value.backward()
        return [value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    @staticmethod
    def value(step: Callable[..., Tensor], tensors: Sequence[Tensor], batch: Batch) -> Tensor:
        hidden, weight, *adapter = tensors
        return step(hidden, weight, batch, *adapter)

    def errors(self, step: Callable[..., Tensor]) -> list[float]:
        """The errors of the loss and the gradients."""
        results = self._results(step, self.hidden.dtype)
        return [
            linear_steps.relative_error(*pair) for pair in zip(results, self.expected, strict=True)
        ]

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.grad = None

    def next_call(self, step: Callable[..., Tensor]) -> Call:
        self.clear()
        return partial(self._step, step)

    def _step(self, step: Callable[..., Tensor]) -> Tensor:
        value = self.value(step, self.tensors, self.batch)
        value.backward()
        return value.detach()


def _stock(problem: Problem) -> Callable[..., Tensor]:
    return torch.compile(problem.eager)


def _ours(problem: Problem, prefer_memory: bool) -> Callable[..., Tensor]:
    options = {"prefer_memory": prefer_memory}
    return torch.compile(problem.eager, backend="compile_losses", options=options)


def _z_loss_of(problem: Problem) -> float:
    """The factor of the z-loss of a mean cross entropy."""
    factors = {mean: 0.0, z_loss: Z_LOSS}
    if problem.loss not in factors or problem.adapter:
        raise UnavailableError("not of this loss and head")
    return factors[problem.loss]


def _called(problem: Problem) -> Callable[..., Tensor]:
    factor = _z_loss_of(problem)
    from compile_losses.linear import linear_cross_entropy

    def step(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
        return linear_cross_entropy(hidden, weight, batch.target, z_loss=factor)

    return step


def _liger(problem: Problem) -> Callable[..., Tensor]:
    if isinstance(problem.loss, partial) and problem.loss.func is grpo and not problem.adapter:
        return _liger_grpo()
    factor = _z_loss_of(problem)
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(lse_square_scale=factor)

    def step(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
        value: Tensor = loss(weight, hidden.flatten(0, 1), batch.target.flatten())
        return value

    return step


def _liger_grpo() -> Callable[..., Tensor]:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, epsilon_low=CLIP, epsilon_high=CLIP, loss_type="grpo", use_ref_model=False
    )

    def step(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
        value, *_ = loss(
            hidden,
            weight,
            batch.target,
            batch.mask,
            batch.advantages.squeeze(-1),
            old_per_token_logps=batch.old,
        )
        return value

    return step


BUILDERS: dict[str, tuple[Callable[[Problem], Callable[..., Tensor]], str]] = {
    "stock": (_stock, "torch"),
    "ours": (partial(_ours, prefer_memory=False), "compile_losses"),
    "ours_memory": (partial(_ours, prefer_memory=True), "compile_losses"),
    "ours_called": (_called, "compile_losses"),
    "liger": (_liger, "liger-kernel"),
}


def _plan(problem: Problem, options: dict[str, bool]) -> str:
    """The report of explain on each loss."""
    from compile_losses.report.explanation import explain_call

    args = problem.hidden, problem.weight, problem.batch, *problem.adapter
    plans = [site.plan for site in explain_call(problem.eager, args, options=options).sites]
    return "; ".join(dict.fromkeys(", ".join(plan) for plan in plans if plan))


class TokensWorker(Worker[Cell]):
    def _problem(self, cell: Cell) -> Problem:
        torch._dynamo.reset()
        return Problem(cell, DTYPES[self.arguments.dtype], self.clock.device)

    def compile(self, cell: Cell) -> None:
        problem = self._problem(cell)
        for name in self.arguments.contender:
            with contextlib.suppress(Exception):  # reported when it is measured
                problem.next_call(BUILDERS[name][0](problem))()

    def measure(self, cell: Cell) -> Figures:
        with self.alone:
            try:
                return measure(
                    self._problem(cell), self.arguments.contender, self.clock, self.arguments.budget
                )
            finally:
                torch._dynamo.reset()  # free memory for the next process

    def failed(self, reason: str) -> Figures:
        return {name: {"reason": reason} for name in self.arguments.contender}


def measure(
    problem: Problem, names: list[str], clock: Clock, budget_s: float
) -> dict[str, dict[str, str]]:
    """The figures of the contenders, in their order."""
    allowed = linear_steps.allowed_errors(problem.errors(problem.eager), problem.hidden.dtype)
    builders = {name: partial(BUILDERS[name][0], problem) for name in names}

    def plan(name: str) -> str | None:
        if name not in ("ours", "ours_memory"):
            return None
        return _plan(problem, {"prefer_memory": name == "ours_memory"})

    return linear_steps.figures_of(builders, problem, allowed, clock, budget_s, plan)


def _draw(rows: list[Row], path: Path) -> None:
    """Writes a figure for each kind of head."""
    for head in dict.fromkeys(row.head for row in rows):
        lines = [
            linear_steps.Row(
                shape=row.shape,
                dtype=row.dtype,
                contender=f"{row.contender}: {row.loss}",
                ms=row.ms,
                peak_mib=row.peak_mib,
                device=row.device,
                torch=row.torch,
                contender_version=row.contender_version,
                commit=row.commit,
            )
            for row in rows
            if row.head == head
        ]
        file = path.with_name(f"{path.stem}-{head}.png")
        print(f"wrote {plots.plot_steps(lines, file, plots.ABOVE_INPUTS)}")


def _shapes(arguments: argparse.Namespace) -> list[Shape]:
    if not arguments.sweep:
        return arguments.shape
    (base,) = arguments.shape
    # Without the most rows, for which stock's logits would not fit.
    return [shape for shape in base.swept(arguments.sweep) if shape.rows <= MOST_ROWS]


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    kind = f"tokens-{arguments.sweep}" if arguments.sweep else "tokens"
    output: Path = arguments.output or report.default_output(device, kind)
    table = report.kept(output, Row, append=arguments.append)
    cells = [
        (loss, head, shape)
        for shape in _shapes(arguments)
        for head in arguments.head
        for loss in arguments.loss
    ]
    broken = False
    print(f"{'cell':<52}{'ms':>9}{'ratio':>8}{'range':>13}{'MiB':>8}  plan")
    with all_figures(TokensWorker, arguments, cells) as measured:
        for (loss, head, shape), found in measured:
            for name in arguments.contender:
                known = {
                    **provenance(arguments, device),
                    **{"loss": loss, "head": head, "shape": str(shape)},
                    **{"dtype": arguments.dtype, "contender": name},
                    "contender_version": version_of(BUILDERS[name][1]),
                    **found[name],
                }
                row = report.row_of(Row, known)
                if row.reason.startswith("not run"):
                    continue
                table[row.key] = row
                broken |= name.startswith("ours") and bool(row.reason)
                print(
                    f"{f'{shape} {head} {loss} {name}':<52}{row.ms:>9}{row.ratio:>8}"
                    f"{row.range:>13}{row.peak_mib:>8}  {row.plan}{row.reason}",
                    flush=True,
                )
            report.write(output, Row, table.values())
    print(f"wrote {output}")
    if arguments.sweep:
        _draw(list(table.values()), output)
    return int(broken)


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    parser = commands.add_parser(
        "tokens", help="losses of tokens over a head, with peak memory", description=__doc__
    )
    choose = partial(parser.add_argument, nargs="+", help="default: all")
    choose("--loss", choices=LOSSES, default=list(LOSSES))
    choose("--head", choices=HEADS, default=list(HEADS))
    choose("--contender", choices=BUILDERS, default=list(BUILDERS))
    cuda = torch.cuda.is_available()
    shape = Shape(8192, 2048, 128_256) if cuda else Shape(4096, 256, 16_000)
    parser.add_argument(
        "--shape",
        type=Shape.parse,
        nargs="+",
        default=[shape],
        help=f"ROWSxHIDDENxCLASSES ({shape})",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32")
    linear_steps.add_sweep(parser)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile (1)")
    add_options(parser, 0.5, append=True)
