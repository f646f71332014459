"""Readers of a head's logits that are expressions in the numbers of each row."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.program import programs
from tests.corpus.rows import CLASSES, problem


def logits_of(h, w):
    return F.linear(h, w).flatten(0, 1)


def smoothed_in_float32(h, w, labels, mask, advantages, old):
    """As transformers' LabelSmoother, which sums narrower log-probabilities in float32, and writes
    in place."""
    log_probs = -F.log_softmax(F.linear(h, w), dim=-1)
    labels = labels.unsqueeze(-1)
    padding = labels.eq(-100)
    nll = log_probs.gather(dim=-1, index=labels.clamp(min=0))
    wider = torch.promote_types(h.dtype, torch.float32)
    smoothed = log_probs.sum(dim=-1, keepdim=True, dtype=wider)
    nll.masked_fill_(padding, 0.0)
    smoothed.masked_fill_(padding, 0.0)
    count = padding.numel() - padding.long().sum()
    return 0.9 * nll.sum() / count + 0.1 * smoothed.sum() / (count * CLASSES)


def smoothed_by_a_masked_mean(h, w, labels, mask, advantages, old):
    """The mean of wider log-probabilities, of the rows that a mask keeps."""
    log_probs = F.log_softmax(F.linear(h, w), -1)
    wide = log_probs.to(torch.promote_types(h.dtype, torch.float32))
    nll = F.nll_loss(log_probs.flatten(0, 1), labels.flatten())
    return nll - 0.1 * (wide.mean(-1) * mask).sum() / mask.sum()


def smoothed_over_all(h, w, labels, mask, advantages, old):
    log_probs = F.log_softmax(logits_of(h, w), -1)
    return 0.9 * F.nll_loss(log_probs, labels.flatten()) - 0.1 * log_probs.mean()


def entropy_over_all(h, w, labels, mask, advantages, old):
    log_probs = F.log_softmax(logits_of(h, w), -1)
    loss = F.nll_loss(log_probs, labels.flatten())
    return loss + 0.01 * (log_probs.exp() * log_probs).sum() / labels.numel()


def mean_entropy_over_all(h, w, labels, mask, advantages, old):
    """Of classes that are not the last dimension, beside the mean of all logits."""
    rows = F.linear(h, w)
    logits = rows.transpose(1, 2)
    entropy = -(F.softmax(logits, 1) * F.log_softmax(logits, 1)).mean((0, 1, 2))
    return F.cross_entropy(logits, labels) - 0.1 * entropy, rows.detach().mean()


def entropy_over_all_alone(h, w, labels, mask, advantages, old):
    log_probs = F.log_softmax(F.linear(h, w), -1)
    return -(-0.5 * log_probs.exp() * log_probs / 0.25).sum()


def entropies_over_some(h, w, labels, mask, advantages, old):
    """Of the rows of one sample, beside a loss of all."""
    logits = F.linear(h, w)
    log_probs = F.log_softmax(logits[1], -1)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + 0.1 * (log_probs.exp() * log_probs).sum() / len(log_probs)


def poly(h, w, labels, mask, advantages, old):
    """PolyLoss, without ignored rows: gather takes no other classes."""
    logits, labels = logits_of(h, w), labels.flatten().clamp(min=0)
    each = F.cross_entropy(logits, labels, reduction="none")
    probability = F.softmax(logits, -1).gather(-1, labels[:, None]).squeeze(-1)
    return (each + 2 * (1 - probability)).mean()


def poly_of_counted_rows(h, w, labels, mask, advantages, old):
    """Ignored rows have the class 0 for gather, which another factor takes out."""
    logits, labels = logits_of(h, w), labels.flatten()
    each = F.cross_entropy(logits, labels, reduction="none")
    probability = F.softmax(logits, -1).gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
    counted = labels != -100
    return (each + (1 - probability) * counted).sum() / counted.sum()


def poly_of_one_hot(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w), labels.flatten().clamp(min=0)
    each = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
    one_hot = F.one_hot(labels, CLASSES).to(logits.dtype)
    return (each + 1 - (one_hot * F.softmax(logits, -1)).sum(-1)).mean()


def expected_accuracy(h, w, labels, mask, advantages, old):
    """The probability alone, negative inside of one node's function."""
    return (
        (-F.softmax(logits_of(h, w), -1)).gather(-1, labels.flatten().clamp(min=0)[:, None]).sum()
    )


def probabilities_of_several(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w), labels.flatten().clamp(min=0)
    some = torch.stack([labels, (labels + 1) % CLASSES], -1)
    loss = F.cross_entropy(logits, labels)
    return loss + F.softmax(logits, -1).gather(-1, some).square().sum(-1).mean()


