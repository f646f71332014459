"""Runs GPU tests under compute-sanitizer: ``python -m tests.sanitize memcheck racecheck``.

Many processes run at a time, each a batch of cases of one test under one tool. The tests in which a
tool found nothing are kept in clean.csv, with a hash of csrc/: while the kernels stay the same, the
next run goes on where this one ended. ``--again`` repeats them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import torch

from benchmarks import report
from benchmarks.options import provenance
from benchmarks.progress import progress
from compile_losses.library import hash_of
from tests.sanitize.batches import Batch, GpuTest, Outcome, Processes, collect, make_batches, run

RECORD = Path(__file__).parent / "clean.csv"
TOOLS = ("memcheck", "racecheck", "synccheck")
#: Racecheck of compute-sanitizer 2025.3 breaks some of cuBLAS's kernels by leaving them out.
OLDEST_RACECHECK = (2026, 4)
#: Batches of large tests on a device.
LARGE_AT_A_TIME = 3
#: The seconds after which a batch is ended: many times what it should take.
LIMIT = 1800.0


@dataclass(frozen=True)
class Row:
    """A tool found nothing in any case of a test. ``seconds`` are those of all its processes."""

    tool: str
    test: str
    cases: str
    passed: str
    seconds: str
    device: str
    torch: str
    sanitizer: str
    commit: str
    csrc: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.tool, self.test


def csrc_hash() -> str:
    files = (path for path in (report.ROOT / "csrc").rglob("*") if path.is_file())
    return hash_of(files, report.ROOT)[:12]


def sanitizer_version(tools: Sequence[str]) -> str:
    """Of compute-sanitizer, such as "2026.4.0.0".

    Raises:
        SystemExit: it is not there, or too old for one of the tools.
    """
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("compute-sanitizer, of the CUDA toolkit, is not on the PATH")
    command = ["compute-sanitizer", "--version"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"Version ((\d+)\.(\d+)\S*)", output)
    if found is None:
        raise SystemExit(f"compute-sanitizer --version names none:\n{output}")
    if "racecheck" in tools and (int(found[2]), int(found[3])) < OLDEST_RACECHECK:
        raise SystemExit(
            f"compute-sanitizer is of version {found[1]}, racecheck needs "
            f"{'.'.join(map(str, OLDEST_RACECHECK))} or newer: pip install "
            "nvidia-cuda-sanitizer-api, and put its compute-sanitizer on the PATH"
        )
    return found[1]


def visible_devices() -> list[str]:
    """The devices that the processes are shared out to, as CUDA_VISIBLE_DEVICES names them."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def run_all(
    todo: Sequence[Batch], processes: int, devices: Sequence[str], deadline: float, limit: float
) -> Iterator[tuple[Batch, Outcome | None]]:
    """Every batch and its outcome, as they end; None where the deadline came before its start."""
    running = Processes()

    def start(batch: Batch, slots: SimpleQueue[int], log: Path) -> Outcome | None:
        if time.monotonic() > deadline:
            return None
        slot = slots.get()
        try:
            first = slot % len(devices)  # tests of several devices see the others behind it
            order = ",".join([*devices[first:], *devices[:first]])
            return run(batch, order, log, limit, running)
        finally:
            slots.put(slot)

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        futures: dict[Future[Outcome | None], Batch] = {}
        most_large = min(LARGE_AT_A_TIME * len(devices), processes)
        for large, workers in ((True, most_large), (False, processes)):
            slots: SimpleQueue[int] = SimpleQueue()
            for worker in range(workers):
                slots.put(worker)
            pool = ThreadPoolExecutor(workers)
            stack.callback(pool.shutdown, cancel_futures=True)
            for number, batch in enumerate(todo):
                if batch.test.large == large:
                    futures[pool.submit(start, batch, slots, folder / f"{number}.log")] = batch
        stack.callback(running.end)  # first of the callbacks, where the run is broken off
        for future in as_completed(futures):
            yield futures[future], future.result()


def sanitize(
    tests: Sequence[GpuTest],
    tools: Sequence[str],
    record: Path,
    common: dict[str, str],
    *,
    processes: int,
    devices: Sequence[str] = ("0",),
    seconds: float = float("inf"),
    limit: float = LIMIT,
    again: bool = False,
) -> bool:
    """Runs what the record does not have of these kernels, and keeps what is clean. Was all?"""
    rows = report.kept(record, Row, append=True)

    def is_clean(tool: str, test: GpuTest) -> bool:
        row = rows.get((tool, test.name))
        return row is not None and (row.csrc, row.cases) == (common["csrc"], str(len(test.cases)))

    wanted = [(tool, t) for t in tests for tool in tools if again or not is_clean(tool, t)]
    known = {key: float(row.seconds) / int(row.cases) for key, row in rows.items()}
    todo = make_batches(wanted, known)
    left = Counter(batch.key for batch in todo)
    outcomes: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    with progress(len(todo)) as bar:
        deadline = time.monotonic() + seconds
        for batch, outcome in run_all(todo, processes, devices, deadline, limit):
            bar.advance()
            if outcome is None:
                continue
            bar.describe(f"{batch.tool} {batch.test.name}")
            left[batch.key] -= 1
            outcomes[batch.key].append(outcome)
            parts = outcomes[batch.key]
            if outcome.trouble:
                bar.print(f"{batch.tool} {' '.join(batch.cases)}: {outcome.trouble}")
                rows.pop(batch.key, None)
            elif left[batch.key] or any(part.trouble for part in parts):
                continue
            elif not any(part.passed for part in parts):
                continue  # skipped, as where there is one device only, or not watched
            else:
                rows[batch.key] = Row(
                    batch.tool,
                    batch.test.name,
                    cases=str(len(batch.test.cases)),
                    passed=str(sum(part.passed for part in parts)),
                    seconds=f"{sum(part.seconds for part in parts):.0f}",
                    **common,
                )
            report.write(record, Row, sorted(rows.values(), key=lambda row: row.key))
    for tool in tools:
        clean = sum(len(test.cases) for test in tests if is_clean(tool, test))
        print(f"{tool}: clean in {clean} of {sum(len(test.cases) for test in tests)} cases")
    troubles = sum(bool(part.trouble) for parts in outcomes.values() for part in parts)
    print(f"{troubles} batches were not clean, {sum(left.values())} were not run")
    return not troubles


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__)
    parser.add_argument("tools", nargs="+", choices=TOOLS, metavar="tool", help=", ".join(TOOLS))
    parser.add_argument("--tests", nargs="+", default=["tests"], help="as pytest takes them")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after that")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a batch")
    parser.add_argument("--again", action="store_true", help="also what the record has")
    parser.add_argument("--commit", help="where there is no repository to ask")
    options = parser.parse_args(arguments)
    sanitizer = sanitizer_version(options.tools)
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device, without which every test is skipped")
    common = provenance(options, torch.device("cuda"))
    common |= {"sanitizer": sanitizer, "csrc": csrc_hash()}
    is_clean = sanitize(
        collect(options.tests),
        options.tools,
        RECORD,
        common,
        processes=options.processes,
        devices=visible_devices(),
        seconds=options.seconds,
        limit=options.limit,
        again=options.again,
    )
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
