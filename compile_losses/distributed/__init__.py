"""Losses of DTensors, and data-parallel training. Imports nothing of torch.distributed.

A public op that is given DTensors computes on each rank's own shard and exchanges at most a few
numbers: see docs/distributed.md for the layouts and what each of them costs.
"""

from __future__ import annotations

import sys
from typing import Any


def are_dtensors(*values: Any) -> bool:
    """Whether any of them is a DTensor; there is none before its module is imported."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None:
        return False
    # Not any(): this is on the way of every eager call.
    for value in values:  # noqa: SIM110
        if isinstance(value, kind):
            return True
    return False
