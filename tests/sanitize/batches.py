"""Cases of a test that run in one process under one tool, and what tool and pytest say of them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

#: Of a batch, beside some 20 of its start; of a case that was never timed.
BATCH_SECONDS, CASE_SECONDS = 60.0, 8.0
#: Tests that launch cuBLAS's and Triton's kernels, too, or CUDA graphs.
OTHER_KERNELS = re.compile(
    r"tests/(distributed/|conformance/test_compile|"
    r"test_(compile|decompose|linear_\w*|lower|surroundings|training)\.py)"
    r"|test_17_linear_cross_entropy"
)


@dataclass(frozen=True)
class GpuTest:
    """A test function, and pytest's names of its cases. Large ones take gigabytes of a device."""

    name: str
    cases: tuple[str, ...]
    large: bool = False

    @property
    def launches_others(self) -> bool:
        return OTHER_KERNELS.search(self.name) is not None


@dataclass(frozen=True)
class Batch:
    """Cases of a test that run together under a tool."""

    tool: str
    test: GpuTest
    cases: tuple[str, ...]

    @property
    def key(self) -> tuple[str, ...]:
        return self.tool, self.test.name


@dataclass(frozen=True)
class Outcome:
    """Of a batch: the cases that passed while watched. ``trouble`` is empty where all went well."""

    passed: int
    trouble: str
    seconds: float = 0.0


class Processes:
    """Processes that run, with all that they start, until they end or are ended together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[int] | None = set()  # None once they were ended

    def output(
        self, command: Sequence[str], environment: Mapping[str, str], limit: float
    ) -> tuple[str, int]:
        """What a command prints, and its status: -9 if it was ended, as after ``limit`` seconds."""
        with self._lock:
            if self._running is None:
                return "", -signal.SIGKILL
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            self._running.add(process.pid)
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        with self._lock:
            if self._running is not None:
                self._running.remove(process.pid)
        return output, process.returncode

    def end(self) -> None:
        with self._lock:
            for group in self._running or ():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            self._running = None


class _Collector:
    def __init__(self) -> None:
        self.cases: dict[str, list[str]] = defaultdict(list)
        self.large: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            name = item.nodeid.partition("[")[0]
            self.cases[name].append(item.nodeid)
            if "memory_given_back" in getattr(item, "fixturenames", ()):
                self.large.add(name)


def collect(paths: Sequence[str]) -> list[GpuTest]:
    """The tests marked gpu."""
    found, output = _Collector(), io.StringIO()
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", "gpu"]
    with contextlib.redirect_stdout(output):
        status = pytest.main([*options, *paths], plugins=[found])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"pytest could not collect the tests:\n{output.getvalue()}")
    return [GpuTest(name, tuple(cases), name in found.large) for name, cases in found.cases.items()]


def make_batches(
    wanted: Iterable[tuple[str, GpuTest]], case_seconds: Mapping[tuple[str, ...], float]
) -> list[Batch]:
    """The longest cases first, as many together as take BATCH_SECONDS by what is known of them."""
    slowest: dict[str, float] = {}  # a tool's own time, else that of the others
    for (_, name), seconds in case_seconds.items():
        slowest[name] = max(seconds, slowest.get(name, 0.0))
    timed: list[tuple[float, Batch]] = []
    for tool, test in wanted:
        seconds = case_seconds.get((tool, test.name), slowest.get(test.name, CASE_SECONDS))
        size = max(1, int(BATCH_SECONDS / max(seconds, 0.1)))
        for first in range(0, len(test.cases), size):
            timed.append((seconds, Batch(tool, test, test.cases[first : first + size])))
    return [batch for _, batch in sorted(timed, key=lambda pair: -pair[0])]


def findings(log: str) -> str:
    """The tool's summary, unless it is of nothing."""
    summaries = re.findall(r"SUMMARY: (.*)", log)
    return summaries[-1] if summaries and not re.match(r"0 (errors|hazards)", summaries[-1]) else ""


def judge(output: str, log: str, status: int) -> tuple[int, str]:
    """How many cases passed while the tool watched, and what is wrong.

    Args:
        output: what pytest printed.
        log: what the tool wrote.
        status: what the process returned.
    """
    ends = re.findall(r"^(\d+ \w+.*) in [\d.]+s\b", output, re.MULTILINE)
    counts = {
        kind: int(number) for number, kind in re.findall(r"(\d+) ([a-z]+)", "".join(ends[-1:]))
    }
    passed = counts.get("passed", 0)
    if found := findings(log):
        return passed, found
    if not ends:
        return 0, "pytest gave no summary"
    if not counts.keys().isdisjoint(("failed", "error", "errors")):
        return passed, ends[-1]
    if "SUMMARY: " not in log:
        # Of a process that launches nothing itself there is none.
        if passed == 0 or "before first instrumented API call" in log:
            return 0, ""
        return passed, "the tool gave no summary"
    # Without a test that ran, the suite's status is not 0.
    return passed, "" if status == 0 or passed == 0 else f"exit status {status}"


def run(batch: Batch, devices: str, log: Path, limit: float, processes: Processes) -> Outcome:
    """Runs a batch.

    Args:
        batch: what to run.
        devices: as CUDA_VISIBLE_DEVICES names them; the batch runs on the first.
        log: a file for the tool to write.
        limit: the seconds after which the batch is ended.
        processes: runs it.
    """
    command = ["compute-sanitizer", "--tool", batch.tool, "--log-file", str(log)]
    # Processes that a test starts are not watched: some end their device's context on purpose.
    command += ["--target-processes", "application-only", "--launch-timeout", "300"]
    # Backtraces of the host keep alive what the Python frames of every launch refer to, so that
    # gradients are copied, CUDA graphs can't be captured, and memory is never given back. Those of
    # the device name no more than the kernel here, and take memcheck milliseconds of every launch.
    command += ["--show-backtrace", "no"]
    # Of namespace fused, whose length is in mangled names; not triton_poi_fused of Inductor.
    command += ["--kernel-name", "kns=5fused"]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": devices,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "2",
    }
    if batch.tool == "memcheck":
        # Torch raises what a call of the API fails with; importing cuda-python tries some that do.
        command += ["--report-api-errors", "no"]
        if not batch.test.launches_others:
            # Each tensor has memory of its own, so that to read past its end is an error.
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if batch.tool == "racecheck" and not batch.test.launches_others:
        # It loses track of what several threads launch at once, and may then not return. CUDA
        # graphs, which can't be captured so, are among the tests that launch other kernels.
        environment["CUDA_LAUNCH_BLOCKING"] = "1"
    command += [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    command += ["--tb=short", "--show-capture=no", *batch.cases]
    start = time.monotonic()
    output, status = processes.output(command, environment, limit)
    text = log.read_text(errors="replace") if log.exists() else ""
    passed, trouble = judge(output, text, status)
    if status == -signal.SIGKILL:
        trouble = f"killed after {time.monotonic() - start:.0f} s"
    if trouble:
        trouble = f"{trouble}\n{text[-2000:]}\n{output[-4000:]}"
    return Outcome(passed, trouble, time.monotonic() - start)
