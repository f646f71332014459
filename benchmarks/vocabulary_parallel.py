"""A vocabulary-parallel training step of a language model's head: time and peak memory a rank.

Hidden [rows, hidden] is on every rank; the head's weight [classes, hidden] is sharded by classes. A
step is the head, the loss and the gradients of hidden and weight. Contenders of the mean cross
entropy:

ours           ``F.linear`` and ``compile_losses.functional.cross_entropy`` of DTensors
ours_linear    ``compile_losses.functional.linear_cross_entropy`` of DTensors: no logits are held
ours_compiled  torch's functions in a step compiled with ``backend="compile_losses"``
loss_parallel  ``F.cross_entropy`` in torch's context ``loss_parallel``
megatron       Megatron-LM's scheme in torch's ops: three all-reduces, and the softmax saved

Contenders of ``log_probs``, a loss of the log-probability and the entropy of each row, as PPO and
GRPO take them:

ours_log_probs            ``compile_losses.linear_log_probs`` of DTensors: no logits are held
ours_log_probs_compiled   the same in a step compiled with ``backend="compile_losses"``
ours_log_probs_of_logits  ``F.linear``, then ``selective_log_softmax`` and ``softmax_entropy``
dtensor_log_probs         ``F.log_softmax`` of the logits of all classes, gathered as DTensors
megatron_log_probs        Megatron-LM's and verl's scheme in torch's ops: four all-reduces, and the
                          softmax saved

Contenders of ``divergence``, the Kullback-Leibler divergence from a teacher's layer of twice the
features, sharded alike, at a temperature of 2:

ours_divergence            ``compile_losses.linear_softmax_kl_div`` of DTensors: no logits are held
ours_divergence_compiled   the same in a step compiled with ``backend="compile_losses"``
ours_divergence_of_logits  two ``F.linear``, then ``softmax_kl_div``
dtensor_divergence         ``F.kl_div`` of the logits of all classes, gathered as DTensors
megatron_divergence        Megatron-LM's scheme in torch's ops: five all-reduces, and both softmaxes
                           saved

Every contender is first compared with float64 on every rank, over a few rows. The right ones are
timed in turns; a sample is the step of the slowest rank. Peak memory is the largest of all ranks:
above the memory in use before the step, less the gradients of hidden and of the rank's part of the
weight, as in ``python -m benchmarks linear``. If a contender fails on any rank, all ranks leave it
out and go on with the others.

Rank 0 writes ``benchmarks/results/vocabulary-parallel-DEVICE.csv`` and a plot beside it::

    torchrun --nproc-per-node 2 -m benchmarks.vocabulary_parallel --shape 8192x4096x128256
    torchrun --nproc-per-node 4 -m benchmarks.vocabulary_parallel --append
    torchrun --nproc-per-node 2 -m benchmarks.vocabulary_parallel --loss log_probs --append
    torchrun --nproc-per-node 2 -m benchmarks.vocabulary_parallel --loss divergence --append
    torchrun --nproc-per-node 2 -m benchmarks.vocabulary_parallel --shape 64x16x1000 --check
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import compile_losses
import compile_losses.functional as fused
from benchmarks import linear_steps, plots, report
from benchmarks.clock import Call, Clock, make_clock, time_in_turns
from benchmarks.contenders import version_of
from benchmarks.linear_steps import Row, Shape
from benchmarks.options import DTYPES, provenance
from benchmarks.ranks import FailedError, Ranks

Step = Callable[..., Any]  # of the tensors of its loss, see LOSSES
SHAPES = (Shape(8192, 4096, 128_256),)
TEMPERATURE = 2.0
CHECKED_ROWS = 64  # in the check the whole weight is on every rank, in float64


def ours(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    return fused.cross_entropy(F.linear(hidden, weight), target)


def stock(hidden: Any, weight: Any, target: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def policy(log_probs: Any, entropy: Any) -> Any:
    """A loss of tokens: the log-likelihood and a bonus for entropy."""
    return -(log_probs + 0.1 * entropy).mean()


def ours_log_probs(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    log_probs, entropy = compile_losses.linear_log_probs(
        hidden, weight, target, return_entropy=True
    )
    return policy(log_probs, entropy)


def ours_log_probs_of_logits(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return policy(fused.selective_log_softmax(logits, target), fused.softmax_entropy(logits))


def stock_log_probs(hidden: Any, weight: Any, target: Any) -> Tensor:
    return _stock_policy(F.linear(hidden, weight), target)


def gathered_log_probs(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    logits: Any = F.linear(hidden, weight)
    # Torch 2.13 differentiates the gather of sharded classes to a gradient of another shape.
    return _stock_policy(logits.redistribute(placements=[Replicate()]), target)


def _stock_policy(logits: Any, target: Any) -> Tensor:
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    logarithms = F.log_softmax(logits, -1)
    log_probs = logarithms.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return policy(log_probs, -(logarithms.exp() * logarithms).sum(-1))


def _softened(logits: Any) -> Any:
    """The logits over the temperature; what torch computes of bfloat16 is in float32."""
    return (logits.float() if logits.dtype == torch.bfloat16 else logits) / TEMPERATURE


def ours_divergence(hidden: DTensor, weight: DTensor, taught: DTensor, teacher: DTensor) -> Tensor:
    return compile_losses.linear_softmax_kl_div(
        hidden, weight, taught, target_weight=teacher, temperature=TEMPERATURE
    )


def ours_divergence_of_logits(
    hidden: DTensor, weight: DTensor, taught: DTensor, teacher: DTensor
) -> Tensor:
    logits, target = F.linear(hidden, weight), F.linear(taught, teacher)
    return fused.softmax_kl_div(logits, target, "batchmean", temperature=TEMPERATURE)


def stock_divergence(hidden: Any, weight: Any, taught: Any, teacher: Any) -> Tensor:
    return _stock_divergence(F.linear(hidden, weight), F.linear(taught, teacher))


def gathered_divergence(
    hidden: DTensor, weight: DTensor, taught: DTensor, teacher: DTensor
) -> Tensor:
    pair: list[Any] = [F.linear(hidden, weight), F.linear(taught, teacher)]
    return _stock_divergence(*(logits.redistribute(placements=[Replicate()]) for logits in pair))


def _stock_divergence(logits: Any, target: Any) -> Tensor:
    logarithms, wanted = (F.log_softmax(_softened(each), -1) for each in (logits, target))
    return F.kl_div(logarithms, wanted, reduction="batchmean", log_target=True)


def _megatron_softmax(
    logits: Tensor, target: Tensor, first: int, group: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of a rank's own logits, by three all-reduces: softmax; the logarithm of its divisor; the
    target's logit and the largest, from which both count; the target's index and whether another
    rank has it."""
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    largest = wide.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    wide = wide - largest.unsqueeze(-1)
    elsewhere = (target < first) | (target >= first + wide.shape[-1])
    index = (target - first).masked_fill(elsewhere, 0)
    picked = wide.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
    dist.all_reduce(picked, group=group)
    softmax = wide.exp()
    total = softmax.sum(-1)
    dist.all_reduce(total, group=group)
    softmax.div_(total.unsqueeze(-1))
    return softmax, total.log(), picked, largest, index, elsewhere


