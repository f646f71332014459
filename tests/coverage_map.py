"""Which tests execute which modules: ``python -m tests.coverage_map tests/test_plan.py ...``.

Runs a few cases of each test of some files, and writes what these executed into
``coverage_map.txt``, from which ``make quick`` chooses. Tests of other files stay as they were
recorded. A test is a function with all its cases, or in ``tests/passes/test_programs.py`` the
programs of one module of the corpus.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

PATH = ROOT / "tests" / "coverage_map.txt"
PACKAGE = str(ROOT / "compile_losses") + os.sep
#: Where a process of a recording writes what it saw.
FOLDER = "COMPILE_LOSSES_COVERAGE_MAP"
#: The cases of a test that are recorded.
CASES = 2
#: The tests of a module that the file names, those that execute the fewest others: of passes, which
#: run anyway, and of all others.
OF_PASSES, MOST = 12, 40

HEADER = """\
# Written by `python -m tests.coverage_map`. First the tests, each with the processor's seconds for
# one case, the number of cases, and how many modules it executes. Then the modules, each with those
# of its tests that execute the fewest others.
"""


@dataclass
class Recorded:
    """A test.

    Attributes:
        seconds: of the processor, for one case.
        cases: how many there are.
        modules: how many it executes.
    """

    seconds: float
    cases: int
    modules: int


def test_of(nodeid: str) -> str:
    """The test that a case belongs to."""
    name, _, case = nodeid.partition("[")
    by_programs = name.startswith("tests/passes/test_programs.py")
    return f"{name}[{case.partition(':')[0]}" if by_programs else name


def spread(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Some cases of a test, the first and the last among them."""
    if len(items) <= most or most < 1:
        return items[:most]
    return [items[i * (len(items) - 1) // max(1, most - 1)] for i in range(most)]


def grouped(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(test_of(item.nodeid), []).append(item)
    return found


class Recorder:
    """A plugin of pytest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, tuple[set[str], list[float]]] = {}
        self.cases: Counter[str] = Counter()
        self.executed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        tests = grouped(items)
        self.cases.update({name: len(cases) for name, cases in tests.items()})
        items[:] = [item for cases in tests.values() for item in spread(cases, CASES)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        from tests.corpus import capture

        for kept in (capture._captured, capture._recognised, capture._parts):
            kept.cache_clear()  # or the first test of a program would seem to need it alone
        self.executed = set()
        before, trace = _seconds(), sys.gettrace()
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(trace)
            modules, seconds = self.found.setdefault(test_of(item.nodeid), (set(), []))
            modules |= self.executed
            seconds.append(_seconds() - before)

    def _trace(self, frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            self.executed.add(file)

    def pytest_sessionfinish(self) -> None:
        lines = {
            name: (sorted(modules), sum(seconds) / len(seconds), self.cases[name])
            for name, (modules, seconds) in self.found.items()
        }
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(lines))


def _seconds() -> float:
    own, children = (
        resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def pytest_configure(config: pytest.Config) -> None:
    if FOLDER in os.environ:
        config.pluginmanager.register(Recorder(Path(os.environ[FOLDER])))


def read(path: Path = PATH) -> tuple[dict[str, Recorded], dict[str, list[str]]]:
    """The tests, and those of each module; both empty where nothing was recorded."""
    tests: dict[str, Recorded] = {}
    modules: dict[str, list[str]] = {}
    module = ""
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("compile_losses/"):
            module = line
            modules[module] = []
        elif line.startswith("  "):
            file, _, names = line.strip().partition(": ")
            modules[module] += [f"{file}::{name}" for name in names.split()]
        elif line and not line.startswith("#"):
            name, seconds, cases, count = line.rsplit(" ", 3)
            tests[name] = Recorded(float(seconds), int(cases), int(count))
    return tests, modules


def write(tests: dict[str, Recorded], modules: dict[str, list[str]], path: Path = PATH) -> None:
    lines = [HEADER]
    for name, test in sorted(tests.items()):
        lines.append(f"{name} {test.seconds:.2g} {test.cases} {test.modules}")
    for module, names in sorted(modules.items()):
        order = sorted(
            (n for n in names if n in tests), key=lambda n: (tests[n].modules, tests[n].seconds, n)
        )
        of_passes = [name for name in order if name.startswith("tests/passes/")]
        others = [name for name in order if name not in of_passes]
        files: dict[str, list[str]] = {}
        for name in sorted([*of_passes[:OF_PASSES], *others[:MOST]]):
            file, _, function = name.partition("::")
            files.setdefault(file, []).append(function)
        if files:
            lines += ["", module]
            lines += [f"  {file}: {' '.join(found)}" for file, found in files.items()]
    path.write_text("\n".join(lines) + "\n")


def merge(folder: Path, files: list[str]) -> None:
    """Writes what the processes of a recording saw into the map."""
    tests, modules = read()
    exists = {name for name in tests if (ROOT / name.partition("::")[0]).exists()}
    stale = {n for n in tests if n not in exists or n.partition("::")[0] in files}
    tests = {name: test for name, test in tests.items() if name not in stale}
    modules = {m: [n for n in names if n in tests] for m, names in modules.items()}
    for part in folder.glob("*.json"):
        for name, (executed, seconds, cases) in json.loads(part.read_text()).items():
            known = tests.get(name)
            count = max(len(executed), 0 if known is None else known.modules)
            tests[name] = Recorded(seconds, cases, count)
            for module in executed:
                key = Path(module).relative_to(ROOT).as_posix()
                modules.setdefault(key, []).append(name)
    write(tests, {module: list(dict.fromkeys(names)) for module, names in modules.items()})


def main(arguments: list[str]) -> int:
    files = [Path(a).as_posix() for a in arguments if a.endswith(".py")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.coverage_map"]
        command += ["-m", "not slow", *(arguments or ["tests"])]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, FOLDER: folder}).returncode
        merge(Path(folder), files)
    tests, modules = read()
    print(f"{PATH.name}: {len(tests)} tests, {len(modules)} modules")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
