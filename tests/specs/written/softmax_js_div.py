"""Distillation by the Jensen-Shannon divergence, written out."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.specs.inputs import (
    distillation,
    learned_distillation,
    square_logits,
    student_pixels,
)
from tests.specs.spec import Spelling


def generalized(student, teacher):
    """TRL's: the mixture in logarithms, its weights in tensors."""
    temperature, beta = 2.0, 0.1
    log_p = F.log_softmax(student / temperature, dim=-1)
    log_q = F.log_softmax(teacher / temperature, dim=-1)
    beta = torch.tensor(beta, dtype=log_p.dtype, device=log_p.device)
    mixture = torch.logsumexp(
        torch.stack([log_p + torch.log1p(-beta), log_q + torch.log(beta)]), dim=0
    )
    kl_teacher = F.kl_div(mixture, log_q, reduction="none", log_target=True)
    kl_student = F.kl_div(mixture, log_p, reduction="none", log_target=True)
    return (beta * kl_teacher + (1 - beta) * kl_student).sum() / student.size(0)


def by_numbers(student, teacher):
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    mixture = torch.logaddexp(log_p + math.log(0.7), log_q + math.log(0.3))
    kl_teacher = F.kl_div(mixture, log_q, reduction="batchmean", log_target=True)
    kl_student = F.kl_div(mixture, log_p, reduction="batchmean", log_target=True)
    return 0.3 * kl_teacher + 0.7 * kl_student


def textbook(student, teacher):
    p, q = student.softmax(-1), teacher.softmax(-1)
    m = 0.5 * (p + q)
    kl_student = (p * (p.log() - m.log())).sum(-1)
    kl_teacher = (q * (q.log() - m.log())).sum(-1)
    return (0.5 * kl_student + 0.5 * kl_teacher).mean()


def two_calls(student, teacher):
    p, q = F.softmax(student, dim=1), F.softmax(teacher, dim=1)
    log_m = (0.5 * (p + q)).log()
    return 0.5 * (
        F.kl_div(log_m, p, reduction="batchmean") + F.kl_div(log_m, q, reduction="batchmean")
    )


def two_means(student, teacher):
    log_p, log_q = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    log_m = ((log_p.exp() + log_q.exp()) / 2).log()
    kl_p = F.kl_div(log_m, log_p, reduction="mean", log_target=True)
    return (kl_p + F.kl_div(log_m, log_q, reduction="mean", log_target=True)) / 2


def two_sums(student, teacher):
    p, q = (student / 3).softmax(-1), (teacher / 3).softmax(-1)
    log_m = (0.8 * p + 0.2 * q).log()
    kl_p = F.kl_div(log_m, p, reduction="sum")
    return (0.8 * kl_p + 0.2 * F.kl_div(log_m, q, reduction="sum")) * 9


def other_roles(student, teacher):
    """The mixture's larger part is the teacher's, which comes first."""
    p, q = teacher.softmax(-1), student.softmax(-1)
    log_m = torch.log(0.9 * p + 0.1 * q)
    return (0.9 * p * (p.log() - log_m) + 0.1 * q * (q.log() - log_m)).sum(-1).mean()


def each_row(student, teacher):
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    kl_p = F.kl_div(log_m, log_p, reduction="none", log_target=True).sum(-1)
    kl_q = F.kl_div(log_m, log_q, reduction="none", log_target=True).sum(-1)
    return (kl_p + kl_q) / 2


def masked_tokens(student, teacher):
    mask = (torch.arange(6) % 3 > 0).float()
    p, q = student.softmax(-1), teacher.softmax(-1)
    m = torch.lerp(p, q, 0.25)
    each = 0.25 * (q * (q / m).log()).sum(-1) + 0.75 * (p * (p / m).log()).sum(-1)
    return (each * mask).sum() / mask.sum()


def pixelwise(student, teacher):
    p, q = student.softmax(1), teacher.softmax(1)
    log_m = (0.5 * p + 0.5 * q).log()
    both = F.kl_div(log_m, p, reduction="none") + F.kl_div(log_m, q, reduction="none")
    return 0.5 * both.sum(1)


