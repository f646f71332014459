"""``compare``: a user's step by stock torch.compile and with the losses rewritten, in turns."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compile_losses.backend import given_to
from compile_losses.options import Settings
from compile_losses.programs.user_step import Runner, Side, difference
from compile_losses.report import Report
from compile_losses.report.explanation import explain_call
from compile_losses.sites import megabytes
from compile_losses.torch_internals.dynamo import uncompiled, without_recompile_limits

#: Steps of each side that are measured; as many more warm up.
STEPS = 10


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
        function: any callable or module, compiled or not; both sides compile it anew. If it is
            compiled for this backend, ours has its ``mode`` and its ``options``.

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
    """As :func:`compare`, for a compilation with this ``mode`` and these ``options``; without
    either, with those of the compiled function.

    Raises:
        InvalidOptionError: an unknown mode, option or loss; a value of a wrong kind.
    """
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, got {steps}")
    if mode is None and options is None:
        mode, options = given_to(function)
    settings = Settings.of(mode, options)
    # What the profiler of a CPU's memory would log.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    plain = uncompiled(function)
    others = None if mode else settings.others or None
    stock = torch.compile(plain, backend="inductor", mode=mode, options=others)
    ours = torch.compile(plain, backend="compile_losses", mode=mode, options=options)
    sides = {
        "stock": Runner(lambda: stock(*args, **(kwargs or {})), {"COMPILE_LOSSES": "0"}),
        "ours": Runner(lambda: ours(*args, **(kwargs or {})), {}),
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
    apart = difference(sides["stock"].gradients, sides["ours"].gradients)
    return Comparison(sides["stock"].side, sides["ours"].side, apart, report)
