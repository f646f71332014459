"""Smooth L1, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.specs.inputs import half_pair, learned_pair, pair
from tests.specs.spec import Spelling


def where(a, b, beta=1.0):
    d = torch.abs(a - b)
    return torch.where(d < beta, 0.5 * d * d / beta, d - 0.5 * beta).mean()


def reversed_where(a, b):
    d = (a - b).abs()
    return torch.where(d >= 0.5, d - 0.25, d**2).mean()


def at_most(a, b):
    d = a - b
    return torch.where(d.abs() <= 0.3, d.pow(2) / 0.6, d.abs() - 0.15).sum()


def beta_left(a, b):
    d = (a - b).abs()
    return torch.where(d < 0.5, d.square(), d - 0.25).mean(dim=-1).mean()


def scaled(a, b):
    """In units of beta."""
    z = (a - b).abs() / 0.4
    return (torch.where(z < 1, 0.5 * z**2, z - 0.5) * 0.4).mean()


def clamped(a, b):
    d = (a - b).abs()
    q = torch.clamp(d, max=1.0)
    return (0.5 * q * q + (d - q)).mean()


def masks(a, b):
    d = (b - a).abs()
    small = (d < 1).float()
    return (small * 0.5 * d**2 + (1 - small) * (d - 0.5)).mean()


def difference_written_twice(a, b):
    return torch.where((a - b).abs() < 1, 0.5 * (a - b) ** 2, (a - b).abs() - 0.5).sum()


def detectron(a, b, beta=1.0 / 9):
    n = torch.abs(a - b)
    loss = torch.where(n < beta, 0.5 * n**2 / beta, n - 0.5 * beta)
    return loss.sum() / a.shape[0]


def q_learning(values, target):
    actions = torch.arange(6)[:, None] % 10
    taken = values.gather(1, actions).squeeze(1)
    return F.smooth_l1_loss(taken, target[:, 0].detach())


MATCHES = [
    Spelling("where", where, pair, dynamic=False),
    Spelling("where, beta 0.3", lambda a, b: where(a, b, 0.3), pair),
    Spelling("the other way round", reversed_where, pair),
    Spelling("at most", at_most, pair),
    Spelling("beta on the left", beta_left, pair),
    Spelling("in units of beta", scaled, pair),
    Spelling("clamped", clamped, pair),
    Spelling("masks", masks, pair),
    Spelling("difference written twice", difference_written_twice, pair),
    Spelling("Detectron", detectron, pair, dynamic=False),
    Spelling("learned target", where, learned_pair, dynamic=False),
    Spelling(
        "of float()",
        lambda a, b: where(a.float(), b.float()),
        half_pair,
        dynamic=torch.__version__ < (2, 12),
    ),
    Spelling("none, then mean", lambda a, b: F.smooth_l1_loss(a, b, reduction="none").mean(), pair),
    Spelling("Q-learning", q_learning, pair),
]


def other_betas(a, b):
    d = (a - b).abs()
    return torch.where(d < 1.0, 0.5 * d**2 / 0.9, d - 0.45).mean()


def far_tail(a, b):
    """Smooth L1 up to a thousand."""
    d = (a - b).abs()
    smooth = torch.where(d < 1, 0.5 * d**2, d - 0.5)
    return torch.where(d < 1000, smooth, 999.5 * torch.ones_like(d)).mean()


def no_offset(a, b):
    d = (a - b).abs()
    return torch.where(d < 1, 0.5 * d**2, d).mean()


def one_sided(a, b):
    d = a - b
    return torch.where(d < 1, 0.5 * d**2, d - 0.5).mean()


def data_dependent(a, b):
    d = (a - b).abs()
    return torch.where(b < 1, 0.5 * d**2, d - 0.5).mean()


def learned_beta(a, b):
    d, beta = (a - b).abs(), b.abs().mean()
    return torch.where(d < beta, 0.5 * d**2 / beta, d - 0.5 * beta).mean()


def detached_branch(a, b):
    d = (a - b).abs()
    return torch.where(d < 1, 0.5 * d**2, d.detach() - 0.5).mean()


def threshold_of_the_square(a, b):
    d = a - b
    return torch.where(d * d < 0.25, d * d, d.abs() - 0.25).mean()


NEAR_MISSES = [
    Spelling("constants that do not agree", other_betas, pair),
    Spelling("another tail", far_tail, pair),
    Spelling("a jump at beta", no_offset, pair),
    Spelling("one side", one_sided, pair),
    Spelling("threshold of a tensor", data_dependent, pair),
    Spelling("learned beta", learned_beta, pair),
    Spelling("detached branch", detached_branch, pair),
    Spelling("threshold of the square", threshold_of_the_square, pair),
]