def stacked_last(student, teacher):
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    log_m = torch.logsumexp(torch.stack((log_p, log_q), dim=-1), dim=-1) - math.log(2)
    each = log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)
    return 0.5 * each.sum(-1).mean()


MATCHES = [
    Spelling("TRL", generalized, distillation),
    Spelling("both learned", generalized, learned_distillation),
    Spelling("weights that are numbers", by_numbers, distillation),
    Spelling("textbook", textbook, distillation),
    Spelling("two calls", two_calls, distillation),
    Spelling("two means", two_means, distillation),
    Spelling("two sums", two_sums, distillation),
    Spelling("other roles", other_roles, distillation),
    Spelling("each row", each_row, distillation),
    Spelling("masked tokens", masked_tokens, distillation),
    Spelling("pixelwise", pixelwise, student_pixels),
    Spelling("stacked along the last dimension", stacked_last, distillation),
    Spelling("as many rows as classes", textbook, square_logits),
    Spelling("other temperatures", lambda s, t: textbook(s / 2, t / 3), distillation),
]


def _terms(student, teacher, mixture, beta=0.3):
    """The divergence from a mixture of the caller's, in one sum."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    each = beta * q * (q.log() - mixture.log()) + (1 - beta) * p * (p.log() - mixture.log())
    return each.sum(-1).mean()


def _mixture(student, teacher, beta=0.3):
    return (1 - beta) * student.softmax(-1) + beta * teacher.softmax(-1)


def two_weights(s, t):
    p, q, log_m = s.softmax(-1), t.softmax(-1), _mixture(s, t).log()
    return (0.3 * q * (q.log() - log_m) + 0.6 * p * (p.log() - log_m)).sum(-1).mean()


def half_of_a_mixture(s, t):
    p, log_m = s.softmax(-1), _mixture(s, t).log()
    return ((p * (p.log() - log_m)).sum(-1).exp() - 1).mean()


NEAR_MISSES = [
    Spelling("outer weights that do not add up", two_weights, distillation),
    Spelling(
        "mixture's weights exchanged", lambda s, t: _terms(s, t, _mixture(s, t, 0.7)), distillation
    ),
    Spelling(
        "mixture's weights unlike the others",
        lambda s, t: _terms(s, t, _mixture(s, t, 0.5)),
        distillation,
    ),
    Spelling(
        "mixture that does not add up",
        lambda s, t: _terms(s, t, 0.6 * s.softmax(-1) + 0.3 * t.softmax(-1)),
        distillation,
    ),
    Spelling(
        "mixture of another temperature",
        lambda s, t: _terms(s, t, _mixture(s / 2, t / 2)),
        distillation,
    ),
    Spelling(
        "mixture along another dimension",
        lambda s, t: _terms(s, t, 0.7 * s.softmax(0) + 0.3 * t.softmax(0)),
        square_logits,
    ),
    Spelling("mixture detached", lambda s, t: _terms(s, t, _mixture(s, t).detach()), distillation),
    Spelling(
        "student detached in the mixture",
        lambda s, t: _terms(s, t, _mixture(s.detach(), t)),
        distillation,
    ),
    Spelling("mixture kept from 0", lambda s, t: _terms(s, t, _mixture(s, t) + 1e-3), distillation),
    Spelling(
        "difference of the divergences",
        lambda s, t: (
            s.softmax(-1) * (s.log_softmax(-1) - _mixture(s, t, 0.5).log())
            - t.softmax(-1) * (t.log_softmax(-1) - _mixture(s, t, 0.5).log())
        ).sum(),
        distillation,
    ),
    Spelling(
        "sum over the rows",
        lambda s, t: (
            s.softmax(-1) * (s.log_softmax(-1) - _mixture(s, t, 0.5).log())
            + t.softmax(-1) * (t.log_softmax(-1) - _mixture(s, t, 0.5).log())
        ).sum(0),
        square_logits,
    ),
    Spelling("exponential of one divergence", half_of_a_mixture, distillation),
]
