"""Cross entropy with class probabilities, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.specs.inputs import distillation, plain_classes, soft_targets, square_logits
from tests.specs.spec import Spelling


def timm(x, target):
    """timm's SoftTargetCrossEntropy."""
    loss = torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1)
    return loss.mean()


def dino(student, teacher):
    q = F.softmax((teacher - teacher.mean(0)) / 0.04, dim=-1).detach()
    return torch.sum(-q * F.log_softmax(student / 0.1, dim=-1), dim=-1).mean()


def smoothed(x, t):
    target = F.one_hot(t, 10).float() * 0.9 + 0.01
    return -(target * x.log_softmax(1)).sum(1).mean()


def smoothed_in_place(x, t):
    target = torch.full_like(x, 0.01).detach()
    target.scatter_(1, t[:, None], 0.91)
    return -(target * F.log_softmax(x, 1)).sum(1).mean()


def logits_and_classes():
    x, t = plain_classes()
    return x.requires_grad_(), t


MATCHES = [
    Spelling("mean", lambda x, q: -(q * F.log_softmax(x, -1)).sum(-1).mean(), soft_targets),
    Spelling("timm", timm, soft_targets),
    Spelling("DINO", dino, distillation),
    Spelling("smoothed one_hot", smoothed, logits_and_classes),
    Spelling("smoothed in place", smoothed_in_place, logits_and_classes),
    Spelling("each row", lambda x, q: -(q * F.log_softmax(x, -1)).sum(-1), soft_targets),
    Spelling(
        "sum over batch", lambda x, q: -(q * x.log_softmax(1)).sum() / x.size(0), soft_targets
    ),
    Spelling("log(softmax)", lambda x, q: -(q * x.softmax(1).log()).sum(1).mean(), soft_targets),
    Spelling(
        "of a teacher", lambda s, t: -(t.softmax(1) * s.log_softmax(1)).sum(1).mean(), distillation
    ),
    Spelling(
        "expanded",
        lambda x, q: (q * (x.logsumexp(1, keepdim=True) - x)).sum(1).mean(),
        soft_targets,
    ),
    Spelling("mean over all", lambda x, q: -(q * x.log_softmax(1)).mean(), soft_targets),
]


NEAR_MISSES = [
    Spelling("softmax over rows", lambda x, q: -(q * x.log_softmax(0)).sum(1), square_logits),
    Spelling("eps", lambda x, q: -(q * (x.softmax(1) + 1e-8).log()).sum(1).mean(), soft_targets),
    Spelling(
        "squared targets", lambda x, q: -(q * x.log_softmax(1) ** 2).sum(1).mean(), soft_targets
    ),
    Spelling(
        "clamped", lambda x, q: -(q * x.log_softmax(1).clamp(min=-4)).sum(1).mean(), soft_targets
    ),
    Spelling(
        "negative targets",
        lambda x, q: -((1 - q) * (1 - x.softmax(1)).log()).sum(1).mean(),
        soft_targets,
    ),
]
