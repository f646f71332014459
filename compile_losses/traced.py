"""By which settings the graph is rewritten that Dynamo traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compile_losses.torch_internals.dynamo import traced_for

#: From a backend to the settings by which it rewrites, None where it does not.
_settings_of: list[Callable[[Any], Any]] = []


def settings_by(function: Callable[[Any], Any]) -> None:
    """Has a function asked by which settings the graphs for a backend are rewritten."""
    _settings_of.append(function)


def settings_here() -> Any:
    """The settings of the graph that is traced; None where there is none, or it stays as it is."""
    compiler = traced_for()
    if compiler is None:
        return None
    found = (settings_of(compiler) for settings_of in _settings_of)
    return next(filter(None, found), None)
