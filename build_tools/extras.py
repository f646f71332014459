"""``python -m build_tools.extras demo,test`` prints the packages of these extras, one a line.

Pip can install the packages of an extra only after it has built the package. The Makefile installs
them meanwhile.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools.compat.py310 import tomllib

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def packages(extras: list[str]) -> list[str]:
    """Those that pyproject.toml names for the extras.

    Raises:
        KeyError: there is no extra of a name.
    """
    named = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    return [package for extra in extras for package in named[extra]]


if __name__ == "__main__":
    print(*packages(sys.argv[1].split(",")), sep="\n")
