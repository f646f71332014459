"""What ``aot_compile`` saves of a function that was compiled with this package's backend."""

from __future__ import annotations

import compile_losses.ops  # noqa: F401  declares what the compiled code calls
from compile_losses.torch_internals.artifacts import SavedCallable


class Artifact(SavedCallable):
    """Imports this package in the process that loads it, whose code calls its ops.

    Torch saves an artifact's class by its name, and so imports its module.
    """

    #: What has one, torch would wrap into a class of its own.
    serialize = None
