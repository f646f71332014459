"""COMPILE_LOSSES_ENABLE=1: ``enable()`` in a program that can't be changed.

``import torch`` calls :func:`autoload`, by the entry point ``torch.backends``, and so does ``import
compile_losses``. Every import of torch runs this, and without the variable it does nothing else.
The module is outside of the package, which would load its ops.
"""

import importlib.util
import os
import sys
from typing import Any

#: The modules of known heads, which are met where nothing is compiled, too.
MODULES = (
    "trl.kernels.chunked_logprob",
    "liger_kernel.ops.fused_linear_cross_entropy",
    "verl.utils.kernel.linear_cross_entropy",
    "verl.utils.experimental.torch_functional",
)


def autoload() -> None:
    """With COMPILE_LOSSES_ENABLE=1, the first compilation by ``torch.compile``'s default backend
    switches the package on, or the import of a known head. Nothing is imported before."""
    if os.environ.get("COMPILE_LOSSES_ENABLE", "0").lower() in ("", "0", "false"):
        return
    import torch

    kind: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
    if kind is None or getattr(kind.__call__, "autoloads", False):
        return
    following = kind.__call__
    is_on = False

    def switch_on() -> None:
        nonlocal is_on
        if kind.__call__ is first:
            kind.__call__ = following
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        from compile_losses.default_backend import enable_in_every_thread

        is_on = True
        enable_in_every_thread()

    def first(*args: Any, **kwargs: Any) -> Any:
        # The program calls enable() as well, whose function calls this one.
        if is_on and kind.__call__ is not first:
            return following(*args, **kwargs)
        switch_on()
        return kind.__call__(*args, **kwargs)

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name not in MODULES:
                return None
            switch_on()
            return importlib.util.find_spec(name)

    finder: Any = Finder
    first.autoloads = True  # type: ignore[attr-defined]
    kind.__call__ = first
    sys.meta_path.insert(0, finder)
