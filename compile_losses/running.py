"""``python -m compile_losses run``: another program, with ``enable()``, without a change of it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compile_losses.options import Settings

ENABLE = "COMPILE_LOSSES_ENABLE"


def run(program: Sequence[str], options: Mapping[str, Any]) -> None:
    """Runs a script, or a module after ``-m``, as Python itself does.

    The options become variables in the environment, so that processes of the program have them.

    Args:
        program: ``[script, *arguments]`` or ``["-m", module, *arguments]``.

    Raises:
        SystemExit: there is no such script; or the program raises it.
        InvalidOptionError: as for ``enable``.
    """
    from _compile_losses_autoload import autoload

    variables = {**Settings.variables(options), ENABLE: "1"}
    is_module, script = program[0] == "-m", Path(program[0])
    if is_module and len(program) < 2:
        raise SystemExit("run -m: expected a module")
    if not is_module and not script.exists():
        raise SystemExit(f"there is no file {script}")
    os.environ.update(variables)
    autoload()
    if is_module:
        sys.argv = list(program[1:])
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(program)
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")
