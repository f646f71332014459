"""Losses of one head's logits that read different classes of the same rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.program import programs
from tests.corpus.rows import BATCH, CLASSES, TOKENS, problem
from tests.corpus.shared import entropy_of

CHOSEN = BATCH // 2


def other(labels):
    """Other classes, of which some are ignored, too."""
    found = (labels.clamp(min=0) * 5 + 3) % CLASSES
    return torch.where(torch.arange(labels.shape[1]) % 5 == 4, -100, found)


def log_probs_of(logits, labels):
    """As trainers write it for labels of which some are -100, and the mask of the rest."""
    mask = labels != -100
    labels = torch.where(mask, labels, 0)
    return torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2), mask


def cross_entropy(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def loss_of_next(logits, labels):
    """As transformers had it for years."""
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def clipped(log_probs, mask, advantages, old):
    ratio = torch.exp(log_probs - old)
    each = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(each * mask).sum() / mask.sum()


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def two_sets(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    return cross_entropy(logits, labels) - 0.1 * cross_entropy(logits, other(labels))


def three_sets(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    third = cross_entropy(logits, labels.clamp(min=0).flip(0), reduction="sum")
    two = cross_entropy(logits, labels) + 0.5 * cross_entropy(logits, other(labels))
    return two + 1e-2 * third


def policy_and_chosen(h, w, labels, mask, advantages, old):
    """A policy's loss of all sequences, and a cross entropy of the chosen ones."""
    logits = F.linear(h, w)
    log_probs, kept = log_probs_of(logits, labels)
    nll = cross_entropy(logits[:CHOSEN], other(labels)[:CHOSEN])
    return clipped(log_probs, mask * kept, advantages, old) + 0.2 * nll


def policy_and_next(h, w, labels, mask, advantages, old):
    """The cross entropy leaves out the last row of each sequence."""
    logits = F.linear(h, w)
    log_probs, kept = log_probs_of(logits, labels)
    nll = loss_of_next(logits[:CHOSEN], other(labels)[:CHOSEN])
    return clipped(log_probs, mask * kept, advantages, old) + 0.2 * nll


def two_policies(h, w, labels, mask, advantages, old):
    """Both gradients depend on log-probabilities, each on its own set's, and on the entropy."""
    logits = F.linear(h, w)
    one, kept = log_probs_of(logits, labels)
    two, also_kept = log_probs_of(logits, other(labels))
    losses = clipped(one, mask * kept, advantages, old) - masked_mean(two.exp(), also_kept)
    return losses - 0.01 * masked_mean(entropy_of(logits), mask)


def margins(h, w, labels, mask, advantages, old):
    """Of three classes of each row, in one function."""
    log_probs = F.log_softmax(F.linear(h, w), -1)
    sets = (labels.clamp(min=0), other(labels).clamp(min=0), labels.clamp(min=0).flip(1))
    one, two, three = (log_probs.gather(-1, s.unsqueeze(-1)).squeeze(-1) for s in sets)
    return masked_mean(F.relu(0.5 - one + torch.maximum(two, three)), mask)


def in_loops(h, w, labels, mask, advantages, old):
    """As TRL reads narrow logits, beside a cross entropy of the next tokens."""
    logits = F.linear(h, w)
    rows = []
    for sample, index in zip(logits, labels.clamp(min=0), strict=True):
        rows.append(sample.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1))
    each = clipped(torch.stack(rows), mask, advantages, old)
    return each + loss_of_next(logits[:CHOSEN], labels[:CHOSEN])


def two_shifts(h, w, labels, mask, advantages, old):
    """Rows of which neither set has all: the layer's own rows are computed."""
    logits = F.linear(h, w)
    next_but_one = cross_entropy(logits[:, :-2], other(labels)[:, 2:])
    return loss_of_next(logits, labels) + 0.3 * next_but_one + logits[:, 1:].logsumexp(-1).mean()


