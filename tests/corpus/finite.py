"""Divergences whose terms of infinite logits are left out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.distilled import hard, problem, taught
from tests.corpus.program import programs


def of_tokens(each, labels):
    """The mean over the tokens that have a label, as all three libraries write it."""
    x, mask = each.view(-1), (labels != -100).int()
    return torch.sum(x * mask.view(-1), dim=0) / torch.sum(mask.view(-1), dim=0)


def possible(classes, first=30):
    """A bias of -inf for the classes from ``first`` on that are no multiples of 3."""
    c = torch.arange(classes)
    return torch.where((c >= first) & (c % 3 > 0), -torch.inf, 0.0).double()


def with_padding(h, w, t, tw, first=30):
    """Logits of a student and a teacher with impossible classes, other ones in each."""
    student = F.linear(h, w, possible(len(w)).to(w.dtype))
    with torch.no_grad():
        return student, F.linear(t, tw, possible(len(tw), first).roll(1).to(w.dtype))


def forward_terms(student, teacher):
    terms = teacher.softmax(-1) * student.log_softmax(-1)
    return -torch.masked_fill(terms, student.isinf(), 0).sum(-1)


def forward(h, w, t, tw, labels):
    student, teacher = F.linear(h, w), taught(t, tw)
    return of_tokens(forward_terms(student, teacher), labels)


def forward_of_padding(h, w, t, tw, labels):
    return of_tokens(forward_terms(*with_padding(h, w, t, tw)), labels)


def forward_beside_labels(h, w, t, tw, labels):
    """As of torchtune's recipes of distillation."""
    labels = labels.clamp(max=29)
    student, teacher = with_padding(h, w, t, tw)
    soft = of_tokens(forward_terms(student, teacher), labels)
    return 0.5 * soft + 0.5 * hard(student, labels)


def reverse_in_place(student, teacher):
    """MiniLLM's and torchtune's."""
    mask = torch.isinf(student) | torch.isinf(teacher)
    p = F.softmax(student, dim=-1)
    log_q, log_p = F.log_softmax(teacher, dim=-1), F.log_softmax(student, dim=-1)
    terms = torch.masked_fill(p * log_q, mask, 0)
    terms -= torch.masked_fill(p * log_p, mask, 0)
    return -torch.sum(terms, dim=-1)


def reverse(h, w, t, tw, labels):
    return of_tokens(reverse_in_place(F.linear(h, w), taught(t, tw)), labels)


def reverse_beside_labels(h, w, t, tw, labels):
    student = F.linear(h, w)
    soft = of_tokens(reverse_in_place(student, taught(t, tw)), labels)
    return 0.1 * soft + 0.9 * hard(student, labels)


def reverse_mean(h, w, t, tw, labels):
    """DistiLLM's, over all tokens."""
    student, teacher = F.linear(h, w).flatten(0, 1), taught(t, tw).flatten(0, 1)
    mask = student.isinf() | teacher.isinf()
    p, log_p, log_q = student.softmax(-1), student.log_softmax(-1), teacher.log_softmax(-1)
    cross = torch.masked_fill(p * log_q, mask, 0)
    return -torch.sum(cross - torch.masked_fill(p * log_p, mask, 0), dim=-1).mean()


def temperature_beside_z_loss(h, w, t, tw, labels):
    student, teacher = F.linear(h, w), taught(t, tw)
    terms = (teacher / 2).softmax(-1) * (student / 2).log_softmax(-1)
    soft = -torch.masked_fill(terms, student.isinf(), 0).sum(-1).mean() * 4
    return soft + 1e-3 * torch.logsumexp(student, -1).square().mean()


def divergence_of_both(h, w, t, tw, labels):
    """The divergence from the teacher, less the teacher's entropy."""
    student, teacher = F.linear(h, w), taught(t, tw)
    mask = student.isinf() | teacher.isinf()
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    each = torch.masked_fill(log_q.exp() * (log_q - log_p), mask, 0).sum(-1)
    return of_tokens(each, labels)


def mask_before_the_teacher(h, w, t, tw, labels):
    """Gradients are off and on again between the mask and its terms."""
    student = F.linear(h, w)
    mask = student.isinf()
    terms = taught(t, tw).softmax(-1) * student.log_softmax(-1)
    return -torch.masked_fill(terms, mask, 0).sum(-1).mean()


def in_chunks(each, step=None):
    """torchtune's losses of chunked outputs: a head for each chunk of the tokens."""

    def loss(h, w, t, tw, labels, chunks=2):
        student = [F.linear(chunk, w) for chunk in h.chunk(chunks, dim=1)]
        with torch.no_grad():
            teacher = [F.linear(chunk, tw) for chunk in t.chunk(chunks, dim=1)]
        student, teacher = (
            [chunk.reshape(-1, chunk.size(-1)) for chunk in of_one] for of_one in (student, teacher)
        )
        mask = (labels != -100).int()
        total = 0.0
        parts = [chunk.reshape(-1) for chunk in labels.chunk(chunks, dim=1)]
        for s, q, part in zip(student, teacher, parts, strict=True):
            total += torch.sum(each(s, q).view(-1) * (part != -100).int().view(-1), dim=0)
        return total / torch.sum(mask.view(-1), dim=0)

    return loss


FORMS = {
    f.__name__: f
    for f in (
        forward, forward_of_padding, forward_beside_labels, reverse, reverse_beside_labels,
        reverse_mean, temperature_beside_z_loss, divergence_of_both, mask_before_the_teacher,
    )
}  # fmt: skip
CHUNKED = {"forward": in_chunks(forward_terms), "reverse": in_chunks(reverse_in_place)}


def both_directions(h, w, t, tw, labels):
    student, teacher = F.linear(h, w), taught(t, tw)
    each = 0.1 * forward_terms(student, teacher) + 0.9 * reverse_in_place(student, teacher)
    return of_tokens(each, labels)


def cross_entropy_from_the_student(h, w, t, tw, labels):
    """Its probabilities with the teacher's logarithms."""
    student, teacher = F.linear(h, w), taught(t, tw)
    return forward_terms(teacher, student).mean() + hard(student, labels)


def mask_of_the_teacher(h, w, t, tw, labels):
    student, teacher = F.linear(h, w), taught(t, tw)
    terms = teacher.softmax(-1) * student.log_softmax(-1)
    return -torch.masked_fill(terms, teacher.isinf(), 0).sum(-1).mean() + hard(student, labels)


def mask_that_is_read(h, w, t, tw, labels):
    student, teacher = F.linear(h, w), taught(t, tw)
    mask = student.isinf()
    terms = teacher.softmax(-1) * student.log_softmax(-1)
    return -torch.masked_fill(terms, mask, 0).sum(-1).mean() + mask.sum()


def other_masks(h, w, t, tw, labels):
    """Of the logits before they are multiplied, which may make them infinite."""
    student, teacher = F.linear(h, w), taught(t, tw)
    terms = teacher.softmax(-1) * (student * 7).log_softmax(-1)
    return -torch.masked_fill(terms, student.isinf(), 0).sum(-1).mean()


NEAR_MISSES = (
    both_directions, cross_entropy_from_the_student, mask_of_the_teacher, mask_that_is_read,
    other_masks,
)  # fmt: skip

PROGRAMS = [*programs(__name__, FORMS, problem), *programs(__name__, NEAR_MISSES, problem)]
