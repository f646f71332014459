"""Huber."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from compile_losses.ops.huber_loss import reference
from tests.specs.mse_loss import half_pair, pair
from tests.specs.spec import Spec, Spelling, elementwise_samples, normal
from tests.specs.written import huber_loss as written

MATCHES = [
    Spelling("F.huber_loss", F.huber_loss, pair),
    Spelling("delta", lambda a, b: F.huber_loss(a, b, delta=0.3), pair),
    Spelling("sum", lambda a, b: F.huber_loss(a, b, reduction="sum"), pair),
    Spelling("none", lambda a, b: F.huber_loss(a, b, reduction="none", delta=2.0), pair),
    Spelling("nn.HuberLoss", lambda a, b: nn.HuberLoss(delta=0.5)(a, b), pair),
    Spelling("aten", lambda a, b: torch.ops.aten.huber_loss(a, b, 1, 0.5), pair),
    Spelling("of float()", lambda a, b: F.huber_loss(a.float(), b.float()), half_pair),
]

NEAR_MISSES = [
    Spelling("weighted", lambda a, b: F.huber_loss(a, b, weight=b.abs()), pair, "weight"),
    Spelling("pseudo-Huber", lambda a, b: (torch.sqrt(1 + (a - b) ** 2) - 1).mean(), pair),
]

SPEC = Spec(
    name="huber_loss",
    torch_loss=lambda input, target, reduction=1, delta=1.0: reference(
        input, target, reduction, delta
    ),
    samples=elementwise_samples(normal, normal, [{"delta": d} for d in (0.3, 2.0)]),
    operands=lambda *shape, dtype=torch.float64: (
        torch.randn(shape, dtype=dtype),
        torch.randn(shape, dtype=dtype),
    ),
    matches=[*MATCHES, *written.MATCHES],
    near_misses=[*NEAR_MISSES, *written.NEAR_MISSES],
)