def weights_and_smoothing(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    weight = torch.linspace(0.5, 2, CLASSES, dtype=h.dtype)
    weighted = cross_entropy(logits[1:], other(labels)[1:], weight=weight)
    smoothed = cross_entropy(logits, labels.flip(1), label_smoothing=0.2)
    return cross_entropy(logits, labels) + weighted + smoothed


def by_row(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    each = cross_entropy(logits, other(labels), reduction="none").view(labels.shape)
    return masked_mean(each.square(), mask) + cross_entropy(logits, labels, reduction="sum") / 70


def other_ignored(h, w, labels, mask, advantages, old):
    """One and the same labels, of which each loss ignores another class."""
    logits, labels = F.linear(h, w), labels.clamp(min=0)
    every = [cross_entropy(logits, labels, ignore_index=i) for i in (3, 5, -100)]
    picked = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1))
    return every[0] + 2 * every[1] + 3 * every[2] - picked.exp().mean()


def ignored_by_one_of_two(h, w, labels, mask, advantages, old):
    """A class that a cross entropy ignores has a log-probability all the same."""
    logits, labels = F.linear(h, w), labels.clamp(min=0)
    picked = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return cross_entropy(logits, labels, ignore_index=3) - (picked.exp() * mask).mean()


def indexed(h, w, labels, mask, advantages, old):
    """By an index, whose negative numbers count from the end, and by a gather of logits."""
    logits = F.linear(h, w).flatten(0, 1)
    picked = logits.log_softmax(-1)[torch.arange(len(logits)), labels.flatten().clamp(min=-1)]
    wanted = logits.gather(-1, other(labels).flatten().clamp(min=0)[:, None]).squeeze(-1)
    return (picked * mask.flatten()).mean() - wanted.tanh().mean()


def capped(h, w, labels, mask, advantages, old):
    logits = 5 * torch.tanh(F.linear(h, w) / 10)
    return cross_entropy(logits, labels) + cross_entropy(logits[2:], other(labels)[2:])


def of_scaled_rows(h, w, labels, mask, advantages, old):
    """A temperature goes along with the rows."""
    logits = F.linear(h, w) / 0.7
    return loss_of_next(logits, labels) + cross_entropy(logits[:CHOSEN], other(labels)[:CHOSEN])


def several_classes(h, w, labels, mask, advantages, old):
    """Several classes of some rows, several others of all, and one of each row beside them."""
    logits = F.linear(h, w)
    log_probs = logits.log_softmax(-1)
    index = torch.stack([labels.clamp(min=0), other(labels).clamp(min=0)], -1)
    others = torch.cat([index.flip(0), index.flip(1)], -1)
    some = log_probs[:, 3:].gather(-1, index[:, 3:]).sum(-1)
    every = log_probs.gather(-1, others).sum(-1)
    return (some * mask[:, 3:]).mean() - masked_mean(every, mask) + cross_entropy(logits, labels)


def with_metrics(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    loss = cross_entropy(logits, labels) + cross_entropy(logits[:CHOSEN], other(labels)[:CHOSEN])
    with torch.no_grad():
        hits = (logits.argmax(-1) == labels).sum()
        means = logits[:CHOSEN, :-1].mean(), logits[CHOSEN:].detach().mean(), logits.sum()
    return loss, hits, *means


def with_mean_logits(h, w, labels, mask, advantages, old):
    """The mean of all logits has a gradient, too."""
    logits = F.linear(h, w)
    return cross_entropy(logits, labels) + 0.1 * logits[:, 2:].mean() + 1e-3 * logits.sum()


def with_a_teacher(h, w, labels, mask, advantages, old):
    """Distilled beside two sets of classes, and the sum of all logits."""
    logits = F.linear(h, w)
    with torch.no_grad():
        teacher = F.linear(h.flip(-1), w.flip(-1) / 2)
    soft = F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="sum")
    hard = cross_entropy(logits, labels) + cross_entropy(logits[1:], other(labels)[1:])
    return hard + 1e-2 * soft + 1e-3 * logits.sum()


