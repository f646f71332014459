"""``python -m build_tools.test_wheel PYTHON [PYTEST ARGUMENTS]``: tests of what is installed.

PYTHON is that of an environment in which the package is installed. The tests run in a copy of the
checkout without the package, so that nothing else can be imported, their own processes included.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
#: What setuptools adds to a source distribution beside the files that MANIFEST.in names.
ALWAYS = ("LICENSE", "README.md", "pyproject.toml", "setup.py")
#: The runs in a table of docs/conformance.md.
RECORD = ROOT / "tests" / "conformance" / "counts" / "versions.csv"
#: Commands that PyTorch or the tests start. None of them compiles.
COMMANDS = ("bash", "cat", "env", "file", "git", "ldconfig", "nvidia-smi", "sh", "uname")


def checkout(folder: Path) -> Path:
    """A copy of the checkout without the package, of what a source distribution has."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    manifest = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    named = [words[1:] for words in manifest if words and words[0] in ("graft", "include")]
    for name in ("MANIFEST.in", *ALWAYS, *itertools.chain(*named)):
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def path_without_compilers(folder: Path) -> str:
    """A PATH that holds only COMMANDS."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for command in COMMANDS:
        if found := shutil.which(command):
            (folder / command).symlink_to(found)
    return str(folder)


def record(info: dict[str, str], tests: list[str], outcome: Path) -> None:
    """Writes the counts of a run to RECORD, replacing those of an earlier run of the same kind."""
    suite = xml.etree.ElementTree.parse(outcome).getroot().find("testsuite")
    assert suite is not None
    ran, skipped, failed, errors = (
        int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")
    )
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    row = {
        "torch": info["torch"],
        "python": info["python"],
        "tests": shlex.join(word for word in tests if word != "-q"),
        "passed": str(ran - skipped - failed - errors),
        "skipped": str(skipped),
        "failed": str(failed + errors),
        "commit": commit.strip(),
    }
    rows = []
    if RECORD.exists():
        with RECORD.open(newline="") as file:
            rows = list(csv.DictReader(file))
    kind = ("torch", "python", "tests")
    rows = [old for old in rows if any(old[name] != row[name] for name in kind)]
    with RECORD.open("w", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*rows, row], key=lambda each: [each[name] for name in kind]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-compilers", action="store_true", help="with none on the PATH")
    parser.add_argument("--without-nvcc", action="store_true", help="with none on the PATH")
    parser.add_argument("--record", action="store_true", help=f"the counts, in {RECORD.name}")
    parser.add_argument("python", type=Path)
    arguments, rest = parser.parse_known_args()
    # A folder of its own, because tests of two versions of torch may run at a time.
    folder = checkout(ROOT / "build" / "installed" / str(os.getpid()))
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    if arguments.without_compilers:
        environment["PATH"] = path_without_compilers(folder / "commands")
    if arguments.without_nvcc:
        folders = environment["PATH"].split(os.pathsep)
        kept = [folder for folder in folders if not Path(folder, "nvcc").exists()]
        environment["PATH"] = os.pathsep.join(kept)
    if arguments.without_compilers or arguments.without_nvcc:
        for name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH"):
            environment.pop(name, None)
    # Not resolved, because Python finds its environment by the link.
    python = arguments.python.absolute()

    def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, *command], cwd=folder, env=environment, **options)

    where = "import compile_losses as c; print(c.__file__)"
    found = run("-c", where, stdout=subprocess.PIPE, text=True)
    if found.returncode or "site-packages" not in found.stdout:
        print(f"expected compile_losses in the environment of {python}, got {found.stdout!r}")
        return 1
    told = run("-m", "compile_losses", "info", "--json", stdout=subprocess.PIPE, text=True)
    print(told.stdout, flush=True)
    outcome = folder / "outcome.xml"
    status = run(
        *["-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={outcome}", *rest]
    ).returncode
    if arguments.record and status in (0, 1):  # pytest ran to the end
        record(json.loads(told.stdout), rest, outcome)
        write = "from tests.conformance import table; table.PAGE.write_text(table.page())"
        subprocess.run([python, "-c", write], cwd=ROOT, check=True)
    shutil.rmtree(folder)
    return status or told.returncode


if __name__ == "__main__":
    sys.exit(main())
