"""Losses of a head whose rows do not all count, and such that seem so."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F

from tests.corpus.program import programs
from tests.corpus.rows import CLASSES, clipped, losses, masked_mean, problem, truncated


def masked_problem(dtype=torch.float64, *, frozen=False, tokens=18, kept=0.4, device="cpu"):
    """As ``problem``, with a mask in which about so many of the rows count."""
    given = problem(dtype, frozen=frozen, tokens=tokens, device=device)
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(given[3].shape, generator=generator) < kept
    return (*given[:3], mask.to(given[3].dtype).to(device), *given[4:])


def log_probs(h, w, labels):
    logits = F.linear(h, w)
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)


def chosen(h, w, labels, mask, advantages, old):
    return torch.where(mask.bool(), -log_probs(h, w, labels), 0.0).sum() / mask.sum()


def column(h, w, labels, mask, advantages, old):
    """The gradient of a column is put into zeros."""
    logp = F.linear(h, w).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])
    return -(logp[..., 0] * mask).sum() / mask.sum()


def filled(h, w, labels, mask, advantages, old):
    each = -log_probs(h, w, labels).masked_fill(mask == 0, 0.0)
    return (each.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def of_sequences(h, w, labels, mask, advantages, old):
    """Sequences of which one has a weight of zero."""
    weights = advantages.clamp(min=0)
    return (losses(h, w, labels) * mask * weights).sum()


def with_entropy(h, w, labels, mask, advantages, old):
    """PPO with a bonus for entropy, each masked, and metrics that are masked as well."""
    logits = F.linear(h, w)
    all_classes = logits.log_softmax(-1)
    entropy = -(all_classes.exp() * all_classes).sum(-1)
    logp = all_classes.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    ratio = torch.exp(logp - old)
    each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = ((each - 0.01 * entropy) * mask).sum() / mask.sum()
    clipped = (((ratio - 1).abs() > 0.2) & mask.bool()).float().sum()
    return loss, (entropy.detach() * mask).sum() / mask.sum(), clipped


def two_masks(h, w, labels, mask, advantages, old):
    """One number of each row is read where a mask holds, another one elsewhere."""
    logp, other = log_probs(h, w, labels), (old > -3.5).double()
    return -(logp * mask).sum() - (torch.exp(logp) * other).sum()


def negated(h, w, labels, mask, advantages, old):
    """The mask says what does not count."""
    return torch.where(mask == 0, 0.0, losses(h, w, labels)).sum()


def inverted(h, w, labels, mask, advantages, old):
    return (losses(h, w, labels) * ~(mask == 0)).mean()


def logarithm_of_the_rest(h, w, labels, mask, advantages, old):
    """Unlikelihood. If rows that do not count had a loss of 0, they would add 0 * inf."""
    each = -torch.log(1 - torch.exp(log_probs(h, w, labels)))
    return (each * mask).sum() / mask.sum()


#: For each, the rows that count: of labels, mask, advantages and old.
COUNTED = {
    f.__name__: (f, rows)
    for f, rows in (
        (masked_mean, lambda labels, mask, *_: (labels != -100) & mask),
        (clipped, lambda labels, mask, *_: (labels != -100) & mask),
        (truncated, lambda labels, mask, *_: (labels != -100) & mask),
        (chosen, lambda labels, mask, *_: mask),
        (column, lambda labels, mask, *_: mask),
        (filled, lambda labels, mask, *_: mask),
        (of_sequences, lambda labels, mask, a, _: (labels != -100) & mask & (a > 0)),
        (with_entropy, lambda labels, mask, *_: mask),
        (two_masks, lambda labels, mask, a, old: mask | (old > -3.5)),
        (negated, lambda labels, mask, *_: (labels != -100) & mask),
        (inverted, lambda labels, mask, *_: (labels != -100) & mask),
        (logarithm_of_the_rest, lambda labels, mask, *_: mask),
    )
}


def of_the_losses(h, w, labels, mask, advantages, old):
    """The mask depends on the losses."""
    each = -log_probs(h, w, labels)
    return (each * (each > 1.5)).sum()


def one_reader_without(h, w, labels, mask, advantages, old):
    logp = log_probs(h, w, labels)
    return -(logp * mask).sum() - 1e-3 * logp.mean()


def returned(h, w, labels, mask, advantages, old):
    logp = log_probs(h, w, labels)
    return -(logp * mask).sum(), logp.detach()


def shifted_mask(h, w, labels, mask, advantages, old):
    """The mask of another row."""
    logp = log_probs(h, w, labels)
    return -(logp.roll(1, -1) * mask).sum()


def divided(h, w, labels, mask, advantages, old):
    """A divisor of zero is no factor of zero."""
    return (losses(h, w, labels.clamp(min=0)) / (mask + 1)).sum()


def changed_between(h, w, labels, mask, advantages, old):
    """The mask is read after it has changed."""
    own = mask.clone()
    each = -log_probs(h, w, labels)
    own += 1
    return (each * own).sum()


#: All rows count, though there is a mask.
WHOLE = {
    f.__name__: f
    for f in (
        of_the_losses, one_reader_without, returned, shifted_mask, divided, changed_between,
    )
}  # fmt: skip


MASKS = {
    "times": lambda x, m: x * m,
    "bool": lambda x, m: x * m.bool(),
    "where": lambda x, m: torch.where(m.bool(), x, 0.0),
    "otherwise": lambda x, m: torch.where(m == 0, 0.0, x),
    "filled": lambda x, m: x.masked_fill(~m.bool(), 0.0),
    "divided": lambda x, m: x * (m / m.sum().clamp(min=1.0)),
    "flat": lambda x, m: (x.flatten() * m.flatten()).view(x.shape),
    "none": lambda x, m: x,
}
STEPS = {
    "exp": lambda x: torch.exp(-x),
    "square": lambda x: x * x,
    "clamp": lambda x: x.clamp(0.5, 3.0),
    "detach": lambda x: x * x.detach(),
    "softplus": F.softplus,
    "log": lambda x: torch.log(x.abs()),
    "root": lambda x: (x.abs() + 1e-3).sqrt(),
}


def drawn(seed):
    """A loss of which each term is masked in a drawn way, at a drawn place."""
    draw = random.Random(seed)
    terms = [
        (
            draw.choice(list(STEPS)),
            draw.choice(list(MASKS)),
            draw.choice(list(STEPS)),
            draw.random(),
        )
        for _ in range(draw.randint(1, 3))
    ]
    ignores, shares = draw.random() < 0.5, draw.random() < 0.5

    def step(h, w, labels, mask, advantages, old):
        each = losses(h, w, labels) if ignores else -log_probs(h, w, labels)
        total = each.new_zeros(())
        for i, (before, how, after, late) in enumerate(terms):
            own = mask if shares or i == 0 else (old > -3).to(mask.dtype)
            term = STEPS[before](each)
            if late < 0.5:
                term = STEPS[after](term)
            total = total + (MASKS[how](term, own) * (1 + advantages)).sum() / CLASSES
        return total

    return step


PROGRAMS = programs(__name__, {**COUNTED, **WHOLE}, masked_problem)
