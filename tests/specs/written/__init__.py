"""Losses as people write them: spellings that must match, and near misses that must not."""

import importlib
import pkgutil

#: By the name of the spec that they extend.
MODULES = {
    m.name: importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
}
