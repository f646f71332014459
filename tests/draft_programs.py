"""Losses of draft models, over a part of the teacher's classes or over all of them.

Each program takes what :func:`problem` makes, and returns a number.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS, CLASSES, OWN, HIDDEN = 72, 60, 24, 16


def problem(dtype=torch.float64, *, batch=3, tokens=24, seed=0):
    """The draft's hidden states, its head of some classes and one of all; the teacher's hidden
    states and head; which of the teacher's classes the draft has, and whether it has each; and
    whether each row counts."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0, trained=False):
        drawn = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_(trained)

    index = torch.randperm(CLASSES, generator=generator)[:OWN].sort().values
    has = torch.zeros(CLASSES, dtype=torch.bool).index_fill(0, index, True)
    mask = torch.rand(batch, tokens, generator=generator, dtype=torch.float64) < 0.7
    return (
        normal(batch, tokens, HIDDEN, trained=True),
        normal(OWN, HIDDEN, scale=0.7, trained=True),
        normal(CLASSES, HIDDEN, scale=0.7, trained=True),
        normal(batch, tokens, HIDDEN),
        normal(CLASSES, HIDDEN, scale=0.7),
        index,
        has,
        mask.to(dtype),
    )


def total_variation(h, own, w, teacher, its, index, has, mask):
    p, q = F.linear(h, w).softmax(-1), F.linear(teacher, its).softmax(-1)
    return (0.5 * (p - q).abs().sum(-1) * mask).sum() / mask.sum()


def overlap(h, own, w, teacher, its, index, has, mask):
    """One minus the probability that a draft's token is accepted."""
    p, q = F.linear(h, w).softmax(-1), F.linear(teacher, its).softmax(-1)
    return 1 - torch.minimum(p, q).sum(-1).mean()


def log_overlap(h, own, w, teacher, its, index, has, mask):
    p, q = F.linear(h, w).softmax(-1), F.linear(teacher, its).softmax(-1)
    return -(torch.minimum(p, q).sum(-1).clamp(min=1e-8).log() * mask).sum() / mask.sum()


def likely_and_overlapping(h, own, w, teacher, its, index, has, mask):
    """A mixture of a divergence and the overlap, whose weight the overlap itself decides."""
    log_p, q = F.linear(h, w).log_softmax(-1), F.linear(teacher, its).softmax(-1)
    accepted = torch.minimum(log_p.exp(), q).sum(-1)
    weight = (-3 * accepted.detach()).exp()
    divergence = F.kl_div(log_p, q, reduction="none").sum(-1)
    return (weight * divergence - (1 - weight) * accepted).mean()


def both_directions(h, own, w, teacher, its, index, has, mask):
    p, q = F.linear(h, w).log_softmax(-1), F.linear(teacher, its).log_softmax(-1)
    there = F.kl_div(p, q, reduction="batchmean", log_target=True)
    return 0.7 * there + 0.3 * F.kl_div(q, p, reduction="batchmean", log_target=True)


def of_two_teachers(h, own, w, teacher, its, index, has, mask):
    log_p = F.linear(h, w).log_softmax(-1)
    first, second = (F.linear(teacher, each).softmax(-1) for each in (its, its * 0.8))
    one, two = (F.kl_div(log_p, q, reduction="batchmean") for q in (first, second))
    return one + 0.5 * two


def without_infinities(h, own, w, teacher, its, index, has, mask):
    """Terms of classes that the student's logits exclude are left out, as in torchtune."""
    logits = F.linear(h, w).masked_fill(has, float("-inf"))
    q = F.linear(teacher, its).softmax(-1)
    log_p = logits.log_softmax(-1)
    return -(torch.where(torch.isinf(logits), 0.0, q * log_p).sum(-1) * mask).sum() / mask.sum()


def without_infinities_in_reverse(h, own, w, teacher, its, index, has, mask):
    logits = F.linear(h, w).masked_fill(has, float("-inf"))
    log_p, log_q = logits.log_softmax(-1), F.linear(teacher, its).log_softmax(-1)
    terms = torch.where(torch.isinf(logits), 0.0, log_p.exp() * (log_p - log_q))
    return (terms.sum(-1) * mask).sum() / mask.sum()


def skewed(h, own, w, teacher, its, index, has, mask):
    """Skewed forward and reverse divergences, masked, as of DistiLLM."""
    p, q = F.linear(h, w).softmax(-1), F.linear(teacher, its).softmax(-1)
    mixed, other = 0.1 * q + 0.9 * p, 0.9 * q + 0.1 * p
    there = (q * (q.log() - mixed.log())).sum(-1)
    back = (p * (p.log() - other.log())).sum(-1)
    return ((there + back) * mask).sum() / mask.sum()


def of_picked_logits(h, own, w, teacher, its, index, has, mask):
    q = F.linear(teacher, its)[..., index].softmax(-1)
    return -(F.linear(h, own).log_softmax(-1) * q).sum(-1).mean()


def of_picked_columns(h, own, w, teacher, its, index, has, mask):
    """``index_select``, and a teacher that is read for its total over all classes, too."""
    log_q = F.linear(teacher, its).log_softmax(-1).index_select(-1, index)
    log_p = F.linear(h, own).log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1).mean()


def of_picked_weights(h, own, w, teacher, its, index, has, mask):
    q = F.linear(teacher, its[index]).softmax(-1)
    return -(F.linear(h, own).log_softmax(-1) * q).sum(-1).mean()


def eagle(h, own, w, teacher, its, index, has, mask):
    """EAGLE-3: rows whose likeliest class the draft does not have are left out."""
    logits = F.linear(teacher, its)
    counts = has[logits.argmax(-1)].unsqueeze(-1).to(mask.dtype) * mask.unsqueeze(-1)
    q = logits[..., index].softmax(-1).detach()
    log_p = F.linear(h, own).log_softmax(-1)
    return -(counts * (log_p * q)).sum(2).mean()


