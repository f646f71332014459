"""The ops, one file a loss. Importing this package declares ``fused::*`` and loads the kernels."""

import importlib
import pkgutil

from compile_losses import implementations, library
from compile_losses.ops.linear import vocabulary_parallel_divergence as _divergence  # noqa: F401
from compile_losses.ops.linear import vocabulary_parallel_statistics as _statistics  # noqa: F401

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

implementations.begin()

_INTERNAL = "Internal to compile_losses: a part of other ops, which may change in any release."
_PUBLIC = library.documented_ops()
for _name in library.DECLARED:
    _public = _name in _PUBLIC
    _text = importlib.import_module(f"{__name__}.{_name}").__doc__ if _public else _INTERNAL
    library.document(_name, _text)
