"""Kullback-Leibler divergence of probabilities, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.specs.inputs import distributions, log_distributions, soft_targets
from tests.specs.spec import Spelling


def half_way(p, q):
    """One half of the Jensen-Shannon divergence."""
    m = 0.5 * (p + q)
    return (q * (q.log() - m.log())).sum(-1).mean()


def variational(p, q):
    """A categorical posterior against its prior."""
    log_p, log_q = torch.log(p), torch.log(q)
    return torch.sum(q * (log_q - log_p), dim=-1).sum()


MATCHES = [
    Spelling(
        "difference of logs", lambda p, q: (q * (q.log() - p.log())).sum(-1).mean(), distributions
    ),
    Spelling("log of the quotient", lambda p, q: (q * (q / p).log()).sum(-1).mean(), distributions),
    Spelling(
        "torch.log of the quotient", lambda p, q: torch.sum(q * torch.log(q / p)), distributions
    ),
    Spelling("expanded", lambda p, q: (q * q.log() - q * p.log()).sum() / p.size(0), distributions),
    Spelling("negated", lambda p, q: -(q * (p.log() - q.log())).sum(1).mean(), distributions),
    Spelling("negated quotient", lambda p, q: -(q * torch.log(p / q)).sum(), distributions),
    Spelling("mean", lambda p, q: (q * (q.log() - p.log())).mean(), distributions),
    Spelling("mean of means", lambda p, q: (q * (q / p).log()).mean(0).mean(), distributions),
    Spelling("xlogy", lambda p, q: (torch.xlogy(q, q) - q * p.log()).sum(), distributions),
    Spelling(
        "log of a log", lambda p, q: (q * (q.log() - (p + 3).log().log())).sum(), distributions
    ),
    Spelling(
        "none of a log of a log",
        lambda p, q: F.kl_div((p + 3).log().log(), q, reduction="none").sum(),
        distributions,
    ),
    Spelling("logs given", lambda p, q: (q.exp() * (q - p)).sum(-1).mean(), log_distributions),
    Spelling(
        "log_softmax", lambda x, q: (q * (q.log() - x.log_softmax(-1))).sum(-1).mean(), soft_targets
    ),
    Spelling(
        "none, then sum", lambda p, q: F.kl_div(p.log(), q, reduction="none").sum(), distributions
    ),
    Spelling("posterior and prior", variational, distributions),
    Spelling("with a mixture", half_way, distributions),
    Spelling(
        "none, row sums, mean",
        lambda p, q: F.kl_div(p.log(), q, reduction="none").sum(-1).mean(),
        distributions,
    ),
]


def generalised(p, q):
    """TRL's generalised Jensen-Shannon divergence: two divergences of a mixture."""
    student, teacher = p.log_softmax(-1), q.log_softmax(-1)
    parts = torch.stack([student + 0.5, teacher - 0.5])
    mixture = torch.logsumexp(parts, dim=0)
    return (mixture - student).sum() + (mixture - teacher).sum()


NEAR_MISSES = [
    Spelling(
        "eps inside both logs",
        lambda p, q: (q * ((q + 1e-8).log() - (p + 1e-8).log())).sum(),
        distributions,
    ),
    Spelling(
        "eps inside one log", lambda p, q: (q * (q.log() - (p + 1e-10).log())).sum(), distributions
    ),
    Spelling(
        "clamped", lambda p, q: (q * (q.log() - p.clamp(min=1e-8).log())).sum(), distributions
    ),
    Spelling(  # 0 where both are 0, and kl_div's is nan
        "xlogy of both", lambda p, q: (torch.xlogy(q, q) - torch.xlogy(q, p)).sum(), distributions
    ),
    Spelling("wrong factor", lambda p, q: (p * (q.log() - p.log() * 2)).sum(), distributions),
    Spelling("without a factor", lambda p, q: (q.log() - p.log()).sum(), distributions),
    Spelling("log2", lambda p, q: (q * (q.log2() - p.log2())).sum(), distributions),
    Spelling("symmetrised", lambda p, q: ((q - p) * (q.log() - p.log())).sum(), distributions),
    Spelling("each row", lambda p, q: (q * (q.log() - p.log())).sum(-1), distributions),
    Spelling("entropy", lambda p, q: -(p * p.log()).sum() + 0 * q.sum(), distributions),
    Spelling("generalised Jensen-Shannon", generalised, distributions),
    Spelling(
        "reverse with swapped logs", lambda p, q: (q * (p.log() + q.log())).sum(), distributions
    ),
    Spelling(
        "masked",
        lambda p, q: (q * (q.log() - p.log())).masked_fill(q < 0.1, 0).sum(),
        distributions,
    ),
    Spelling(
        "normal distributions", lambda m, s: -0.5 * (1 + s.log() - m**2 - s).sum(), distributions
    ),
]
