"""Common parts of the benchmarks of a linear layer and cross entropy, on one device or on several.

A step computes the loss of hidden states, and the gradients of hidden states and weight. This
module has its shapes and options, the lines of the CSV file, and the check for errors.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.clock import Clock, NextCall, peak_mib, range_of, ratio_of, time_in_turns
from benchmarks.contenders import reason_of, version_of
from benchmarks.options import DTYPES, add_options

Loss = Callable[[Any, Any, Any], Any]  # of hidden, weight and target
ULPS = 4


@dataclass(frozen=True)
class Shape:
    rows: int
    hidden: int
    classes: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.rows}x{self.hidden}x{self.classes}"

    def swept(self, size: str) -> list[Shape]:
        """The shapes that a plot against one size has."""
        return [replace(self, **{size: value}) for value in SWEEPS[size]]


SWEEPS = {
    "classes": (8000, 16_000, 32_000, 64_000, 128_000, 256_000),
    "rows": (1024, 2048, 4096, 8192, 16_384, 32_768),
}


@dataclass(frozen=True, kw_only=True)
class Row(report.Clocked):
    """A contender's figures; if it was wrong or failed, empty with a reason. Memory is in MiB.

    ``ratio`` is the median ratio to the sample of Inductor in the same turn, and ``range`` the
    range of most of these ratios. With several ranks, time is the slowest rank's, and memory the
    largest of all ranks.
    """

    shape: str
    dtype: str
    ignored: str = "0"
    ranks: str = "1"
    contender: str
    ms: str = ""
    ratio: str = ""
    range: str = ""
    peak_mib: str = ""
    reason: str = ""
    contender_version: str

    @property
    def problem(self) -> tuple[str, ...]:
        return self.shape, self.dtype, self.ignored, self.ranks

    @property
    def key(self) -> tuple[str, ...]:
        return self.device, *self.problem, self.contender

    def timed(
        self, samples: Sequence[float], peak_mib: float, stock: list[float] | None = None
    ) -> Row:
        timed = replace(self, ms=f"{statistics.median(samples):.4g}", peak_mib=f"{peak_mib:.1f}")
        if stock is None:
            return timed
        own = list(samples)
        return replace(timed, ratio=f"{ratio_of(stock, own):.3f}", range=range_of(stock, own))

    def __str__(self) -> str:
        return (
            f"{self.shape:<30}{self.contender:<24}{self.ms:>9}{self.ratio:>8}{self.range:>13}"
            f"{self.peak_mib:>10}  {self.reason}"
        )


HEADER = f"{'shape':<30}{'contender':<24}{'ms':>9}{'ratio':>8}{'range':>13}{'MiB':>10}"


class Results:
    """The rows of a file, which is rewritten whenever rows are added."""

    def __init__(self, path: Path, *, append: bool) -> None:
        self.path = path
        self.added: list[Row] = []
        self.rows = report.kept(path, Row, append=append)

    def add(self, rows: Iterable[Row], *, write: bool = True) -> None:
        """The rows of contenders that were tried; one that does not run here has no line."""
        self.added += [row for row in rows if not row.reason.startswith("not run")]
        self.rows |= {row.key: row for row in self.added}
        if write:
            report.write(self.path, Row, self.rows.values())

    @property
    def broken(self) -> bool:
        """Whether a contender of this package was wrong or failed."""
        return any(row.contender.startswith("ours") and row.reason for row in self.added)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm."""
    return float((actual.to(expected.dtype) - expected).norm() / expected.norm())


def allowed_errors(eager: Iterable[float], dtype: torch.dtype) -> list[float]:
    """Twice the errors of torch's own ops on one device, or a few roundings."""
    return [max(2 * error, ULPS * torch.finfo(dtype).eps) for error in eager]


def complaint(errors: Sequence[float], allowed: Sequence[float]) -> str:
    """Why a result is wrong; empty if it is not."""
    if all(error <= most for error, most in zip(errors, allowed, strict=True)):  # False for nan
        return ""
    return "wrong: errors " + ", ".join(f"{error:.1e}" for error in errors)


