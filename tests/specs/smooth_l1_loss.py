"""Smooth L1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.specs.mse_loss import half_pair, pair
from tests.specs.spec import Spec, Spelling, elementwise_samples, normal, weighted


def gathered(a, b):
    """DQN: the values of the actions taken."""
    actions = torch.zeros(a.shape[0], 1, dtype=torch.int64)
    return F.smooth_l1_loss(a.gather(1, actions).squeeze(1), b[:, 0])


MATCHES = [
    Spelling("F.smooth_l1_loss", F.smooth_l1_loss, pair),
    Spelling("beta", lambda a, b: F.smooth_l1_loss(a, b, beta=0.3), pair),
    Spelling("beta 0", lambda a, b: F.smooth_l1_loss(a, b, beta=0.0), pair),
    Spelling("sum", lambda a, b: F.smooth_l1_loss(a, b, reduction="sum"), pair),
    Spelling("none", lambda a, b: F.smooth_l1_loss(a, b, reduction="none", beta=2.0), pair),
    Spelling("nn.SmoothL1Loss", lambda a, b: nn.SmoothL1Loss(beta=0.5)(a, b), pair),
    Spelling("aten", lambda a, b: torch.ops.aten.smooth_l1_loss(a, b, 1, 0.5), pair),
    Spelling("gathered values", gathered, pair),
    Spelling("of float()", lambda a, b: F.smooth_l1_loss(a.float(), b.float()), half_pair),
]

NEAR_MISSES = [
    Spelling("soft margin", lambda a, b: F.soft_margin_loss(a, b.sign()), pair),
    Spelling("log-cosh", lambda a, b: torch.log(torch.cosh(a - b)).mean(), pair),
]

SPEC = Spec(
    name="smooth_l1_loss",
    torch_loss=weighted(F.smooth_l1_loss, normalize=True),
    samples=elementwise_samples(
        normal, normal, [{"beta": b} for b in (0.0, 0.3, 2.0)], weights=(("weight",),)
    ),
    operands=lambda *shape, dtype=torch.float64: (
        torch.randn(shape, dtype=dtype),
        torch.randn(shape, dtype=dtype),
    ),
    matches=MATCHES,
    near_misses=NEAR_MISSES,
)