#: What the forward can compute the gradients of.
BY_ROW = {
    f.__name__: f
    for f in (
        two_sets, three_sets, policy_and_chosen, policy_and_next, two_policies, margins, in_loops,
        two_shifts, weights_and_smoothing, by_row, other_ignored, ignored_by_one_of_two, indexed,
        capped, of_scaled_rows, several_classes, with_metrics, with_mean_logits, with_a_teacher,
    )
}  # fmt: skip


def inputs_of(labels):
    """A prompt and an answer; the padding behind them is ignored."""
    tokens = labels.shape[1]
    lengths = torch.tensor([TOKENS, 12, 9, 16])[:, None]
    return torch.where(torch.arange(tokens) >= lengths, -100, (labels.clamp(min=0) + 3) % CLASSES)


def of_sequences(logits, labels, *, average):
    found, mask = log_probs_of(logits[:, :-1], labels[:, 1:])
    total = (found * mask).sum(-1)
    return total / mask.sum(-1) if average else total


def orpo(h, w, labels, mask, advantages, old):
    """Chosen sequences first. The metrics are TRL's."""
    logits = F.linear(h, w)
    nll = loss_of_next(logits[:CHOSEN], inputs_of(labels)[:CHOSEN])
    chosen, rejected = of_sequences(logits, labels, average=True).split(CHOSEN)
    log_odds = (chosen - rejected) - torch.log(-torch.expm1(chosen) / -torch.expm1(rejected))
    loss = nll - 0.1 * F.logsigmoid(log_odds).mean()
    return loss, (chosen > rejected).double().mean(), logits[:CHOSEN, :-1].detach().mean()


def orpo_of_two_forwards(h, w, labels, mask, advantages, old):
    """The log odds ratio comes first, and only then the other labels are made."""
    logits = F.linear(h, w)
    log_probs = of_sequences(logits, labels, average=True)
    odds = log_probs - torch.log1p(-log_probs.exp())
    ratio = F.logsigmoid(odds[:CHOSEN] - odds[CHOSEN:])
    full = inputs_of(labels)
    return loss_of_next(logits[:CHOSEN], full[:CHOSEN]) - 0.1 * ratio.mean()