def checked(
    builders: Mapping[str, Callable[[], Loss]],
    errors: Callable[[Loss], Sequence[float]],
    allowed: Sequence[float],
) -> tuple[dict[str, Loss], dict[str, str]]:
    """The contenders that run and are right, and for each the reason why not, or an empty text."""
    right: dict[str, Loss] = {}
    reasons: dict[str, str] = {}
    for name, build in builders.items():
        try:
            loss = build()
            reasons[name] = complaint(errors(loss), allowed)
            if not reasons[name]:
                right[name] = loss
        except Exception as error:  # whatever it is, the others are still measured
            reasons[name] = reason_of(error)
    return right, reasons


def measured(
    builders: Mapping[str, tuple[Callable[[], Loss], str]],
    problem: Any,
    allowed: Sequence[float],
    clock: Clock,
    budget_s: float,
    common: Mapping[str, str],
    gradients: Iterable[Tensor] = (),
) -> list[Row]:
    """Figures of some contenders, in their order. The contender Inductor is stock.

    Args:
        builders: the function that makes each, and the package whose version counts.
        problem: has ``errors`` and ``next_call``, of a contender's step.
        allowed: the largest errors.
        common: the columns that all rows share.
        gradients: tensors as large as these don't count as memory.
    """
    steps, reasons = checked(
        {name: b for name, (b, _) in builders.items()}, problem.errors, allowed
    )
    rows = {
        name: Row(
            contender=name,
            reason=reasons[name],
            contender_version=version_of(package),
            **common,
        )
        for name, (_, package) in builders.items()
    }
    gradients = list(gradients)
    ready = {name: partial(problem.next_call, step) for name, step in steps.items()}
    times = dict(zip(ready, time_in_turns(list(ready.values()), clock, budget_s), strict=True))
    for index, (name, samples) in enumerate(times.items()):
        peak = peak_beside(ready[name], gradients, clock)
        row = rows[name].timed(samples, peak, times.get("inductor"))
        rows[name] = replace(row, **clock.conditions(index))
    return list(rows.values())


def figures_of(
    builders: Mapping[str, Callable[[], Loss]],
    problem: Any,
    allowed: Sequence[float],
    clock: Clock,
    budget_s: float,
    plan: Callable[[str], str | None],
) -> dict[str, dict[str, str]]:
    """Columns with the figures of some contenders, in their order, by their names.

    Args:
        builders, problem, allowed: as for :func:`measured`; the contender named stock is stock.
        plan: what the report says of a contender; None of one that has no report.
    """
    steps, reasons = checked(builders, problem.errors, allowed)
    found = {name: {"reason": reasons[name]} for name in builders}
    ready = {name: partial(problem.next_call, step) for name, step in steps.items()}
    times = dict(zip(ready, time_in_turns(list(ready.values()), clock, budget_s), strict=True))
    for index, (name, samples) in enumerate(times.items()):
        found[name] |= clock.conditions(index)
        if "stock" in times:
            found[name]["ratio"] = f"{ratio_of(times['stock'], samples):.3f}"
            found[name]["range"] = range_of(times["stock"], samples)
        found[name] |= {
            "ms": f"{statistics.median(samples):.4g}",
            "peak_mib": f"{peak_mib(ready[name], clock):.0f}",
        }
        planned = plan(name)
        if planned is not None:
            found[name]["plan"] = planned
    return found


def peak_beside(next_call: NextCall, gradients: Iterable[Tensor], clock: Clock) -> float:
    """The peak memory of a step above the memory in use before, less the gradients it returns.

    Args:
        gradients: tensors as large as these.
    """
    return peak_mib(next_call, clock) - sum(g.nbytes for g in gradients) / (1 << 20)


def add_step_options(parser: argparse.ArgumentParser, contenders: Iterable[str]) -> None:
    names = list(contenders)
    parser.add_argument("--contender", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--shape", type=Shape.parse, nargs="+", help="ROWSxHIDDENxCLASSES")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    add_options(parser, 0.5, append=True)
    parser.add_argument("--no-plots", dest="plots", action="store_false")


def add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sweep", choices=SWEEPS, help="of one --shape, against this size")
