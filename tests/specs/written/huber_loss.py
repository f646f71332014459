"""Huber, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.specs.inputs import learned_pair, pair
from tests.specs.spec import Spelling


def where(a, b, delta=2.0):
    d = a - b
    quadratic = 0.5 * d**2
    linear = delta * (d.abs() - 0.5 * delta)
    return torch.where(d.abs() <= delta, quadratic, linear).mean()


def reversed_where(a, b):
    d = torch.abs(b - a)
    return torch.where(d > 0.5, 0.5 * (d - 0.25), 0.5 * d.square()).sum()


def clamped(a, b, delta=0.7):
    """Quadratic and linear parts, as in TensorFlow's and JAX's libraries."""
    d = (a - b).abs()
    quadratic = torch.clamp(d, max=delta)
    linear = d - quadratic
    return (0.5 * quadratic**2 + delta * linear).mean()


def minimum(a, b):
    d = (a - b).abs()
    quadratic = torch.minimum(d, torch.full_like(d, 0.7))
    return (0.5 * quadratic**2 + 0.7 * (d - quadratic)).mean()


def rectified(a, b):
    d = torch.abs(a - b)
    linear = F.relu(d - 1.5)
    quadratic = d - linear
    return (0.5 * quadratic.pow(2) + 1.5 * linear).sum() / d.numel()


def batch_mean(a, b):
    d = a - b
    loss = torch.where(d.abs() < 3, d * d / 2, 3 * d.abs() - 4.5)
    return loss.sum(dim=1).mean()


MATCHES = [
    Spelling("where", where, pair, dynamic=False),
    Spelling("where, delta 0.3", lambda a, b: where(a, b, 0.3), pair),
    Spelling("the other way round", reversed_where, pair),
    Spelling("clamped", clamped, pair, dynamic=False),
    Spelling("minimum", minimum, pair),
    Spelling("rectified", rectified, pair),
    Spelling("mean of sums", batch_mean, pair),
    Spelling("learned target", where, learned_pair, dynamic=False),
    Spelling(
        "smooth L1 times beta",
        lambda a, b: 0.4 * F.smooth_l1_loss(a, b, beta=0.4, reduction="none").mean(),
        pair,
    ),
    Spelling(
        "none, then sum", lambda a, b: F.huber_loss(a, b, reduction="none", delta=0.5).sum(), pair
    ),
]


def other_deltas(a, b):
    d = (a - b).abs()
    return torch.where(d <= 2.0, 0.5 * d**2, 2.0 * (d - 1.1)).mean()


def tukey(a, b):
    d = a - b
    inside = (1 - (1 - (d / 4) ** 2) ** 3) * 16 / 6
    return torch.where(d.abs() <= 4, inside, torch.full_like(d, 16 / 6)).mean()


def hinge(a, b):
    return F.relu((a - b).abs() - 0.1).mean()


def squared_hinge(a, b):
    return (F.relu((a - b).abs() - 0.1) ** 2).mean()


def quantile(a, b):
    d = a - b
    return torch.maximum(0.9 * d, -0.1 * d).mean()


def reverse_huber(a, b):
    d = (a - b).abs()
    return torch.where(d <= 0.5, d, (d**2 + 0.25) / 1.0).mean()


def two_sided(a, b):
    d = a - b
    return torch.where((d < 1) & (d > -2), 0.5 * d**2, d.abs() - 0.5).mean()


NEAR_MISSES = [
    Spelling("constants that do not agree", other_deltas, pair),
    Spelling("Tukey's biweight", tukey, pair),
    Spelling("epsilon-insensitive", hinge, pair),
    Spelling("squared epsilon-insensitive", squared_hinge, pair),
    Spelling("quantile", quantile, pair),
    Spelling("reverse Huber", reverse_huber, pair),
    Spelling("different bounds", two_sided, pair),
    Spelling("Cauchy", lambda a, b: torch.log1p((a - b) ** 2).mean(), pair),
    Spelling("Charbonnier", lambda a, b: torch.sqrt((a - b) ** 2 + 1e-6).mean(), pair),
]
