"""Kullback-Leibler divergence of two softmaxes."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from compile_losses.ops.checks import reduction_name
from tests.specs import softmaxes
from tests.specs.spec import Spec, Spelling


def torch_loss(input, target, reduction=3, temperature=1.0, dim=-1):
    """The loss as it is usually written. No function of torch's is all of it."""
    log_p, q = F.log_softmax(input / temperature, dim), F.softmax(target / temperature, dim)
    name = reduction_name(reduction)
    if name == "none":
        return F.kl_div(log_p, q, reduction="none").sum(dim)
    if name == "mean":  # F.kl_div warns that its mean is not the mathematical one
        return F.kl_div(log_p, q, reduction="none").mean()
    return F.kl_div(log_p, q, reduction=name)


def _divergence(log_p, log_q, dim):
    q = np.exp(log_q)
    distance = np.where(q == 0, 0, log_q) - log_p
    each = q * distance
    return each, (np.exp(log_p) - q, q * (distance - each.sum(dim, keepdims=True)))


def exact_loss(input, target, reduction=3, temperature=1.0, dim=-1):
    return softmaxes.exact(_divergence, input, target, reduction, temperature, dim)


def teacher_and_student():
    return torch.randn(6, 10, requires_grad=True), torch.randn(6, 10)


MATCHES = [
    Spelling(
        "distillation",
        lambda s, t: F.kl_div(
            F.log_softmax(s / 2, -1), F.softmax(t / 2, -1), reduction="batchmean"
        ),
        teacher_and_student,
    ),
    Spelling(
        "other temperatures",
        lambda s, t: F.kl_div((s / 2).log_softmax(-1), (t / 3).softmax(-1), reduction="batchmean"),
        teacher_and_student,
    ),
]

NEAR_MISSES = [
    Spelling(
        "clamped",
        lambda x, t: (
            F.softmax(t, -1) * (F.log_softmax(t, -1) - F.log_softmax(x, -1)).clamp(min=0)
        ).sum(),
        teacher_and_student,
    ),
]

SPEC = Spec(
    name="softmax_kl_div",
    torch_loss=torch_loss,
    exact_loss=exact_loss,
    samples=softmaxes.samples,
    operands=softmaxes.operands,
    matches=MATCHES,
    near_misses=NEAR_MISSES,
    broadcasts=False,
)