def cpo(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    log_probs = of_sequences(logits, labels, average=False)
    chosen, rejected = log_probs[:CHOSEN], log_probs[CHOSEN:]
    preference = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
    return preference + loss_of_next(logits[:CHOSEN], inputs_of(labels)[:CHOSEN])


def simpo_with_entropy(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    log_probs = of_sequences(logits, labels, average=True)
    margin = 2.0 * (log_probs[:CHOSEN] - log_probs[CHOSEN:]) - 0.5
    nll = loss_of_next(logits[:CHOSEN], inputs_of(labels)[:CHOSEN])
    return nll - F.logsigmoid(margin).mean() - 0.01 * masked_mean(entropy_of(logits), mask)


def orpo_of_pairs(h, w, labels, mask, advantages, old):
    """Chosen and rejected sequences take turns."""
    logits = F.linear(h, w)
    log_probs = of_sequences(logits, labels, average=True)
    odds = log_probs - torch.log1p(-log_probs.exp())
    ratio = F.logsigmoid(odds[::2] - odds[1::2])
    return loss_of_next(logits[::2], other(labels)[::2]) - 0.1 * ratio.mean()


PREFERENCES = {
    f.__name__: f for f in (orpo, orpo_of_two_forwards, orpo_of_pairs, cpo, simpo_with_entropy)
}


def picked_by_the_argmax(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    best = logits.argmax(-1)
    picked = logits.log_softmax(-1).gather(-1, best.unsqueeze(-1)).squeeze(-1)
    return cross_entropy(logits, labels) - (picked * mask).mean()


def labels_of_the_first_loss(h, w, labels, mask, advantages, old):
    """The second set is made of what is read with the first."""
    logits = F.linear(h, w)
    each = cross_entropy(logits, labels, reduction="none").view(labels.shape)
    hard = torch.where(each.detach() > 1, other(labels), -100)
    return each.mean() + cross_entropy(logits, hard)


def written_between(h, w, labels, mask, advantages, old):
    """The labels of the second loss are others, in the memory of the first."""
    logits, labels = F.linear(h, w), labels.clone()
    with torch.no_grad():
        first = cross_entropy(logits, labels)
        labels.add_(1).remainder_(CLASSES)
        second = cross_entropy(logits, labels)
    return cross_entropy(logits, other(labels)), first, second


def another_temperature(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    return cross_entropy(logits, labels) + cross_entropy(logits / 2, other(labels))


def picked_rows(h, w, labels, mask, advantages, old):
    """By an index tensor: no slice says which rows these are."""
    logits = F.linear(h, w).flatten(0, 1)
    rows = torch.tensor([3, 1, 40, 7])
    some = F.cross_entropy(logits[rows], other(labels).flatten()[rows])
    return F.cross_entropy(logits, labels.flatten()) + some


def mean_of_probabilities(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    return cross_entropy(logits, labels) + logits.softmax(-1).square().mean()


def mean_of_some_classes(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    return cross_entropy(logits, labels) + logits[..., 3:].mean()


def mean_alone(h, w, labels, mask, advantages, old):
    return F.linear(h, w).mean()


NEAR_MISSES = (
    picked_by_the_argmax, labels_of_the_first_loss, written_between, another_temperature,
    picked_rows, mean_of_probabilities, mean_of_some_classes, mean_alone,
)  # fmt: skip


def drawn(h, w, labels, mask, advantages, old):
    """Classes that are drawn after other random numbers, and would be others before these."""
    logits = F.linear(h, w)
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * 2
    noise = torch.rand(labels.shape)
    return (picked * noise).mean() + cross_entropy(logits, torch.randint(CLASSES, labels.shape))


def drawn_by_probabilities(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * 2
    some = torch.multinomial(mask[:, :1].expand(-1, CLASSES) + 1, labels.shape[1], True)
    return (picked * mask).mean() + cross_entropy(logits, some)


def without_an_order(h, w, labels, mask, advantages, old):
    """The labels are written to after the first loss has read others, of the same memory."""
    logits, labels = F.linear(h, w), labels.clone()
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * 2
    labels[:, ::2] = -100
    return (picked * mask).mean() + cross_entropy(logits, labels + 0)


def _cleaned(labels):
    """Each helper cleans the labels itself: equal classes of two nodes."""
    return labels.clamp(min=0)


def _mean_and_sum(logits, labels, mask):
    each = cross_entropy(logits, labels) + cross_entropy(logits, _cleaned(labels))
    return each + cross_entropy(logits, _cleaned(labels), reduction="sum") / 70


def _gathered(logits, labels, mask):
    found = logits.log_softmax(-1).gather(-1, _cleaned(labels).unsqueeze(-1)).squeeze(-1)
    return cross_entropy(logits, _cleaned(labels)) - masked_mean(found.exp(), mask)


def _of_samples(logits, labels, mask):
    rows = []
    for sample, index in zip(logits, _cleaned(labels), strict=True):
        rows.append(sample.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1))
    again = cross_entropy(logits, _cleaned(labels), reduction="sum") / 70
    return again + cross_entropy(logits, labels) - masked_mean(torch.stack(rows), mask)


def _distilled(logits, labels, mask):
    teacher = torch.linspace(-2, 2, CLASSES, dtype=logits.dtype) * mask.unsqueeze(-1)
    soft = F.kl_div(
        logits.log_softmax(-1).flatten(0, 1),
        teacher.log_softmax(-1).flatten(0, 1),
        reduction="batchmean",
        log_target=True,
    )
    return _mean_and_sum(logits, labels, mask) + soft


def _with_entropy(logits, labels, mask):
    entropy = masked_mean(entropy_of(logits), mask)
    return _mean_and_sum(logits, labels, mask) - 0.01 * entropy


LABELS_MADE_TWICE = [_mean_and_sum, _gathered, _of_samples, _distilled, _with_entropy]

PROGRAMS = [
    *programs(__name__, {**BY_ROW, **PREFERENCES}, problem),
    *programs(__name__, (*NEAR_MISSES, drawn, drawn_by_probabilities, without_an_order), problem),
]
