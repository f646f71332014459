"""Every program once: the spellings of the specs, heads, elementwise losses, and near misses.

A module holds functions of one kind, which test files import, and lists them in ``PROGRAMS``.
``captured`` and what follows it make graphs of a program, for tests of passes.
"""

from __future__ import annotations

import importlib
import pkgutil

from tests.corpus.program import Program

_MODULES = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]

#: By their names.
PROGRAMS: dict[str, Program] = {
    program.name: program for module in _MODULES for program in getattr(module, "PROGRAMS", ())
}
