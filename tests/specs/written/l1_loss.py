"""Absolute error, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.specs.inputs import half_pair, learned_pair, masked_pair, pair, weighted_pair
from tests.specs.spec import Spelling


def masked_mean(a, b, mask):
    return ((a - b).abs() * mask).sum() / mask.sum()


def equal_elements(a, b):
    """Where both are 0 the gradient is, too."""
    a, b = F.relu(a), F.relu(b)
    return (a - b).abs().sum()


MATCHES = [
    Spelling("mean", lambda a, b: (a - b).abs().mean(), pair),
    Spelling("torch.abs", lambda a, b: torch.mean(torch.abs(a - b)), pair),
    Spelling("sum", lambda a, b: torch.abs(b - a).sum(), pair),
    Spelling("built-in abs", lambda a, b: abs(a - b).mean(), pair),
    Spelling("sum over batch", lambda a, b: (a - b).abs().sum() / a.size(0), pair),
    Spelling("mean of sums", lambda a, b: (a - b).abs().sum(1).mean(), pair),
    Spelling("learned target", lambda a, b: (a - b).abs().mean(), learned_pair),
    Spelling("weighted", lambda a, b, w: (w * (a - b).abs()).mean(), weighted_pair),
    Spelling("masked mean", masked_mean, masked_pair),
    Spelling("larger of both signs", lambda a, b: torch.maximum(a - b, b - a).mean(), pair),
    Spelling("two halves", lambda a, b: (F.relu(a - b) + F.relu(b - a)).mean(), pair),
    Spelling("equal elements", equal_elements, pair),
    Spelling("of float()", lambda a, b: (a.float() - b.float()).abs().mean(), half_pair),
    Spelling("none, then sum", lambda a, b: F.l1_loss(a, b, reduction="none").sum(), pair),
    Spelling("twice the mean", lambda a, b: (2 * (a - b).abs()).mean(), pair),
]


def chosen_sign(a, b):
    """Its gradient is -1 where both are equal."""
    d = a - b
    return torch.where(d > 0, d, -d).mean()


NEAR_MISSES = [
    Spelling("no absolute value", lambda a, b: (a - b).mean(), pair),
    Spelling("of the mean", lambda a, b: (a - b).mean().abs(), pair),
    Spelling("a chosen sign", chosen_sign, pair),
    Spelling("one side", lambda a, b: F.relu(a - b).mean(), pair),
    Spelling("with eps", lambda a, b: ((a - b).abs() + 1e-6).mean(), pair),
    Spelling("clamped", lambda a, b: (a - b).abs().clamp(max=1e3).mean(), pair),
    Spelling("detached", lambda a, b: (a - b).detach().abs().mean() + 0 * a.sum(), pair),
    Spelling("row sums", lambda a, b: (a - b).abs().sum(1), pair),
    Spelling("of absolute values", lambda a, b: (a.abs() - b.abs()).sum(), pair),
    Spelling("sign", lambda a, b: (a - b).sign().mean() + 0 * a.sum(), pair),
    Spelling("largest", lambda a, b: (a - b).abs().max(), pair),
]
