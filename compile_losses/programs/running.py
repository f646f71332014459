"""Programs of users: ``python -m compile_losses run``, and functions to explain or compare."""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
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
    try:
        if is_module:
            sys.argv = list(program[1:])
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(program)
            sys.path[0] = str(script.resolve().parent)
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code in (None, 0):
            _tell_if_none()
        raise
    _tell_if_none()


def _tell_if_none() -> None:
    from compile_losses.report.log_line import tell_if_none

    tell_if_none()


def load(target: str) -> Callable[..., Any]:
    """``path/to/script.py:function`` or ``package.module:function``, dots allowed in the latter."""
    source, separator, name = target.rpartition(":")
    if not separator or not source or not name:
        raise SystemExit(f"expected SCRIPT_OR_MODULE:FUNCTION, got {target!r}")
    if source.endswith(".py"):
        path = Path(source).resolve()
        if not path.is_file():
            raise SystemExit(f"there is no file {source}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        module = importlib.import_module(source)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise SystemExit(f"{source} has no {name}")
        value = getattr(value, part)
    return value
