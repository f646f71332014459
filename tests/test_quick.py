"""What ``make quick`` chooses, the map that it chooses by, and the faults that it is tried on."""

from __future__ import annotations

from collections import Counter

import pytest

from compile_losses.library import PACKAGE
from tests import coverage_map, quick
from tests.corpus import _MODULES, PROGRAMS
from tests.coverage_map import Recorded, spread
from tests.coverage_map import test_of as name_of_test  # no test of this file
from tests.planted import FAULTS

TESTS = {
    "tests/passes/test_cost.py::test_feeds": Recorded(0.02, 9, 6),
    "tests/passes/test_programs.py::test_planned[rows": Recorded(0.3, 20, 60),
    "tests/test_lower.py::test_general": Recorded(2.0, 30, 70),
    "tests/test_lower.py::test_long": Recorded(100.0, 1, 5),
    "tests/test_plan.py::test_special": Recorded(1.0, 2, 9),
    "tests/test_gone.py::test_deleted": Recorded(1.0, 1, 1),
}
MODULES = {"compile_losses/lower/cost.py": [*TESTS]}


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    path = tmp_path / "map.txt"
    coverage_map.write(TESTS, MODULES, path)
    monkeypatch.setattr(quick, "read", lambda: coverage_map.read(path))
    return path


def test_the_map_is_read_as_it_is_written(recorded):
    tests, modules = coverage_map.read(recorded)
    assert tests == dict(sorted(TESTS.items()))
    assert {m: set(names) for m, names in modules.items()} == {
        m: set(n) for m, n in MODULES.items()
    }
    assert coverage_map.read(recorded.parent / "none") == ({}, {})


def test_most_specific_first(recorded):
    choice, reason = quick.choose(["compile_losses/lower/cost.py", "docs/index.md"])
    assert next(iter(choice.cases)) == "tests/passes/test_cost.py::test_feeds"
    order = [name for name in choice.cases if "test_lower" in name or "test_plan.py" in name]
    assert order[0].endswith("test_special")
    assert "tests/test_lower.py::test_long" not in choice.cases
    assert choice.seconds <= quick.SECONDS
    assert "compile_losses/lower/cost.py" in reason
    assert "by name alone" not in reason


def test_unknown_modules_choose_by_name(recorded):
    choice, reason = quick.choose(
        ["compile_losses/ops/huber_loss.py", "compile_losses/terminal.py"]
    )
    assert "tests/test_terminal.py" in choice.cases
    assert "by name alone: compile_losses/ops/huber_loss.py, compile_losses/terminal.py" in reason


def test_changed_tests_are_run(recorded):
    choice, _ = quick.choose(["tests/test_import.py", "tests/test_never_there.py"])
    assert next(iter(choice.cases)) == "tests/test_import.py"
    assert "tests/test_never_there.py" not in choice.cases


def test_without_a_map(monkeypatch):
    monkeypatch.setattr(quick, "read", lambda: ({}, {}))
    choice, reason = quick.choose(["compile_losses/lower/cost.py"])
    assert "tests/passes/test_cost.py" in choice.cases
    assert reason.startswith("quick: ")


def test_every_change_fits():
    """Whatever module has changed, the recorded seconds of what is chosen fit."""
    for path in sorted(PACKAGE.rglob("*.py")):
        choice, _ = quick.choose([path.relative_to(PACKAGE.parent).as_posix()])
        assert choice.seconds <= quick.SECONDS
        assert choice.cases


def test_cases():
    items = list(range(10))
    assert spread(items, 2) == [0, 9]
    assert spread(items, 3) == [0, 4, 9]
    assert spread(items, 1) == [0]
    assert spread(items, 0) == []
    assert spread(items, 20) == items


def test_names_of_tests():
    assert name_of_test("tests/test_x.py::A::test_y[a-b]") == "tests/test_x.py::A::test_y"
    program = "tests/passes/test_programs.py::test_planned[rows: focal]"
    assert name_of_test(program) == "tests/passes/test_programs.py::test_planned[rows"


def test_faults_can_be_planted():
    """Each text is in its module, once; twenty modules have one."""
    for fault in FAULTS:
        text = (PACKAGE / fault.module).read_text()
        assert text.count(fault.old) == 1, fault
    assert len({fault.module for fault in FAULTS}) >= 20


def test_names_of_programs():
    names = Counter(p.name for m in _MODULES for p in getattr(m, "PROGRAMS", ()))
    assert [name for name, count in names.items() if count > 1] == []
    assert len(names) == len(PROGRAMS) > 900
