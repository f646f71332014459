"""COMPILE_LOSSES_ENABLE=1: ``enable()`` in a program that can't be changed.

``import torch`` calls :func:`autoload`, by the entry point ``torch.backends``, and so does ``import
compile_losses``. Every import of torch runs this, and without the variable it does nothing else.
The module is outside of the package, which would load its ops.
"""

import os
from typing import Any


def autoload() -> None:
    """With COMPILE_LOSSES_ENABLE=1, the first compilation by ``torch.compile``'s default backend
    switches the package on. Nothing is imported before."""
    if os.environ.get("COMPILE_LOSSES_ENABLE", "0").lower() in ("", "0", "false"):
        return
    import torch

    kind: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
    if kind is None or getattr(kind.__call__, "autoloads", False):
        return
    following = kind.__call__
    is_on = False

    def first(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_on
        if kind.__call__ is first:
            kind.__call__ = following
        elif is_on:  # the program calls enable() as well, whose function calls this one
            return following(*args, **kwargs)
        from compile_losses.default_backend import enable_in_every_thread

        is_on = True
        enable_in_every_thread()
        return kind.__call__(*args, **kwargs)

    first.autoloads = True  # type: ignore[attr-defined]
    kind.__call__ = first