def logit_of_one_hot(h, w, labels, mask, advantages, old):
    """Cross entropy from a one-hot target, with a z-loss."""
    logits, labels = logits_of(h, w), labels.flatten().clamp(min=0)
    lse = torch.logsumexp(logits, -1)
    picked = (F.one_hot(labels, CLASSES) * logits).sum(-1)
    return ((lse - picked) * mask.flatten()).mean() + 1e-2 * lse.square().mean()


def scaled_log_probabilities(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w), labels.flatten().clamp(min=0)
    scaled = -F.log_softmax(logits, -1) / 0.5
    picked = scaled.gather(-1, labels[:, None]).squeeze(-1)
    return (picked.sigmoid() * mask.flatten()).sum() + torch.logsumexp(logits, -1).mean()


def entropy_of_probabilities(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    entropy = torch.special.entr(F.softmax(logits, -1)).sum(-1)
    return F.cross_entropy(logits, labels.flatten()) - 0.1 * (entropy * mask.flatten()).mean()


def confidence(h, w, labels, mask, advantages, old):
    """What metrics read of probabilities and of their logarithms."""
    logits = logits_of(h, w)
    log_probs = F.log_softmax(logits, -1)
    loss = F.nll_loss(log_probs, labels.flatten())
    with torch.no_grad():
        likeliest, place = F.softmax(logits, -1).max(-1)
        hits = (log_probs.argmax(-1) == labels.flatten()).to(h.dtype)
        surprise = -log_probs.amax(-1)
    return loss, likeliest.mean(), (place == labels.flatten()).to(h.dtype).mean(), hits, surprise


def statistics_of_all_logits(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    given = logits.detach()
    means = given.mean(-1, keepdim=True)
    loss = F.cross_entropy(logits, labels.flatten()) + 1e-3 * logits.sum(-1).square().mean()
    return loss, given.max(), given.amax(), F.softmax(given, -1).max(), means, given.mean()


def deviations_of_all_logits(h, w, labels, mask, advantages, old):
    """As trainers log them, beside a loss of the rows that count."""
    rows = F.linear(h, w)
    logits = rows.flatten(0, 1)
    loss = (F.cross_entropy(logits, labels.flatten(), reduction="none") * mask.flatten()).mean()
    given = rows.detach()
    with torch.no_grad():
        within, unbiased = logits.std(-1), logits.var(dim=(0, 1), correction=0)
    return loss, given.std(), unbiased, -given.var(), within, given[:, 1:].std(), given.mean()


def deviations_of_capped_logits(h, w, labels, mask, advantages, old):
    logits = 2.0 * torch.tanh(logits_of(h, w) / 2.0)
    given = logits.detach()
    return F.cross_entropy(logits, labels.flatten()), given.std(), given.var(-1, correction=2)


def shifted_by_their_maximum(h, w, labels, mask, advantages, old):
    """As against an overflow; the maximum's gradient is 0."""
    logits = logits_of(h, w)
    return F.cross_entropy(logits - logits.max(-1, keepdim=True).values, labels.flatten())


def shifted_by_a_logged_maximum(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    largest = logits.detach().amax(-1)
    log_probs = F.log_softmax(logits - largest[:, None], -1)
    picked = log_probs.gather(-1, labels.flatten().clamp(min=0)[:, None])
    return -(picked * mask.flatten()[:, None]).sum(), largest


def centred(h, w, labels, mask, advantages, old):
    logits = F.linear(h, w)
    logits = logits - logits.mean(-1, keepdim=True)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    log_probs = F.log_softmax(logits, -1)
    return loss + 0.1 * (log_probs.exp() * log_probs).sum(-1).mean()


#: What the forward can compute the gradients of.
BY_ROW = {
    f.__name__: f
    for f in (
        smoothed_in_float32, smoothed_by_a_masked_mean, smoothed_over_all, entropy_over_all,
        mean_entropy_over_all, entropy_over_all_alone, entropies_over_some, poly,
        poly_of_counted_rows, poly_of_one_hot, expected_accuracy, probabilities_of_several,
        logit_of_one_hot, scaled_log_probabilities, entropy_of_probabilities, confidence,
        statistics_of_all_logits, deviations_of_all_logits, deviations_of_capped_logits,
        shifted_by_their_maximum, shifted_by_a_logged_maximum, centred,
    )
}  # fmt: skip


def smoothed_in_integers(h, w, labels, mask, advantages, old):
    """Each log-probability is truncated before they are added up."""
    log_probs = F.log_softmax(logits_of(h, w), -1)
    loss = F.nll_loss(log_probs, labels.flatten())
    return loss + log_probs.detach().sum(-1, dtype=torch.int64).sum()


def of_the_exponential(h, w, labels, mask, advantages, old):
    """Squares of probabilities times their logarithms."""
    log_probs = F.log_softmax(logits_of(h, w), -1)
    loss = F.nll_loss(log_probs, labels.flatten())
    return loss + ((2 * log_probs).exp() * log_probs).sum() / labels.numel()


def of_bounded_probabilities(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w), labels.flatten().clamp(min=0)
    bounded = F.softmax(logits, -1).clamp(min=0.01)
    return F.cross_entropy(logits, labels) - bounded.gather(-1, labels[:, None]).mean()


def of_detached_probabilities(h, w, labels, mask, advantages, old):
    log_probs = F.log_softmax(logits_of(h, w), -1)
    loss = F.nll_loss(log_probs, labels.flatten())
    return loss + 0.01 * (log_probs.exp().detach() * log_probs).sum() / labels.numel()


def of_other_softmaxes(h, w, labels, mask, advantages, old):
    """Over the rows, which the product does not tell from the classes."""
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits, labels.flatten())
    return loss + (F.softmax(logits, 0) * F.log_softmax(logits, -1)).sum() / labels.numel()


def over_the_rows_alone(h, w, labels, mask, advantages, old):
    log_probs = F.log_softmax(logits_of(h, w), -1)
    loss = F.nll_loss(log_probs, labels.flatten())
    return loss + 0.01 * (log_probs.exp() * log_probs).sum(0).square().sum()


def one_hot_along_the_rows(h, w, labels, mask, advantages, old):
    """Each class is selected as often as it occurs, not one of each row."""
    logits, labels = logits_of(h, w), labels.flatten().clamp(min=0)
    chosen = (F.one_hot(labels, CLASSES) * F.softmax(logits, -1)).sum(0)
    return F.cross_entropy(logits, labels) - chosen.square().sum()


def gradient_of_the_likeliest(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    return F.cross_entropy(logits, labels.flatten()) - F.softmax(logits, -1).amax(-1).mean()


def least_likely(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    log_probs = F.log_softmax(logits.detach(), -1)
    return F.cross_entropy(logits, labels.flatten()), (-log_probs).argmax(-1)


def rows_of_something_else(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    return F.cross_entropy(logits, labels.flatten()), logits.detach().abs().mean(-1)


def deviations_with_a_gradient(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    return F.cross_entropy(logits, labels.flatten()) + 0.1 * logits.std()


def deviations_over_rows(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    return F.cross_entropy(logits, labels.flatten()), logits.detach().std(0)


def deviations_of_probabilities(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    return F.cross_entropy(logits, labels.flatten()), F.softmax(logits.detach(), -1).std()


def deviations_of_other_logits(h, w, labels, mask, advantages, old):
    """A loss with a temperature, and a deviation without."""
    logits = logits_of(h, w)
    return F.cross_entropy(logits / 2, labels.flatten()), logits.detach().std()


def sums_over_rows(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    return F.cross_entropy(logits, labels.flatten()), logits.detach().mean(0)


def shifted_with_another_gradient(h, w, labels, mask, advantages, old):
    """If the number were left out, its gradient of 0 would be none at all."""
    logits = F.linear(h, w)
    logits = logits - h.sum(-1, keepdim=True)
    entropy = (F.softmax(logits, -1) * F.log_softmax(logits, -1)).sum(-1)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + entropy.mean()


def logsumexp_of_shifted(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    logits = logits - logits.amax(-1, keepdim=True).detach()
    loss = F.cross_entropy(logits, labels.flatten())
    return loss + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def capped_after_a_shift(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    logits = torch.tanh(logits - logits.amax(-1, keepdim=True).detach())
    return F.cross_entropy(logits, labels.flatten())


NEAR_MISSES = (
    smoothed_in_integers, of_the_exponential, of_bounded_probabilities, of_detached_probabilities,
    of_other_softmaxes, over_the_rows_alone, one_hot_along_the_rows, gradient_of_the_likeliest,
    least_likely, rows_of_something_else, deviations_with_a_gradient, deviations_over_rows,
    deviations_of_probabilities, deviations_of_other_logits, sums_over_rows,
    shifted_with_another_gradient, logsumexp_of_shifted, capped_after_a_shift,
)  # fmt: skip

PROGRAMS = [
    *programs(__name__, BY_ROW, problem),
    *programs(__name__, NEAR_MISSES, problem),
]
