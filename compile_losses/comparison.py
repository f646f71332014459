"""``compare``: a user's step by stock torch.compile and with the losses rewritten, in turns."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compile_losses.explanation import explain_call
from compile_losses.measuring import peak_memory, synchronize
from compile_losses.options import Settings
from compile_losses.report import Report
from compile_losses.sites import megabytes
from compile_losses.torch_internals.dynamo import uncompiled, without_recompile_limits
from compile_losses.torch_internals.ops import tree_leaves

#: Steps of each side that are measured; as many more warm up.
STEPS = 10


@dataclass
class Side:
    """One side's step: its times in seconds, its most bytes of tensors at a time, and its loss."""

    times: list[float] = field(default_factory=list)
    peak_memory: int = 0
    loss: float | None = None

    @property
    def time(self) -> float:
        return statistics.median(self.times)


@dataclass
class Comparison:
    """What :func:`compare` measured.

    Attributes:
        stock, ours: the two sides.
        gradient_difference: |stock - ours| / |stock| of all gradients together; None if the step
            returns no loss that needs a gradient, or leaves no gradients.
        report: what ``explain`` says of the step.
    """

    stock: Side
    ours: Side
    gradient_difference: float | None
    report: Report

    @property
    def loss_difference(self) -> float | None:
        """|stock - ours| / |stock|; None if the step returns no number."""
        if self.stock.loss is None or self.ours.loss is None:
            return None
        return abs(self.stock.loss - self.ours.loss) / max(abs(self.stock.loss), 1e-12)

    @property
    def ratios(self) -> list[float]:
        """Ours by stock's time in each turn. Whatever else the machine does meets both."""
        pairs = zip(self.stock.times, self.ours.times, strict=True)
        return sorted(ours / stock for stock, ours in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and numbers, as for ``json.dumps``."""
        sides = {
            name: {"times": s.times, "time": s.time, "peak_memory": s.peak_memory, "loss": s.loss}
            for name, s in (("stock", self.stock), ("ours", self.ours))
        }
        return {
            **sides,
            "time_ratio": statistics.median(self.ratios),
            "loss_difference": self.loss_difference,
            "gradient_difference": self.gradient_difference,
            "report": self.report.to_dict(),
        }

    def __str__(self) -> str:
        stock, ours, ratios = self.stock, self.ours, self.ratios
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        memory = f"{ours.peak_memory / stock.peak_memory:.2f}" if stock.peak_memory else ""
        rows = [
            ("", "stock", "ours", "ours / stock"),
            ("time", f"{stock.time * 1e3:.2f} ms", f"{ours.time * 1e3:.2f} ms", spread),
            ("peak memory", megabytes(stock.peak_memory), megabytes(ours.peak_memory), memory),
        ]
        if self.loss_difference is not None:
            told = f"difference {self.loss_difference:.1e}"
            rows.append(("loss", f"{stock.loss:.6g}", f"{ours.loss:.6g}", told))
        if self.gradient_difference is not None:
            rows.append(("gradients", "", "", f"difference {self.gradient_difference:.1e}"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", str(self.report)])


def compare(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Comparison:
    """Runs a step by stock torch.compile and with this package, in turns, and compares.

    A step is a forward with its loss, perhaps with its ``backward`` and the optimizer's step. If it
    returns a loss that needs a gradient and was not differentiated, ``backward`` is part of the
    step. Both sides run the step many times, on the same arguments: a step that draws its batch
    from an iterator gets another one each time, and its losses can't be compared. Weights that a
    step updates are put back after each one; the optimizer's own state is not.

    Args:
        function: any callable or module, compiled or not; both sides compile it anew.

    Returns:
        A :class:`Comparison`; print it, or read its attributes. Memory is the most that the step's
        tensors hold at a time beyond what is there before, by torch's allocators.
    """
    return compare_call(function, args, kwargs)


def compare_call(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    steps: int = STEPS,
) -> Comparison:
    """As :func:`compare`, for a compilation with this ``mode`` and these ``options``.

    Raises:
        InvalidOptionError: an unknown mode, option or loss; a value of a wrong kind.
    """
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, got {steps}")
    settings = Settings.of(mode, options)
    # What the profiler of a CPU's memory would log.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    plain = uncompiled(function)
    others = None if mode else settings.others or None
    stock = torch.compile(plain, backend="inductor", mode=mode, options=others)
    ours = torch.compile(plain, backend="compile_losses", mode=mode, options=options)
    sides = {
        "stock": _Runner(lambda: stock(*args, **(kwargs or {})), {"COMPILE_LOSSES": "0"}),
        "ours": _Runner(lambda: ours(*args, **(kwargs or {})), {}),
    }
    report = explain_call(function, args, dict(kwargs or {}), mode=mode, options=options)
    with without_recompile_limits():
        leaves = sides["stock"].find_leaves()
        for side in sides.values():
            side.learn(leaves)
        order = random.Random(0)
        for _ in range(steps):
            for name in order.sample(list(sides), len(sides)):
                sides[name].measure_time()
        for side in sides.values():
            side.measure_memory()
    difference = _difference(sides["stock"].gradients, sides["ours"].gradients)
    return Comparison(sides["stock"].side, sides["ours"].side, difference, report)


class _Runner:
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
        with _variables(self.environment):
            loss = _loss_of(self.call())
            if loss is None:
                return None
            if loss.requires_grad:
                self.leaves = _leaves_of(loss)
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
            with _restored(leaves):
                loss = self.step()
                self.side.loss = None if loss is None else float(loss)
                self.gradients = [leaf.grad for leaf in leaves]

    def measure_time(self) -> None:
        """Measures a step after another one, which warms up."""
        device = self._device()
        for _ in range(2):
            with _restored(self.leaves):
                synchronize(device)
                start = time.perf_counter()
                self.step()
                synchronize(device)
                end = time.perf_counter()
        self.side.times.append(end - start)

    def measure_memory(self) -> None:
        with _restored(self.leaves):
            self.side.peak_memory = peak_memory(self.step, self._device())

    def _device(self) -> torch.device:
        found = {leaf.device for leaf in self.leaves if leaf.device.type != "cpu"}
        return found.pop() if found else torch.device("cpu")


@contextmanager
def _variables(given: Mapping[str, str]) -> Iterator[None]:
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
def _restored(leaves: Sequence[Tensor]) -> Iterator[None]:
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


def _loss_of(result: Any) -> Tensor | None:
    """The loss among what a step returns: what is named so, or the first number."""
    named = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    for value in (named, *tree_leaves(result)):
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
            return value.reshape(())
        if isinstance(value, float):
            return torch.tensor(value)
    return None


def _leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors that a number is differentiated by, also after its backward."""
    found: dict[int, Tensor] = {}
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        following = {each for each, _ in node.next_functions} - seen
        seen |= following
        waiting += following
    return list(found.values())


def _difference(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float | None:
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None or b is not None]
    if not pairs:
        return None
    apart = size = 0.0
    for a, b in pairs:
        if a is None or b is None:
            return float("inf")
        apart += float((a.double() - b.double()).norm()) ** 2
        size += float(a.double().norm()) ** 2
    return (apart**0.5) / max(size**0.5, 1e-300)
