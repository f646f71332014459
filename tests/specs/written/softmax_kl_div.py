"""Distillation: the divergence of two softmaxes, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.specs.inputs import distillation, square_logits, student_pixels
from tests.specs.spec import Spelling


def hinton(student, teacher):
    temperature = 2.0
    soft = F.softmax(teacher / temperature, dim=-1)
    log_p = F.log_softmax(student / temperature, dim=-1)
    return F.kl_div(log_p, soft, reduction="batchmean") * temperature**2


def of_logs(student, teacher):
    log_p, log_q = (F.log_softmax(x / 4, dim=-1) for x in (student, teacher))
    return F.kl_div(log_p, log_q, reduction="batchmean", log_target=True) * 16


def reverse(student, teacher):
    """MiniLLM's direction."""
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def softmax_and_logs(student, teacher):
    p = F.softmax(teacher / 2, -1)
    return (p * (F.log_softmax(teacher / 2, -1) - F.log_softmax(student / 2, -1))).sum(-1).mean()


def of_temperatures(s, t):
    return F.kl_div((s / 2).log_softmax(-1), (t / 3).softmax(-1), reduction="batchmean")


def masked_tokens(student, teacher):
    mask = (torch.arange(6) % 3 > 0).float()
    p, q = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    each = F.kl_div(p, q, reduction="none", log_target=True).sum(-1)
    return (each * mask).sum() / mask.sum()


def mean_teacher(student, teacher):
    return F.kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="mean")


def pixelwise(student, teacher):
    return F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="sum") / student.size(0)


MATCHES = [
    Spelling("other temperatures", of_temperatures, distillation),
    Spelling("Hinton", hinton, distillation),
    Spelling("log_target", of_logs, distillation),
    Spelling("reverse", reverse, distillation),
    Spelling("softmax times logs", softmax_and_logs, distillation),
    Spelling("masked tokens", masked_tokens, distillation),
    Spelling("mean", mean_teacher, distillation),
    Spelling("pixelwise", pixelwise, student_pixels),
    Spelling(
        "of log(softmax)", lambda s, t: F.kl_div(s.softmax(1).log(), t.softmax(1)), distillation
    ),
    Spelling(
        "quotient",
        lambda s, t: (t.softmax(1) * (t.softmax(1) / s.softmax(1)).log()).sum(),
        distillation,
    ),
    Spelling(
        "scaled instead",
        lambda s, t: F.kl_div((s * 0.5).log_softmax(1), (t * 0.5).softmax(1), reduction="sum"),
        distillation,
    ),
    Spelling("as many rows as classes", softmax_and_logs, square_logits),
    Spelling(
        "each row",
        lambda s, t: F.kl_div(s.log_softmax(1), t.softmax(1), reduction="none").sum(1),
        distillation,
    ),
]


NEAR_MISSES = [
    Spelling(
        "cross over",
        lambda s, t: (s.softmax(1) * (t.log_softmax(1) - s.log_softmax(1) * 2)).sum(),
        distillation,
    ),
    Spelling(
        "sum of divergences",
        lambda s, t: ((s.softmax(1) - t.softmax(1)) * (s.log_softmax(1) - t.log_softmax(1))).sum(),
        distillation,
    ),
    Spelling(
        "entropy",
        lambda s, t: -(s.softmax(1) * s.log_softmax(1)).sum(1).mean() + 0 * t.sum(),
        distillation,
    ),
    Spelling(
        "squared error of softmaxes",
        lambda s, t: ((s.softmax(1) - t.softmax(1)) ** 3).mean(),
        distillation,
    ),
]
