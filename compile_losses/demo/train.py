"""Trains one model twice, side by side: stock torch.compile and this package's backend."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from compile_losses.demo.data import Case
from compile_losses.programs.measuring import peak_memory, synchronize

STOCK = "inductor"
OURS = "compile_losses"

# The two runs do the same arithmetic in another order, so they differ by rounding: 6e-8 (2^-24) for
# each float32 operation, and some tens of that for the mean of half a million elements. Until the
# weights have moved, that is all there is: the gradients of the first step must agree to
# GRADIENT_BOUND and the losses of the first EARLY steps to EARLY_BOUND. After that training itself
# amplifies every rounding (AdamW divides by a gradient's size, so the least change of one near zero
# changes a whole step), and LATE_BOUND is loose. For comparison, stock torch.compile against eager
# torch on two CPU cores: 2e-6 in the gradients, 3e-6 early and 1e-5 in the end.
# The gradients are compared because curves do not show their scale: AdamW divides it out, and with
# gradients 1% too large the autoencoder's first 12 losses still agreed to 3e-6.
EARLY = 10
GRADIENT_BOUND = 2e-5
EARLY_BOUND = 2e-5
LATE_BOUND = 1e-2


@dataclass
class Run:
    """What one backend did with one model. Times in seconds, memory in bytes."""

    warm_up: int
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    peak_memory: int = 0

    @property
    def first_step(self) -> float:
        """The first step's time: nearly all of it is compilation."""
        return self.times[0]

    @property
    def step(self) -> float:
        """The median time of a step, without the warm-up."""
        return statistics.median(self.times[self.warm_up :] or self.times)


@dataclass
class Result:
    """Both runs of one case.

    ``gradient_difference`` is |stock - ours| / |stock| of all gradients together in step 1.
    """

    case: Case
    stock: Run
    ours: Run
    gradient_difference: float

    @property
    def speedup(self) -> float:
        """How many times as fast ours is: the median of the ratios of a turn, without the warm-up.

        Whatever else the machine does meets both steps of a turn.
        """
        turns = zip(self.stock.times, self.ours.times, strict=True)
        ratios = [stock / ours for stock, ours in turns]
        return statistics.median(ratios[self.case.warm_up :] or ratios)

    @property
    def saving(self) -> float:
        """How many times as much memory stock holds at most."""
        return self.stock.peak_memory / max(self.ours.peak_memory, 1)

    @property
    def differences(self) -> list[float]:
        """|stock - ours| / |stock| at each step."""
        pairs = zip(self.stock.losses, self.ours.losses, strict=True)
        return [abs(a - b) / max(abs(a), 1e-12) for a, b in pairs]

    @property
    def disagreement(self) -> str:
        """How the runs differ by more than rounding explains, or nothing."""
        spans = (
            ("the first gradients", [self.gradient_difference], GRADIENT_BOUND),
            (f"the losses of the first {EARLY} steps", self.differences[:EARLY], EARLY_BOUND),
            (f"the losses after {EARLY} steps", self.differences[EARLY:], LATE_BOUND),
        )
        for what, differences, bound in spans:
            for difference in differences:
                if not difference <= bound:  # not ">": a nan is a disagreement too
                    return f"{what} differ by {difference:.1e}, more than {bound:.0e}"
        return ""


def compiled(model: nn.Module, backend: str, case: Case) -> Callable[..., Tensor]:
    """The loss of a batch, by this backend."""
    options: dict[str, Any] | None = (case.options or None) if backend == OURS else None
    function: Callable[..., Tensor] = torch.compile(model, backend=backend, options=options)
    if case.criterion is None:
        return function
    return in_two(function, torch.compile(case.criterion, backend=backend))


def in_two(
    model: Callable[..., Tensor], criterion: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Tensor]:
    """A model and the loss of what it returns, of which each is a graph, for explain as well."""
    handed_over = torch.compiler.disable(lambda output: output)  # ends a graph

    def loss(*batch: Tensor) -> Tensor:
        *inputs, targets = batch
        return criterion(handed_over(model(*inputs)), targets)

    return loss


class Trainer:
    """A model under one backend, with its optimiser."""

    def __init__(self, model: nn.Module, backend: str, case: Case) -> None:
        self.run = Run(case.warm_up)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.loss = compiled(model, backend, case)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=case.learning_rate, fused=True)

    def step(self, batch: tuple[Tensor, ...]) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(*batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, batch: tuple[Tensor, ...]) -> None:
        """One timed step."""
        synchronize(self.device)
        start = time.perf_counter()
        loss = self.step(batch)
        synchronize(self.device)
        self.run.times.append(time.perf_counter() - start)
        self.run.losses.append(loss.item())

    def gradient(self) -> Tensor:
        """All gradients of the last step, in double precision: one dimension."""
        gradients = (parameter.grad for parameter in self.parameters)
        return torch.cat([grad.double().flatten() for grad in gradients if grad is not None])

    def measure_memory(self, batch: tuple[Tensor, ...]) -> None:
        """One more step; keeps the most memory that its tensors held at once.

        What is there before does not count: weights, the optimiser's state, the batch. The
        gradients are cleared first.
        """
        self.optimizer.zero_grad()
        self.run.peak_memory = peak_memory(lambda: self.step(batch), self.device)


def side_by_side(case: Case, device: torch.device, tick: Callable[[str], None]) -> Result:
    """Trains ``case`` under both backends: same weights, same batches, step by step in turn.

    The one that goes first changes with every step, so that neither profits from the order.
    ``tick`` is called after each step with the two losses.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    model = case.make().to(device)
    stock = Trainer(copy.deepcopy(model), STOCK, case)
    ours = Trainer(copy.deepcopy(model), OURS, case)
    batch: tuple[Tensor, ...] = ()
    gradient_difference = 0.0
    for index, drawn in enumerate(case.batches(case.steps)):
        batch = tuple(tensor.to(device) for tensor in drawn)
        for trainer in (stock, ours) if index % 2 == 0 else (ours, stock):
            trainer.train(batch)
        if index == 0:
            expected, found = stock.gradient(), ours.gradient()
            gradient_difference = float((found - expected).norm() / expected.norm())
        tick(f"{stock.run.losses[-1]:.4f} | {ours.run.losses[-1]:.4f}")
    for trainer in (stock, ours):
        trainer.measure_memory(batch)
    return Result(case, stock.run, ours.run, gradient_difference)
