"""L1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.specs.mse_loss import half_pair, pair
from tests.specs.spec import Spec, Spelling, elementwise_samples, normal, weighted

MATCHES = [
    Spelling("F.l1_loss", F.l1_loss, pair),
    Spelling("sum", lambda a, b: F.l1_loss(a, b, reduction="sum"), pair),
    Spelling("none", lambda a, b: F.l1_loss(a, b, reduction="none"), pair),
    Spelling("legacy", lambda a, b: F.l1_loss(a, b, size_average=False), pair),
    Spelling("nn.L1Loss", lambda a, b: nn.L1Loss()(a, b), pair),
    Spelling("weight", lambda a, b: F.l1_loss(a, b, weight=b.abs()), pair),
    Spelling("weight sum", lambda a, b: F.l1_loss(a, b, reduction="sum", weight=b), pair),
    Spelling("aten", lambda a, b: torch.ops.aten.l1_loss(a, b, 2), pair),
    Spelling("equal elements", lambda a, b: F.l1_loss(a * (a > 0), b * 0), pair),
    Spelling("of float()", lambda a, b: F.l1_loss(a.float(), b.float()), half_pair),
]

NEAR_MISSES = [
    Spelling(
        "integers",
        lambda a, b: F.l1_loss(a, b, reduction="sum"),
        lambda: (torch.arange(6), torch.arange(6) + 1),
        "expected input to be float",
    ),
    Spelling("absolute values", lambda a, b: (a.abs() - b.abs()).mean(), pair),
]

SPEC = Spec(
    name="l1_loss",
    torch_loss=weighted(F.l1_loss, normalize=True),
    samples=elementwise_samples(normal, normal, [], weights=(("weight",),)),
    operands=lambda *shape, dtype=torch.float64: (
        torch.randn(shape, dtype=dtype),
        torch.randn(shape, dtype=dtype),
    ),
    matches=MATCHES,
    near_misses=NEAR_MISSES,
)
