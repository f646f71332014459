"""A user's step, run and measured: its loss, the tensors that the loss is differentiated by."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compile_losses.programs.measuring import peak_memory, synchronize
from compile_losses.torch_internals.ops import tree_leaves


@dataclass
class Side:
    """One side's step: its times in seconds, its most bytes of tensors at a time, and its loss."""

    times: list[float] = field(default_factory=list)
    peak_memory: int = 0
    loss: float | None = None

    @property
    def time(self) -> float:
        return statistics.median(self.times)


class Runner:
    """One side of a comparison.

    Args:
        call: the compiled step.
        environment: variables that hold while it is compiled and runs.
    """

    def __init__(self, call: Callable[[], Any], environment: dict[str, str]) -> None:
        self.call = call
        self.environment = environment
        self.side = Side()
        #: Whether the loss may be left to differentiate, and whether it was.
        self.differentiates, self.has_differentiated = True, False
        self.leaves: list[Tensor] = []
        self.gradients: list[Tensor | None] = []

    def step(self) -> float | None:
        """Runs the step, and differentiates its loss if it has not done so; returns the loss."""
        with variables(self.environment):
            loss = loss_of(self.call())
            if loss is None:
                return None
            if loss.requires_grad:
                self.leaves = leaves_of(loss)
                if self.differentiates and all(leaf.grad is None for leaf in self.leaves):
                    self._differentiate(loss)
            return loss.detach()  # type: ignore[return-value]

    def _differentiate(self, loss: Tensor) -> None:
        try:
            loss.backward()
            self.has_differentiated = True
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            self.differentiates = False  # the step did, and then cleared the gradients

    def find_leaves(self) -> list[Tensor]:
        """Runs the step once, and returns the tensors that its loss is differentiated by."""
        self.step()
        if self.has_differentiated:
            for leaf in self.leaves:
                leaf.grad = None
        return self.leaves

    def learn(self, leaves: list[Tensor]) -> None:
        """Runs the step twice, and keeps its loss and its gradients by these weights."""
        for _ in range(2):
            torch.manual_seed(0)
            with restored(leaves):
                loss = self.step()
                self.side.loss = None if loss is None else float(loss)
                self.gradients = [leaf.grad for leaf in leaves]

    def measure_time(self) -> None:
        """Measures a step after another one, which warms up."""
        device = self._device()
        for _ in range(2):
            with restored(self.leaves):
                synchronize(device)
                start = time.perf_counter()
                self.step()
                synchronize(device)
                end = time.perf_counter()
        self.side.times.append(end - start)

    def measure_memory(self) -> None:
        with restored(self.leaves):
            self.side.peak_memory = peak_memory(self.step, self._device())

    def _device(self) -> torch.device:
        found = {leaf.device for leaf in self.leaves if leaf.device.type != "cpu"}
        return found.pop() if found else torch.device("cpu")


#: Variables of a process whose graphs are to be compiled anew: one from a cache has no plan.
WITHOUT_CACHES = {
    "COMPILE_LOSSES_LOG": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
}


@contextmanager
def variables(given: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def restored(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Begins without gradients, and puts weights and gradients back that were there before."""
    before = [(leaf.detach().clone(), leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for leaf, (value, gradient) in zip(leaves, before, strict=True):
                leaf.copy_(value)
                leaf.grad = gradient


def loss_of(result: Any) -> Tensor | None:
    """The loss among what a step returns: what is named so, or the first number."""
    named = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    for value in (named, *tree_leaves(result)):
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
            return value.reshape(())
        if isinstance(value, float):
            return torch.tensor(value)
    return None


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors that a number is differentiated by, also after its backward.

    Each process finds them in the same order.
    """
    found: dict[int, Tensor] = {}
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        following = dict.fromkeys(each for each, _ in node.next_functions if each not in seen)
        seen.update(following)
        waiting += following
    return list(found.values())


def difference(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float | None:
    """|expected - found| / |expected| of all tensors together; None if there are none.

    Numbers that are nan, or the same infinity, on both sides are equal.
    """
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None or b is not None]
    if not pairs:
        return None
    apart = size = 0.0
    for a, b in pairs:
        if a is None or b is None:
            return float("inf")
        a, b = a.double(), b.double()
        is_same = (a == b) | (a.isnan() & b.isnan())
        apart += float((a - b).masked_fill(is_same, 0).norm()) ** 2
        size += float(a.masked_fill(~a.isfinite(), 0).norm()) ** 2
    return (apart**0.5) / max(size**0.5, 1e-300)
