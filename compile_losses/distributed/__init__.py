"""Losses of DTensors, and data-parallel training. Imports nothing of torch.distributed.

A public op that is given DTensors computes on each rank's own shard and exchanges at most a few
numbers: see docs/distributed.md for the layouts and what each of them costs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def are_dtensors(*values: Any) -> bool:
    """Whether any of them is a DTensor; there is none before its module is imported."""
    others = [v for v in values if isinstance(v, torch.Tensor) and type(v) not in _PLAIN]
    module = sys.modules.get("torch.distributed.tensor") if others else None
    return module is not None and any(isinstance(value, module.DTensor) for value in others)
