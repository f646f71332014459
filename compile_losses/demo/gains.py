"""What a run gained, and why not where it gained nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compile_losses.demo.train import Result
from compile_losses.report import Report
from compile_losses.sites import megabytes

#: Less counts as no gain: so much the times of two equal programs may differ.
LEAST = 1.05


def closing_line(results: Sequence[Result]) -> str:
    """What these models gained, those with the most memory saved first."""
    gains = [
        (result.case.name, parts)
        for result in sorted(results, key=lambda result: -result.saving)
        if (parts := parts_of(result))
    ]
    if not gains:
        return "Gained in this run: nothing."
    told = "; ".join(f"{name}: {', '.join(parts)}" for name, parts in gains)
    return f"Gained in this run: {told}."


def parts_of(result: Result) -> list[str]:
    parts = []
    if result.saving >= LEAST:
        parts.append(f"peak memory 1/{result.saving:.2g}")
    if result.speedup >= LEAST:
        parts.append(f"{result.speedup:.2f} times as fast")
    return parts


def without_gain(result: Result, report: Report) -> str:
    """Why a step takes stock's time or memory, in the words of ``explain``; empty if neither."""
    lacks = []
    if result.speedup < LEAST:
        pairs = ((site.op, site.bytes_moved, site.stock_bytes_moved) for site in report.losses)
        lacks.append(f"time{estimates('moves', pairs)}")
    if result.saving < LEAST:
        pairs = ((site.op, site.bytes_held, site.stock_bytes_held) for site in report.losses)
        lacks.append(f"memory{estimates('holds', pairs)}")
    if not lacks:
        return ""
    reasons = [site.notes or ", ".join(site.plan) for site in report.losses]
    return f"{result.case.name}: {', '.join(lacks)}: {'; '.join(reasons)}"


def estimates(verb: str, losses: Iterable[tuple[str, int | None, int | None]]) -> str:
    """The bytes of each op, beside those of torch's own ops, where they are known."""
    told = []
    for op, ours, stock in losses:
        if ours is not None and stock is not None:
            than = "as stock's" if ours == stock else f"stock's {megabytes(stock)}"
            told.append(f"{op} {verb} {megabytes(ours)}, {than}")
    return f" ({'; '.join(told)})" if told else ""
