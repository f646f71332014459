"""The form in which ``aot_compile`` saves a function compiled with this package's passes."""

from __future__ import annotations

from typing import Any

import compile_losses.ops  # noqa: F401  declares what the compiled code calls
from compile_losses.torch_internals.artifacts import SavedCallable


class Artifact(SavedCallable):
    """A compiled function that imports this package when it is loaded, since it calls the ops.

    Torch saves an artifact's class by its name, so loading imports the class's module. If torch
    saves an object of a class of its own around this one, what is saved of this one does.
    """

    def serialize(self) -> Any:
        return _Saved(self.compiled_fn.serialize())


class _Saved:
    """What torch saves of a compiled function; pickle imports the module of the function below."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    def __reduce__(self) -> Any:
        return _loaded, (self.entry,)


def _loaded(entry: Any) -> Any:
    return entry
