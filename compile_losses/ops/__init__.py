"""The ops, one file a loss. Importing this package loads the kernels and declares ``fused::*``."""

import importlib
import pkgutil

from compile_losses.ops.linear import vocabulary_parallel_divergence as _divergence  # noqa: F401
from compile_losses.ops.linear import vocabulary_parallel_statistics as _statistics  # noqa: F401

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
