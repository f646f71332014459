"""Ranks of classes, largest logits and squares of probabilities, read beside a head's loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.program import programs
from tests.corpus.rows import CLASSES, problem


def read(h, w, labels):
    """The logits, their loss, what metrics read of them, and labels that are classes."""
    logits = F.linear(h, w)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return logits, loss, logits.detach(), labels.clamp(min=0)


def accuracy_of_the_likeliest(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten())
    with torch.no_grad():
        _, places = logits.topk(5)
        hits = (places == labels.flatten()[:, None]).any(-1)
    return loss, hits.sum(), (places[:, 0] == labels.flatten()).to(h.dtype).mean()


def margins(h, w, labels, mask, advantages, old):
    _, loss, logits, _ = read(h, w, labels)
    largest = torch.topk(logits, k=2, dim=-1).values
    likeliest = logits.softmax(-1).topk(2)[0]
    return loss, largest[..., 0] - largest[..., 1], likeliest[..., 0] - likeliest[..., 1]


def several_of_the_likeliest(h, w, labels, mask, advantages, old):
    """Log-probabilities and classes, as for prompts, of which one reader takes fewer."""
    _, loss, logits, _ = read(h, w, labels)
    log_probs, places = torch.topk(logits.log_softmax(-1), 4, dim=2)
    return loss, log_probs, places, logits.topk(3, sorted=False).values.sum(-1)


def ranks(h, w, labels, mask, advantages, old):
    _, loss, logits, classes = read(h, w, labels)
    own = logits.gather(-1, classes.unsqueeze(-1))
    rank = (logits > own).sum(-1)
    first = (own < logits).to(h.dtype).sum(-1, keepdim=True)
    return loss, rank, (1 / (rank + 1)).mean(), first


def ranks_of_log_probabilities(h, w, labels, mask, advantages, old):
    """As servers count them: the class's own counts, too."""
    _, loss, logits, classes = read(h, w, labels)
    log_probs = logits.to(torch.promote_types(h.dtype, torch.float32)).log_softmax(-1)
    own = log_probs.gather(-1, classes[..., None])
    return loss, own.squeeze(-1), (log_probs >= own).sum(-1)


def squares(h, w, labels, mask, advantages, old):
    _, loss, logits, _ = read(h, w, labels)
    p = logits.softmax(-1)
    doubled = (2 * logits.log_softmax(-1)).logsumexp(-1)
    return loss, p.square().sum(-1), (p * p).sum(-1).log(), doubled, (p**2).sum()


def of_shifted_rows(h, w, labels, mask, advantages, old):
    """The last token has no label."""
    logits, labels = F.linear(h, w)[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    given, classes = logits.detach(), labels.clamp(min=0)
    rank = (given > given.gather(-1, classes[..., None])).sum(-1)
    return loss, rank, given.topk(3).indices


def weighted_by_a_margin(h, w, labels, mask, advantages, old):
    """What a row counts is made of its own margin."""
    logits = F.linear(h, w).flatten(0, 1)
    each = F.cross_entropy(logits, labels.flatten(), reduction="none")
    largest = logits.detach().topk(2).values
    margin = largest[:, 0] - largest[:, 1]
    return (each * torch.exp(-margin) * mask.flatten()).sum()


def capped(h, w, labels, mask, advantages, old):
    logits = 3 * torch.tanh(F.linear(h, w) / 3)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    given, classes = logits.detach(), labels.clamp(min=0)
    values, _ = given.topk(3)
    return loss, values, (given > given.gather(-1, classes[..., None])).sum(-1)


#: What the forward can compute the gradients of.
BY_ROW = {
    f.__name__: f
    for f in (
        accuracy_of_the_likeliest, margins, several_of_the_likeliest, ranks,
        ranks_of_log_probabilities, squares, of_shifted_rows, capped,
    )
}  # fmt: skip


def sorted_classes(h, w, labels, mask, advantages, old):
    """All places of each row are needed."""
    _, loss, logits, classes = read(h, w, labels)
    order = logits.argsort(-1, descending=True)
    return loss, (order == classes[..., None]).to(torch.int64).argmax(-1)


def of_the_least(h, w, labels, mask, advantages, old):
    _, loss, logits, _ = read(h, w, labels)
    return loss, logits.topk(3, largest=False).values


def along_the_rows(h, w, labels, mask, advantages, old):
    _, loss, logits, _ = read(h, w, labels)
    return loss, logits.topk(3, dim=1).values


def of_two_classes(h, w, labels, mask, advantages, old):
    _, loss, logits, classes = read(h, w, labels)
    found = [
        (logits > logits.gather(-1, each[..., None])).sum(-1)
        for each in (classes, (classes + 1) % CLASSES)
    ]
    return loss, *found


def of_probabilities(h, w, labels, mask, advantages, old):
    """Small probabilities are 0, and none of them is larger than another."""
    _, loss, logits, classes = read(h, w, labels)
    p = (300 * logits).softmax(-1)
    return loss, (p > p.gather(-1, classes[..., None])).sum(-1)


def of_another_row(h, w, labels, mask, advantages, old):
    _, loss, logits, classes = read(h, w, labels)
    own = logits.roll(1, 0).gather(-1, classes[..., None])
    return loss, (logits > own).sum(-1)


def with_gradients(h, w, labels, mask, advantages, old):
    logits, loss, _, _ = read(h, w, labels)
    return loss + logits.softmax(-1).square().sum(-1).mean() + logits.topk(2).values.mean()


NEAR_MISSES = (
    sorted_classes, of_the_least, along_the_rows, of_two_classes, of_probabilities, of_another_row,
    with_gradients,
)  # fmt: skip

PROGRAMS = [
    *programs(__name__, [*BY_ROW.values(), weighted_by_a_margin], problem),
    *programs(__name__, NEAR_MISSES, problem),
]
