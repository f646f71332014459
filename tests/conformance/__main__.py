"""Runs the conformance suite, counts its comparisons and writes docs/conformance.md.

``python -m tests.conformance [--only-write] [pytest's arguments]``. The counts of each device are
kept beside this file, so that one machine need not have them all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conformance import ledger, table


def run(arguments: list[str]) -> int:
    """Runs the tests, then keeps the counts of the devices that they ran on."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", str(Path(__file__).parent), *arguments]
        status = subprocess.call(command, env={**os.environ, ledger.VARIABLE: folder})
        if status == 0:
            table.keep(ledger.read(Path(folder)))
    return status


def main(arguments: list[str]) -> int:
    only_write = "--only-write" in arguments
    status = 0 if only_write else run(arguments)
    if status == 0:
        table.PAGE.write_text(table.page())
        print(f"wrote {table.PAGE}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
