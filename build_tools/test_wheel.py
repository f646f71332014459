"""``python -m build_tools.test_wheel PYTHON [PYTEST ARGUMENTS]``: tests of what is installed.

PYTHON is that of an environment in which the package is installed. The tests run in a copy of the
checkout without the package, so that nothing else can be imported, their own processes included.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("benchmarks", "build_tools", "constraints.txt", "csrc", "docs", "examples", "tests")
#: Commands that PyTorch or the tests start, none of which compiles.
COMMANDS = ("bash", "cat", "env", "file", "git", "ldconfig", "nvidia-smi", "sh", "uname")


def checkout(folder: Path) -> Path:
    """A copy of all but the package, README.md and pyproject.toml included."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (*COPIED, "README.md", "CONTRIBUTING.md", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def path_without_compilers(folder: Path) -> str:
    """A PATH of nothing but COMMANDS."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for command in COMMANDS:
        if found := shutil.which(command):
            (folder / command).symlink_to(found)
    return str(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-compilers", action="store_true", help="with none on the PATH")
    parser.add_argument("python", type=Path)
    arguments, rest = parser.parse_known_args()
    folder = checkout(ROOT / "build" / "installed")
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    if arguments.without_compilers:
        environment["PATH"] = path_without_compilers(ROOT / "build" / "commands")
        for name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH"):
            environment.pop(name, None)
    # Not resolved: the link is what tells Python its environment.
    python = arguments.python.absolute()
    where = "import compile_losses as c; print(c.__file__)"
    found = subprocess.run(
        [python, "-c", where], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    if found.returncode or "site-packages" not in found.stdout:
        print(f"expected compile_losses in the environment of {python}, got {found.stdout!r}")
        return 1
    for command in (["compile_losses", "info"], ["pytest", "-p", "no:cacheprovider", *rest]):
        status = subprocess.run([python, "-m", *command], cwd=folder, env=environment).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
