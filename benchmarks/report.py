"""Results as CSV and as a table."""

from __future__ import annotations

import csv
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.cases import Pass
from benchmarks.clock import Bandwidth
from benchmarks.measure import Measurement, Problem

ROOT = Path(__file__).parent.parent
AnyRow = TypeVar("AnyRow", bound=Any)


#: The last columns of a file, in this order, as far as it has them.
_LAST = ("device", "torch", "library", "contender_version", "commit", "clock_mhz", "power_w")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a row's figures come from; see :func:`benchmarks.options.provenance`."""

    device: str
    torch: str
    commit: str


@dataclass(frozen=True, kw_only=True)
class Clocked(Provenance):
    """With the device's clock and power, where they are known."""

    clock_mhz: str = ""
    power_w: str = ""


@dataclass(frozen=True)
class Row(Provenance):
    """A line of the CSV file. Figures are empty for a contender that was refused.

    ``tbps`` is the fewest bytes that the pass can move, over ``ms``. ``floor_ms`` is those bytes
    over a bandwidth from the same run: of a pure read for ``fwd``, of a copy for ``fwd_bwd``.
    """

    case: str
    which: str  # "pass" in the file
    dtype: str
    shape: str
    contender: str
    ms: str
    tbps: str
    floor_ms: str
    peak_mib: str
    contender_version: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.device, self.case, self.which, self.dtype, self.shape, self.contender


def make_row(
    problem: Problem,
    which: Pass,
    result: Measurement,
    bandwidth: Bandwidth,
    device: str,
    commit: str,
) -> Row:
    moved = problem.moved(which)

    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    return Row(
        case=problem.case.name,
        which=which,
        dtype=str(problem.dtype).removeprefix("torch."),
        shape="x".join(str(size) for size in problem.shape),
        contender=result.contender.name,
        ms=figure(result.ms),
        tbps=figure(result.ms and moved / result.ms / 1e9),
        floor_ms=figure(bandwidth.floor_ms(moved, writes=which == "fwd_bwd")),
        peak_mib="" if result.peak_mib is None else f"{result.peak_mib:.1f}",
        device=device,
        torch=torch.__version__,
        contender_version=result.contender.version,
        commit=commit,
    )


def row_of(kind: type[AnyRow], known: Mapping[str, str]) -> AnyRow:
    """A row with what is known; its other fields are empty."""
    return kind(**{field.name: known.get(field.name, "") for field in fields(kind)})


def names_of(kind: type[Any]) -> list[str]:
    """The fields of a kind of rows, where they come from at the end."""
    own = [field.name for field in fields(kind)]
    return [n for n in own if n not in _LAST] + [n for n in _LAST if n in own]


def columns_of(kind: type[Any]) -> list[str]:
    """The columns of a file with rows of this dataclass: its fields."""
    return ["pass" if name == "which" else name for name in names_of(kind)]


def read(path: Path, kind: Callable[..., AnyRow]) -> list[AnyRow]:
    """A row for each line."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [kind(**{"which" if k == "pass" else k: v for k, v in line.items()}) for line in lines]


def kept(path: Path, kind: Callable[..., AnyRow], *, append: bool) -> dict[tuple[str, ...], AnyRow]:
    """The rows that a file to append to already has, by their keys."""
    return {row.key: row for row in read(path, kind)} if append and path.exists() else {}


def write(path: Path, kind: type[Any], rows: Iterable[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns_of(kind))
        names = names_of(kind)
        writer.writerows([getattr(row, name) for name in names] for row in rows)


def table(problem: Problem, which: Pass, rows: list[Row], results: list[Measurement]) -> str:
    """One problem and pass, the fastest contender first."""
    ordered = sorted(
        zip(rows, results, strict=True), key=lambda pair: (pair[1].ms is None, pair[1].ms or 0)
    )
    floor = float(rows[0].floor_ms)
    lines = [f"{problem} {which}: floor {rows[0].floor_ms} ms"]
    lines.append(f"  {'contender':<22}{'ms':>9}{'x floor':>9}{'TB/s':>11}{'peak MiB':>10}")
    for row, result in ordered:
        if result.ms is not None:
            ratio = f"{result.ms / floor:.2f}"
            peak = row.peak_mib or "-"
            lines.append(f"  {row.contender:<22}{row.ms:>9}{ratio:>9}{row.tbps:>11}{peak:>10}")
        elif result.broken:
            lines.append(f"  {row.contender:<22}{result.reason}")
    absent = [f"{row.contender} ({m.reason})" for row, m in ordered if m.not_run]
    if absent:
        lines.append(f"  not run: {', '.join(absent)}")
    return "\n".join(lines)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), re.MULTILINE)
        name = match.group(1).strip() if match else name
    threads = torch.get_num_threads()
    return f"{name}, {threads} threads, {torch.backends.cpu.get_cpu_capability()}"


def default_output(device: torch.device, kind: str = "") -> Path:
    """``results/DEVICE.csv``, or ``results/KIND-DEVICE.csv``."""
    name = "cpu" if device.type == "cpu" else device_name(device)
    words = re.findall(r"[a-z0-9]+", f"{kind} {name}".lower())
    return Path(__file__).parent / "results" / f"{'-'.join(words)}.csv"


def current_commit() -> str:
    """The checkout's commit, marked when files differ from it; results are not counted."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        ).stdout.strip()

    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        results = (":!benchmarks/results", ":!tests/sanitize/clean.csv")
        changed = git("status", "--porcelain", "--", ".", *results)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit
