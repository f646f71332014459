"""The tests of what changed, in less than a minute: ``make quick``.

These are the tests of passes, a part of the programs of the corpus, and tests that the map of
``tests.coverage_map`` names for the changed modules: those first that execute the fewest modules,
as many as fit. For a module that the map does not know, tests are chosen by its name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import ROOT
from tests.coverage_map import Recorded, grouped, read, spread

#: The processor's seconds that the chosen tests may take, by what was recorded: a second core and
#: the start of the processes are not counted.
SECONDS = 60.0
#: Of those, for the tests of passes that belong to no changed module.
OF_ALL_PASSES = 30.0
#: The cases of a chosen test, and of the programs of one module of the corpus.
CASES, OF_PROGRAMS = 2, 4
PASSES = "tests/passes/"
PROGRAMS = "tests/passes/test_programs.py"
#: Names the file that lists the chosen tests.
CHOSEN = "COMPILE_LOSSES_CHOSEN_TESTS"


def changed_files() -> list[str]:
    """What differs from the last commit, and from where this branch began."""
    commands = [
        ["diff", "--name-only", "HEAD"],
        ["ls-files", "--others", "--exclude-standard"],
    ]
    base = _git(["merge-base", "HEAD", "main"]) or _git(["merge-base", "HEAD", "origin/main"])
    if base:
        commands.append(["diff", "--name-only", base[0]])
    return sorted({line for command in commands for line in _git(command)})


def _git(arguments: list[str]) -> list[str]:
    found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.split("\n")[:-1] if found.returncode == 0 else []


class Choice:
    """Tests with how many of their cases, within a budget.

    Attributes:
        cases: of each chosen test, or file.
        seconds: of the processor, as recorded.
    """

    def __init__(self, tests: dict[str, Recorded]) -> None:
        self.tests = tests
        self.cases: dict[str, int] = {}
        self.seconds = 0.0

    def add(self, name: str, most: int, budget: float) -> bool:
        """Adds a test, or a file; a test that is not recorded counts as a second."""
        known = self.tests.get(name, Recorded(1.0, 1, 0))
        count = min(most, known.cases)
        if name in self.cases or self.seconds + count * known.seconds > budget:
            return False
        self.cases[name] = most
        self.seconds += count * known.seconds
        return True


def choose(changed: list[str]) -> tuple[Choice, str]:
    """The tests for some changed files, and a line that says why."""
    tests, modules = read()
    choice = Choice(tests)
    sources = [f for f in changed if f.startswith("compile_losses/") and f.endswith(".py")]
    own = [f for f in changed if f.startswith("tests/") and Path(f).name.startswith("test_")]
    by_name: list[str] = []
    for file in own:
        if (ROOT / file).exists():
            _add_file(choice, file, SECONDS)
    for source in sources:
        parent = Path(source).parent.name
        stem = parent if Path(source).stem == "__init__" else Path(source).stem
        of_folder = f"{PASSES}test_{parent}.py"
        for file in (f"{PASSES}test_{stem}.py", of_folder, f"tests/test_{stem}.py"):
            if (ROOT / file).exists():
                _add_file(choice, file, SECONDS)
        if source not in modules:
            by_name.append(source)
            for found in sorted((ROOT / "tests").rglob(f"test_*{stem}*.py")):
                _add_file(choice, found.relative_to(ROOT).as_posix(), SECONDS)
    passes = [name for name in tests if name.startswith(PASSES) and not name.startswith(PROGRAMS)]
    budget = min(SECONDS, choice.seconds + OF_ALL_PASSES)
    for name in sorted(passes, key=lambda n: tests[n].seconds * tests[n].cases):
        choice.add(name, CASES * 2, budget)
    fitting = [name for source in sources for name in modules.get(source, ())]
    for name in sorted(set(fitting), key=lambda n: (tests[n].modules, tests[n].seconds)):
        choice.add(name, OF_PROGRAMS if name.startswith(PROGRAMS) else CASES, SECONDS)
    for name in tests:  # what is left of the time goes to programs of all kinds
        if name.startswith(PROGRAMS):
            choice.add(name, OF_PROGRAMS, SECONDS)
    about = ", ".join(sources) or "no changed module"
    extra = f"; by name alone: {', '.join(by_name)}" if by_name else ""
    mapped = sum(name in choice.cases and not name.startswith(PASSES) for name in set(fitting))
    reason = (
        f"quick: {len(choice.cases)} tests, about {choice.seconds:.0f} s of one core: those of "
        f"passes, and {mapped} of the {len(set(fitting))} that are known to execute {about}, the "
        f"most specific first{extra}"
    )
    return choice, reason


def _add_file(choice: Choice, file: str, budget: float) -> None:
    recorded = [name for name in choice.tests if name.startswith(f"{file}::")]
    for name in recorded or [file]:
        choice.add(
            name,
            choice.tests[name].cases if recorded and file.startswith(PASSES) else CASES,
            budget,
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = os.environ.get(CHOSEN)
    if path is None:
        return
    chosen: dict[str, int] = json.loads(Path(path).read_text())
    order = {name: i for i, name in enumerate(chosen)}
    known, _ = read()
    kept: list[tuple[int, pytest.Item]] = []
    for name, cases in grouped(items).items():
        key = name if name in chosen else name.partition("::")[0]
        # A test that the map does not know is new, in a file of which others are chosen.
        most = chosen.get(key, 0 if name in known else CASES)
        kept += [(order.get(key, -1), item) for item in spread(cases, most)]
    kept.sort(key=lambda pair: pair[0])  # those of the changed modules come first
    config.hook.pytest_deselected(items=list(set(items) - {item for _, item in kept}))
    items[:] = [item for _, item in kept]


def main(arguments: list[str]) -> int:
    choice, reason = choose(changed_files())
    print(reason, flush=True)
    files = sorted({name.partition("::")[0] for name in choice.cases})
    files = [file for file in files if (ROOT / file).exists()]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as chosen:
        chosen.write(json.dumps(choice.cases))
        chosen.flush()
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "tests.quick"]
        command += ["-m", "not slow", "--disable-warnings", *arguments, *files]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, CHOSEN: chosen.name}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
