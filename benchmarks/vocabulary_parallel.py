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

Contenders of ``of_rows``, where each rank has its part of hidden's rows, as with FSDP2, and the
weight is sharded as before:

stock_gathered          the weight gathered, then torch's functions of a rank's rows, compiled
ours_gathered           the weight gathered, then ``compile_losses.functional.linear_cross_entropy``
ours_of_rows            the same op of the weight's shards: hidden is gathered, and not the weight
ours_of_logits_of_rows  hidden gathered, then ``F.linear`` and ``cross_entropy`` of a shard's logits
exchange_weight         the collectives alone: the weight's all-gather and its gradient's
                        reduce-scatter
exchange_hidden         the same of hidden

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
    torchrun --nproc-per-node 2 -m benchmarks.vocabulary_parallel --loss of_rows --append
    torchrun --nproc-per-node 2 -m benchmarks.vocabulary_parallel --shape 64x16x1000 --check
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks import linear_steps, plots, report
from benchmarks.clock import Call, Clock, make_clock, time_in_turns
from benchmarks.contenders import version_of
from benchmarks.linear_steps import Row, Shape
from benchmarks.options import DTYPES, provenance
from benchmarks.ranks import FailedError, Ranks
from benchmarks.vocabulary_parallel_contenders import CONTENDERS, LOSSES, Step

SHAPES = (Shape(8192, 4096, 128_256),)
CHECKED_ROWS = 64  # in the check the whole weight is on every rank, in float64


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

        def of_rows(plain: Tensor) -> DTensor:
            rows = plain.shape[0]
            size, first = Shard.local_shard_size_and_offset(rows, mesh.size(), self.ranks.rank)
            return DTensor.from_local(
                plain[first : first + size],
                mesh,
                [Shard(0)],
                shape=plain.shape,
                stride=plain.stride(),
            )

        self.placed = [placed(*layer) for layer in self.layers]
        self.hidden, self.weight = (tensor.requires_grad_() for tensor in self.placed[0])
        self.target = DTensor.from_local(self.labels, mesh, [Replicate()])
        self.hidden_of_rows = of_rows(self.layers[0][0]).requires_grad_()
        self.target_of_rows = of_rows(self.labels)

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = self.hidden_of_rows.grad = None

    def placed_for(self, loss: str) -> tuple[list[Any], Any]:
        """The layers and the target of a contender's loss."""
        if loss == "of_rows":
            return [(self.hidden_of_rows, self.weight)], self.target_of_rows
        return self.placed, self.target

    def gradients(self, name: str) -> list[Tensor]:
        """Tensors as large as the gradients of a rank."""
        (hidden, weight), *_ = self.placed_for(CONTENDERS[name].loss)[0]
        return [hidden.to_local(), weight.to_local()]

    def step(self, name: str, loss: Step) -> Any:
        contender = CONTENDERS[name]
        with contender.context():
            value = loss(*self._arguments(contender.loss, *self.placed_for(contender.loss)))
            value.backward()
        return value.detach()

    def next_call(self, name: str, loss: Step) -> Call:
        self.clear()
        return partial(self.step, name, loss)

    def complaint(self, name: str, value: Any) -> str:
        """Why a step's result is wrong; empty if it is not."""
        loss = CONTENDERS[name].loss
        if not CONTENDERS[name].is_checked:
            return ""
        value = value.full_tensor() if isinstance(value, DTensor) else value
        hidden = self.placed_for(loss)[0][0][0]
        found = (value, hidden.grad.full_tensor(), self.weight.grad.to_local())
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
    times = time_in_turns(list(ready.values()), clock, budget_s, ranks.largest)
    for name, samples in zip(ready, times, strict=True):
        peak = ranks.largest(linear_steps.peak_beside(ready[name], problem.gradients(name), clock))
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
