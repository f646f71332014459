"""One spec a loss: what it is in float64, inputs that hurt, spellings that must and must not match.

The suites iterate over ``SPECS``; a new loss is a new file here. Spellings in torch's other
functions are in a file of the same name in ``written``.
"""

import importlib
import pkgutil

from tests.specs import written
from tests.specs.spec import Spec

_MODULES = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]

SPECS: dict[str, Spec] = {m.SPEC.name: m.SPEC for m in _MODULES if hasattr(m, "SPEC")}

for _name in written.MODULES.keys() & SPECS.keys():
    SPECS[_name].matches.extend(written.MODULES[_name].MATCHES)
    SPECS[_name].near_misses.extend(written.MODULES[_name].NEAR_MISSES)
