"""The form in which ``aot_compile`` saves a function compiled with this package's passes."""

from __future__ import annotations

import compile_losses.ops  # noqa: F401  declares what the compiled code calls
from compile_losses.torch_internals.artifacts import SavedCallable


class Artifact(SavedCallable):
    """A compiled function that imports this package when it is loaded, since it calls the ops.

    Torch saves an artifact's class by its name, so loading imports the class's module.
    """

    #: Torch would wrap an object that has this method into a class of its own.
    serialize = None
