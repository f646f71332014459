"""A new elementwise loss takes a functor, an op file, a row in the table and a spec, nothing else.

The test adds that of a tutorial to a copy of the checkout. The suites that go through the specs
then test it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from compile_losses.library import PACKAGE
from tests import ROOT

pytest.importorskip("ninja")

NAME = "soft_margin_loss"

#: The page that shows it: its cells are what is added.
PAGE = ROOT / "docs" / "tutorials" / "own_op.ipynb"

#: The four places.
ADDED = {
    f"csrc/losses/elementwise/{NAME}.h",
    f"compile_losses/ops/{NAME}.py",
    "compile_losses/recognize/spellings/table.py",
    f"tests/specs/{NAME}.py",
}

#: The tests that have to run, of the suites below.
TESTS = {
    "test_accuracy",
    "test_sizes",
    "test_repeatable",
    "test_unreduced_layout_is_torchs",
    "test_opcheck",
    "test_opcheck_leaves",
    "test_with_grad",
    "test_gradcheck",
    "test_match",
    "test_near_miss",
    "test_loss",
    "test_public_schema_follows_torch",
    "test_wrong_arguments_of_every_op",
}
SUITES = ("test_ops", "test_ops_gradients", "test_recognize", "test_layout")
SUITES += ("conformance/test_hostile",)


def copy_of_checkout(folder: Path) -> None:
    """What the build and the suites read, with the times of the files, but no library."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "kernels.json")
    for source in (PACKAGE, *(ROOT / name for name in ("build_tools", "csrc", "tests"))):
        shutil.copytree(source, folder / source.name, ignore=ignored)
    shutil.copy2(ROOT / "pyproject.toml", folder)


def add_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tutorial's cells write into the copy."""
    monkeypatch.chdir(folder)
    for cell in json.loads(PAGE.read_text())["cells"]:
        first, _, rest = "".join(cell["source"]).partition("\n")
        if first.startswith("%%writefile ") and "/" in first:  # else it is a script beside them
            Path(first.removeprefix("%%writefile ")).write_text(f"{rest}\n")
        elif first.startswith("table = "):
            exec(f"{first}\n{rest}", {"Path": Path})


def contents(folder: Path) -> dict[str, str]:
    """A hash of each file that is no output."""
    made = {"__pycache__", ".hypothesis", "build"}
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".so" and not made & {*path.parts}
    }


def run(folder: Path, *command: str) -> str:
    """What a process of Python in the copy prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment = {"MAX_JOBS": "2", **environment, "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.slow  # the tutorial of an own op builds the same files
def test_four_places(tmp_path, monkeypatch):
    folder = tmp_path / "checkout"
    copy_of_checkout(folder)
    before = contents(folder)
    add_loss(folder, monkeypatch)

    run(folder, "-m", "build_tools.rebuild", NAME, str(ROOT / "build" / "kernels"))
    outcome = tmp_path / "outcome.xml"
    suites = [f"tests/{suite}.py" for suite in SUITES]
    # Millions of numbers, twenty times, are much for a library without optimizations.
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    options += ["-k", f"{NAME} and not 20_times"]
    run(folder, "-m", "pytest", *suites, *options, f"--junitxml={outcome}")

    cases = xml.etree.ElementTree.parse(outcome).iter("testcase")
    passed = [case.get("name", "") for case in cases if not len(case)]
    assert {name.partition("[")[0] for name in passed} >= TESTS
    assert all(NAME in name for name in passed)
    after = contents(folder)
    assert {path for path in after if after[path] != before.get(path)} == ADDED
    assert after.keys() >= before.keys()