def eagle_of_all_classes(h, own, w, teacher, its, index, has, mask):
    """The same without a part of the classes, with the accuracy beside it."""
    logits, own_logits = F.linear(teacher, its), F.linear(h, w)
    likeliest = logits.argmax(-1)
    counts = has[likeliest].to(mask.dtype) * mask
    hits = ((own_logits.argmax(-1) == likeliest) * counts).sum()
    each = (own_logits.log_softmax(-1) * logits.softmax(-1)).sum(-1)
    return -(counts * each).mean() + 0 * hits.detach()


def of_first_classes(h, own, w, teacher, its, index, has, mask):
    """A padded vocabulary, cut off by a slice, in a loss that only regions take."""
    logits = F.linear(h, w)[..., : CLASSES - 7].clamp(-2, 2)
    q = F.linear(teacher, its)[..., : CLASSES - 7].softmax(-1)
    return 0.5 * (logits.softmax(-1) - q).abs().sum(-1).mean()


def of_trained_picks(h, own, w, teacher, its, index, has, mask):
    """The draft's own head is read at some of its classes."""
    logits = F.linear(h, w).clamp(-2, 2)
    return (logits[..., index].logsumexp(-1) - logits.logsumexp(-1)).mean()


def eagle_by_rows(h, own, w, teacher, its, index, has, mask):
    """EAGLE-3, with what counts multiplied by each row's number."""
    with torch.no_grad():
        logits = F.linear(teacher, its)
        counts = has[logits.argmax(-1)] * mask
        q = logits[..., index].softmax(-1)
    return -((F.linear(h, own).log_softmax(-1) * q).sum(-1) * counts).mean()


def of_a_sure_teacher(h, own, w, teacher, its, index, has, mask):
    """What a row counts is made of the two likeliest classes of the teacher, of all classes."""
    logits = F.linear(teacher, its)
    largest = (0.5 * logits).topk(2).values
    counts = torch.tanh(largest[..., 0] - largest[..., 1]) * mask
    log_q = logits[..., index].log_softmax(-1)
    each = F.kl_div(F.linear(h, own).log_softmax(-1), log_q, reduction="none", log_target=True)
    return (each.sum(-1) * counts).sum() / mask.sum()


def of_later_steps(h, own, w, teacher, its, index, has, mask):
    """A divergence of each step of a draft that is called again on its own hidden states, from the
    teacher's rows so many tokens later, with the accuracy of each step."""
    with torch.no_grad():
        logits = F.linear(teacher, its[index])
    total = 0.0
    for step in range(2):
        drafted = F.linear(h, own)[:, : 24 - step]
        taught, kept = logits[:, step:], mask[:, step:]
        each = F.kl_div(drafted.log_softmax(-1), taught.softmax(-1), reduction="none").sum(-1)
        total = total + 0.8**step * ((each * kept).sum(1) / (kept.sum(1) + 1e-5)).mean()
        hits = (drafted.argmax(-1) == taught.argmax(-1)) * kept
        total = total + 0 * hits.sum()
        h = torch.tanh(h)
    return total


#: Those that hold no logits without an option: the teacher's are multiplied once more at the
#: classes that the draft has.
BY_DEFAULT = (eagle, eagle_by_rows, of_a_sure_teacher)


def hard_and_soft_labels(h, own, w, teacher, its, index, has, mask):
    """The labels are the teacher's likeliest classes."""
    logits, own_logits = F.linear(teacher, its), F.linear(h, w)
    hard = F.cross_entropy(own_logits.flatten(0, 1), logits.argmax(-1).flatten())
    log_p, log_q = own_logits.log_softmax(-1), logits.log_softmax(-1)
    return hard + F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)


TAKEN = (
    *(total_variation, overlap, log_overlap, likely_and_overlapping, both_directions),
    *(of_two_teachers, without_infinities, without_infinities_in_reverse, skewed),
    *(of_picked_logits, of_picked_columns, of_picked_weights),
    *(of_first_classes, of_trained_picks, eagle_of_all_classes),
    *BY_DEFAULT,
)
#: Their values are torch's, and the teacher's logits are held: recognition takes the student's head
#: for an op that reads them.
TEACHER_HELD = (hard_and_soft_labels,)


def chosen(logits, index):
    """A cross entropy of some classes, each row's label its place."""
    labels = torch.arange(ROWS, device=logits.device) % len(index)
    return F.cross_entropy(logits[..., index].flatten(0, 1), labels)


def of_two_picks(h, own, w, teacher, its, index, has, mask):
    logits = F.linear(h, w)
    return chosen(logits, index) + 2 * chosen(logits, index.flip(0) - CLASSES)


def of_a_pick_and_all(h, own, w, teacher, its, index, has, mask):
    logits = F.linear(h, w)
    return chosen(logits, index) + logits.logsumexp(-1).square().mean()


def of_a_pick_by_row(h, own, w, teacher, its, index, has, mask):
    logits = F.linear(h, w)[..., index].flatten(0, 1)
    each = F.cross_entropy(logits, torch.arange(ROWS) % OWN, reduction="none")
    return (each.view_as(mask) * mask).sum()


def divergence_of_a_pick(h, own, w, teacher, its, index, has, mask):
    log_q = F.linear(teacher, its)[..., index].log_softmax(-1)
    log_p = F.linear(h, own).log_softmax(-1)
    return F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")


#: Several readers of some classes, which recognition may take, or not.
OF_PICKS = (
    *(of_two_picks, of_a_pick_and_all, of_a_pick_by_row, divergence_of_a_pick, of_later_steps),
)
