"""Every private name of torch that this package uses, behind a public one.

Nothing else in the package names them, which ``tests/test_layout.py`` says; each has a test in
``tests/test_torch_internals.py``. What differs between versions of torch differs here.

=============  ===================================================================================
``ops``        ops, their schemas and the dispatcher
``eager``      what is in force around an eager call
``tensors``    fake tensors, storages and versions
``graphs``     what torch writes into the nodes of its graphs
``dynamo``     Dynamo
``inductor``   AOTAutograd and Inductor
``artifacts``  what ``aot_compile`` saves
``dtensors``   the shards of DTensors and their collectives
=============  ===================================================================================

The first four load nothing that ``import torch`` does not; the others load what they are named for.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch

#: The newest torch that the tests have run on.
NEWEST_TESTED = (2, 15)


@cache
def warn_if_untested() -> None:
    """Warns once where torch is newer than what was tested: a private name may have changed."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version > NEWEST_TESTED:
        warnings.warn(
            f"compile_losses was tested with torch up to {'.'.join(map(str, NEWEST_TESTED))}, and "
            f"this is torch {torch.__version__}. Losses that it can't take are left to torch",
            stacklevel=2,
        )
