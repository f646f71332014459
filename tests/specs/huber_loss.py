"""Huber."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.specs.mse_loss import half_pair, pair
from tests.specs.spec import Spec, Spelling, elementwise_samples, normal, weighted

MATCHES = [
    Spelling("F.huber_loss", F.huber_loss, pair),
    Spelling("delta", lambda a, b: F.huber_loss(a, b, delta=0.3), pair),
    Spelling("sum", lambda a, b: F.huber_loss(a, b, reduction="sum"), pair),
    Spelling("none", lambda a, b: F.huber_loss(a, b, reduction="none", delta=2.0), pair),
    Spelling("nn.HuberLoss", lambda a, b: nn.HuberLoss(delta=0.5)(a, b), pair),
    Spelling("weight", lambda a, b: F.huber_loss(a, b, weight=b.abs()), pair),
    Spelling("weight sum", lambda a, b: F.huber_loss(a, b, "sum", 0.4, b.abs()), pair),
    Spelling("weight none", lambda a, b: F.huber_loss(a, b, reduction="none", weight=b), pair),
    Spelling("weight of a broadcast input", lambda a, b: F.huber_loss(a[0], b, weight=b[0]), pair),
    Spelling("aten", lambda a, b: torch.ops.aten.huber_loss(a, b, 1, 0.5), pair),
    Spelling("of float()", lambda a, b: F.huber_loss(a.float(), b.float()), half_pair),
]

NEAR_MISSES = [
    Spelling("pseudo-Huber", lambda a, b: (torch.sqrt(1 + (a - b) ** 2) - 1).mean(), pair),
]

SPEC = Spec(
    name="huber_loss",
    torch_loss=weighted(F.huber_loss, normalize=False),
    samples=elementwise_samples(
        normal, normal, [{"delta": d} for d in (0.3, 2.0)], weights=(("weight",),)
    ),
    operands=lambda *shape, dtype=torch.float64: (
        torch.randn(shape, dtype=dtype),
        torch.randn(shape, dtype=dtype),
    ),
    matches=MATCHES,
    near_misses=NEAR_MISSES,
)
