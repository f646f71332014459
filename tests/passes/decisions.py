"""What the passes decide about each program of the corpus, in files that tests compare with.

``EXPECTTEST_ACCEPT=1 make test TESTS=tests/passes`` writes the files anew.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

import torch

from compile_losses.lower import Decision
from compile_losses.report import Report

FOLDER = Path(__file__).parent / "decided"
#: Dynamo's and AOTAutograd's names differ from version to version.
IS_ON_FILE = torch.__version__.startswith("2.13")


def told(report: Report) -> list[str]:
    """A line for each site of a report, without the numbers of lines."""
    found = []
    for site in report.sites:
        found.append(f"{site.op}: {site.status}" + (f", {site.notes}" if site.notes else ""))
    return [re.sub(r"([\w./]+\.py):\d+", r"\1", line) for line in found]


def planned(decisions: list[Decision]) -> list[str]:
    return [f"{d.loss}: {d.choice}" + (f", {d.reason}" if d.reason else "") for d in decisions]


def read(kind: str) -> dict[str, list[str]]:
    """The lines of each program in a file."""
    file, found = FOLDER / f"{kind}.txt", {}
    for part in file.read_text().split("\n\n") if file.exists() else ():
        name, *lines = part.strip().split("\n")
        found[name] = [line.removeprefix("  ") for line in lines]
    return found


def check(kind: str, name: str, lines: list[str]) -> None:
    """Compares with the file, or writes it."""
    if not IS_ON_FILE:
        return
    if os.environ.get("EXPECTTEST_ACCEPT"):
        _write(kind, {name: lines})
    assert read(kind).get(name) == lines


def _write(kind: str, new: dict[str, list[str]]) -> None:
    FOLDER.mkdir(exist_ok=True)
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes write
        merged = sorted({**read(kind), **new}.items())
        text = "\n\n".join("\n  ".join((name, *lines)) for name, lines in merged)
        (FOLDER / f"{kind}.txt").write_text(text + "\n")