class Megatron(torch.autograd.Function):
    """Shoeybi et al., Megatron-LM, 2019: the cross entropy of a rank's own logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int, group: Any) -> Tensor:
        softmax, logarithm, picked, _, index, elsewhere = _megatron_softmax(
            logits, target, first, group
        )
        ctx.save_for_backward(softmax, index, elsewhere)
        ctx.dtype = logits.dtype
        return (logarithm - picked).mean()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        gradient, index, elsewhere = ctx.saved_tensors
        rows = torch.arange(len(index), device=index.device)
        gradient[rows, index] -= 1 - elsewhere.to(gradient.dtype)
        return gradient.mul_(grad_output / len(index)).to(ctx.dtype), None, None, None


class MegatronLogProbs(torch.autograd.Function):
    """The log-probabilities, and the entropies as verl's vocab_parallel_entropy computes them."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, first: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        softmax, logarithm, picked, largest, index, elsewhere = _megatron_softmax(
            logits, target, first, group
        )
        mean = (softmax * logits).sum(-1)
        dist.all_reduce(mean, group=group)
        ctx.save_for_backward(softmax, logits, mean, index, elsewhere)
        return picked - logarithm, largest + logarithm - mean

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> Any:
        softmax, logits, mean, index, elsewhere = ctx.saved_tensors
        gradient = (mean.unsqueeze(-1) - logits).mul_(grad_entropy.unsqueeze(-1))
        gradient.sub_(grad_log_probs.unsqueeze(-1)).mul_(softmax)
        rows = torch.arange(len(index), device=index.device)
        gradient[rows, index] += grad_log_probs.masked_fill(elsewhere, 0)
        return gradient.to(logits.dtype), None, None, None


class MegatronDivergence(torch.autograd.Function):
    """The mean divergence from the target's softmax to that of a rank's own logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        logarithms = []
        for each in (logits, target):
            wide = _softened(each)
            largest = wide.amax(-1, keepdim=True)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            wide = wide - largest
            total = wide.exp().sum(-1, keepdim=True)
            dist.all_reduce(total, group=group)
            logarithms.append(wide.sub_(total.log_()))
        probs, wanted = (each.exp() for each in logarithms)
        loss = (wanted * (logarithms[1] - logarithms[0])).sum() / len(logits)
        dist.all_reduce(loss, group=group)
        ctx.save_for_backward(probs, wanted)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        probs, wanted = ctx.saved_tensors
        factor = grad_output / (len(probs) * TEMPERATURE)
        return probs.sub_(wanted).mul_(factor).to(ctx.dtype), None, None


def _own_logits(hidden: DTensor, weight: DTensor, target: DTensor) -> tuple[Any, ...]:
    """A rank's own logits, and the other arguments of Megatron's functions."""
    mesh = weight.device_mesh
    # The gradient of a replicated tensor is a part of the whole gradient.
    own = hidden.to_local(grad_placements=[Partial()])
    _, first = Shard.local_shard_size_and_offset(
        weight.shape[0], mesh.size(), mesh.get_local_rank()
    )
    return F.linear(own, weight.to_local()), target.to_local(), first, mesh.get_group()


def megatron(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    return Megatron.apply(*_own_logits(hidden, weight, target))


def megatron_log_probs(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    return policy(*MegatronLogProbs.apply(*_own_logits(hidden, weight, target)))


def megatron_divergence(
    hidden: DTensor, weight: DTensor, taught: DTensor, teacher: DTensor
) -> Tensor:
    # The gradient of a replicated tensor is a part of the whole gradient.
    own = F.linear(hidden.to_local(grad_placements=[Partial()]), weight.to_local())
    target = F.linear(taught.to_local(), teacher.to_local())
    return MegatronDivergence.apply(own, target, weight.device_mesh.get_group())


#: The losses, on one device: of hidden, weight and the labels or, of a divergence, the teacher's
#: hidden and weight.
LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": stock,
    "log_probs": stock_log_probs,
    "divergence": stock_divergence,
}


@dataclass(frozen=True)
class Contender:
    build: Callable[[], Step]
    package: str
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which the step runs
    loss: str = "cross_entropy"


def _compiled(function: Step) -> Step:
    # The check has fewer rows than the timed step, which would be compiled for any number of rows.
    return torch.compile(function, backend="compile_losses", dynamic=False)


def _of_log_probs(build: Callable[[], Step], package: str) -> Contender:
    return Contender(build, package, loss="log_probs")


def _of_divergence(build: Callable[[], Step], package: str) -> Contender:
    return Contender(build, package, loss="divergence")


CONTENDERS: dict[str, Contender] = {
    "ours": Contender(lambda: ours, "compile_losses"),
    "ours_linear": Contender(lambda: fused.linear_cross_entropy, "compile_losses"),
    "ours_compiled": Contender(lambda: _compiled(stock), "compile_losses"),
    "loss_parallel": Contender(lambda: stock, "torch", loss_parallel),
    "megatron": Contender(lambda: megatron, "torch"),
    "ours_log_probs": _of_log_probs(lambda: ours_log_probs, "compile_losses"),
    "ours_log_probs_compiled": _of_log_probs(lambda: _compiled(ours_log_probs), "compile_losses"),
    "ours_log_probs_of_logits": _of_log_probs(lambda: ours_log_probs_of_logits, "compile_losses"),
    "dtensor_log_probs": _of_log_probs(lambda: gathered_log_probs, "torch"),
    "megatron_log_probs": _of_log_probs(lambda: megatron_log_probs, "torch"),
    "ours_divergence": _of_divergence(lambda: ours_divergence, "compile_losses"),
    "ours_divergence_compiled": _of_divergence(
        lambda: _compiled(ours_divergence), "compile_losses"
    ),
    "ours_divergence_of_logits": _of_divergence(
        lambda: ours_divergence_of_logits, "compile_losses"
    ),
    "dtensor_divergence": _of_divergence(lambda: gathered_divergence, "torch"),
    "megatron_divergence": _of_divergence(lambda: megatron_divergence, "torch"),
}


class Problem:
    """A step's tensors, the same on every rank; also the results of its losses in float64.

    ``layers`` has the student's hidden states and weight and, if a loss is a divergence, the
    teacher's. Of weights a rank has its own part.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, ranks: Ranks, losses: Collection[str], exact: bool
    ) -> None:
        self.shape, self.ranks, device = shape, ranks, ranks.device
        generator = torch.Generator(device).manual_seed(0)
        size, first = Shard.local_shard_size_and_offset(shape.classes, ranks.count, ranks.rank)

        def layer(features: int) -> tuple[Tensor, Tensor]:
            plain = torch.randn(
                shape.rows, features, dtype=dtype, device=device, generator=generator
            )
            # Drawn in parts, so that no rank holds the whole weight unless it is to be checked.
            parts = []
            for begin in range(0, shape.classes, 1024):
                part = torch.randn(1024, features, device=device, generator=generator)
                part = part[: shape.classes - begin].div_(features**0.5).to(dtype)
                low, high = max(first - begin, 0), max(first + size - begin, 0)
                parts.append(part if exact else part[low:high])
            return plain, torch.cat(parts)

        layers = [layer(shape.hidden)]
        self.labels = torch.randint(
            shape.classes, (shape.rows,), device=device, generator=generator
        )
        if "divergence" in losses:
            layers.append(layer(2 * shape.hidden))
        own = slice(first, first + size) if exact else slice(None)
        self.layers = [(plain, weight[own]) for plain, weight in layers]
        self.exact: dict[str, tuple[Tensor, ...]] = {}
        self.allowed: dict[str, list[float]] = {}
        for name in losses if exact else ():
            wide = [(plain.double(), weight.double()) for plain, weight in layers]
            self.exact[name] = self._gradients(name, wide, own)
            eager = self._gradients(name, layers, own)
            self.allowed[name] = linear_steps.allowed_errors(self._errors(name, eager), dtype)
        self.place()

    def _arguments(self, loss: str, layers: list[Any], labels: Any) -> tuple[Any, ...]:
        return (*layers[0], *layers[1]) if loss == "divergence" else (*layers[0], labels)

    def _gradients(
        self, name: str, layers: list[tuple[Tensor, Tensor]], own: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """On one device: the loss, hidden's gradient and a rank's part of the weight's gradient."""
        hidden, weight = (tensor.detach().requires_grad_() for tensor in layers[0])
        student = [(hidden, weight), *layers[1:]]
        loss = LOSSES[name](*self._arguments(name, student, self.labels))
        of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
        return loss.detach(), of_hidden, of_weight[own].clone()

    def place(self) -> None:
        """Makes DTensors on the ranks' mesh, which changes after a failure."""
        mesh, classes = self.ranks.mesh, self.shape.classes

        def placed(plain: Tensor, own: Tensor) -> tuple[DTensor, DTensor]:
            features = own.shape[1]
            weight = DTensor.from_local(
                own,
                mesh,
                [Shard(0)],
                shape=torch.Size((classes, features)),
                stride=(features, 1),
            )
            return DTensor.from_local(plain, mesh, [Replicate()]), weight

        self.placed = [placed(*layer) for layer in self.layers]
        self.hidden, self.weight = (tensor.requires_grad_() for tensor in self.placed[0])
        self.target = DTensor.from_local(self.labels, mesh, [Replicate()])

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def step(self, name: str, loss: Step) -> Any:
        contender = CONTENDERS[name]
        with contender.context():
            value = loss(*self._arguments(contender.loss, self.placed, self.target))
            value.backward()
        return value.detach()

    def next_call(self, name: str, loss: Step) -> Call:
        self.clear()
        return partial(self.step, name, loss)

    def complaint(self, name: str, value: Any) -> str:
        """Why a step's result is wrong; empty if it is not."""
        value = value.full_tensor() if isinstance(value, DTensor) else value
        found = (value, self.hidden.grad.full_tensor(), self.weight.grad.to_local())
        loss = CONTENDERS[name].loss
        return linear_steps.complaint(self._errors(loss, found), self.allowed[loss])

    def _errors(self, loss: str, found: tuple[Tensor, ...]) -> list[float]:
        pairs = zip(found, self.exact[loss], strict=True)
        return [linear_steps.relative_error(*pair) for pair in pairs]


def measure(
    shape: Shape,
    names: list[str],
    ranks: Ranks,
    clock: Clock | None,
    budget_s: float,
    common: dict[str, str],
) -> list[Row]:
    """Figures of the contenders, in their order; without a clock they are only checked."""
    dtype = DTYPES[common["dtype"]]
    losses = dict.fromkeys(CONTENDERS[name].loss for name in names)
    few = Problem(replace(shape, rows=CHECKED_ROWS), dtype, ranks, losses, exact=True)
    problem = few if clock is None else Problem(shape, dtype, ranks, losses, exact=False)
    ready: dict[str, Callable[[], Call]] = {}
    rows: dict[str, Row] = {}
    for name in names:
        contender = CONTENDERS[name]
        try:
            loss = ranks.together(contender.build)
            value = ranks.together(few.next_call(name, loss))
            reason = ranks.agreed(ranks.together(partial(few.complaint, name, value)))
            if not reason:
                ranks.together(problem.next_call(name, loss))
                ready[name] = partial(problem.next_call, name, loss)
        except FailedError as error:
            reason = str(error)
            few.place()
            problem.place()
        problem.clear()
        rows[name] = Row(
            contender=name, reason=reason, contender_version=version_of(contender.package), **common
        )
    del few
    if clock is None:
        return list(rows.values())
    gradients = problem.layers[0]
    times = time_in_turns(list(ready.values()), clock, budget_s, ranks.largest)
    for name, samples in zip(ready, times, strict=True):
        peak = ranks.largest(linear_steps.peak_beside(ready[name], gradients, clock))
        rows[name] = rows[name].timed(samples, peak)
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="torchrun -m benchmarks.vocabulary_parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    linear_steps.add_step_options(parser, CONTENDERS)
    parser.add_argument(
        "--loss", nargs="+", choices=LOSSES, default=list(LOSSES), help="whose contenders (all)"
    )
    parser.add_argument("--check", action="store_true", help="only compare with float64")
    parser.add_argument(
        "--timeout", type=float, default=180.0, help="seconds that a rank waits for others (180)"
    )
    arguments = parser.parse_args()
    ranks = Ranks(arguments.device, arguments.timeout)
    try:
        return run(arguments, ranks)
    finally:
        dist.destroy_process_group()


def run(arguments: argparse.Namespace, ranks: Ranks) -> int:
    """1 on every rank if a contender of this package is wrong or fails."""
    device, first = ranks.device, ranks.rank == 0
    clock = None if arguments.check else make_clock(device)
    output: Path = arguments.output or report.default_output(device, "vocabulary-parallel")
    results = linear_steps.Results(output, append=arguments.append)
    common = {**provenance(arguments, device), "dtype": arguments.dtype, "ranks": str(ranks.count)}
    if first:
        print(linear_steps.HEADER, flush=True)
    names = [n for n in arguments.contender if CONTENDERS[n].loss in arguments.loss]
    for shape in arguments.shape or SHAPES:
        torch._dynamo.reset()
        rows = measure(
            shape, names, ranks, clock, arguments.budget,
            {**common, "shape": str(shape)},
        )  # fmt: skip
        results.add(rows, write=first and clock is not None)
        if first:
            print(*rows, sep="\n", flush=True)
        gc.collect()
    if first and clock is not None:
        print(f"wrote {output}")
        if arguments.plots:
            plots.draw(output)
    return int(results.broken)


if __name__ == "__main__":
    raise SystemExit(main())
