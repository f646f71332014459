"""Losses of each row of a head's logits, and functions of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.program import programs

BATCH, TOKENS, HIDDEN, CLASSES = 4, 18, 8, 37


def problem(dtype=torch.float64, *, frozen=False, tokens=TOKENS, device="cpu"):
    """Hidden states, weight, labels of which some are ignored, a mask, advantages, and the
    log-probabilities of an older model."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    h, w = draw(BATCH, tokens, HIDDEN), draw(CLASSES, HIDDEN)
    labels = torch.randint(CLASSES, (BATCH, tokens), generator=generator)
    labels[:, ::7] = -100
    mask = (torch.rand(BATCH, tokens, generator=generator) > 0.3).double()
    old = F.cross_entropy((h @ w.t()).flatten(0, 1), labels.flatten(), reduction="none")
    old = -old.view(BATCH, tokens) + 0.3 * draw(BATCH, tokens)
    tensors = [t.to(device, dtype) for t in (h, w, mask, draw(BATCH, 1), old)]
    h, w, mask, advantages, old = tensors
    labels = labels.to(device)
    return h.requires_grad_(), w.requires_grad_(not frozen), labels, mask, advantages, old


def losses(h, w, labels, **options):
    each = F.cross_entropy(
        F.linear(h, w).view(-1, w.shape[0]), labels.reshape(-1), reduction="none", **options
    )
    return each.view(labels.shape)


def masked_mean(h, w, labels, mask, advantages, old):
    return (losses(h, w, labels) * mask).sum() / mask.sum()


def mean_of_sequences(h, w, labels, mask, advantages, old):
    return ((losses(h, w, labels) * mask).sum(-1) / mask.sum(-1)).mean()


def weighted(h, w, labels, mask, advantages, old):
    """Weights for each sequence, as of reward-weighted fine-tuning."""
    return (losses(h, w, labels) * advantages.softmax(0)).sum()


def of_shifted_logits(h, w, labels, mask, advantages, old):
    each = F.cross_entropy(
        F.linear(h, w)[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1), reduction="none"
    )
    return (each.view(BATCH, -1) * mask[:, 1:]).sum() / mask[:, 1:].sum()


def some_tokens(h, w, labels, mask, advantages, old):
    """The gradient of a slice is padded with zeros."""
    return (losses(h, w, labels)[:, 2:] * mask[:, 2:]).sum() / 7


def with_options(h, w, labels, mask, advantages, old):
    each = losses(h, w, labels.clamp(min=0), ignore_index=3, label_smoothing=0.1)
    return (each * mask).mean()


def capped(h, w, labels, mask, advantages, old):
    logits = 5 * torch.tanh(F.linear(h, w) / 5)
    each = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), reduction="none")
    return (each * mask.view(-1)).sum() / mask.sum()


def ratio_of(h, w, labels, old):
    return torch.exp(-losses(h, w, labels) - old)


def clipped(h, w, labels, mask, advantages, old):
    """PPO and GRPO."""
    ratio = ratio_of(h, w, labels, old)
    each = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -((each * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def with_a_penalty(h, w, labels, mask, advantages, old):
    """GRPO with its estimate of the divergence from another model, here the older one."""
    logp = -losses(h, w, labels)
    penalty = torch.exp(old - logp) - (old - logp) - 1
    ratio = torch.exp(logp - logp.detach())
    return ((0.04 * penalty - ratio * advantages) * mask).sum() / mask.sum()


def truncated(h, w, labels, mask, advantages, old):
    """CISPO: the ratio is a weight without a gradient."""
    logp = -losses(h, w, labels)
    weight = torch.exp(logp - old).clamp(max=2.0).detach()
    return -(weight * advantages * logp * mask).sum() / mask.sum()


def focal(h, w, labels, mask, advantages, old):
    each = losses(h, w, labels)
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def squared(h, w, labels, mask, advantages, old):
    return 0.5 * losses(h, w, labels).square().sum()


def thresholded(h, w, labels, mask, advantages, old):
    """Rows of small losses count for nothing, as those that are known already."""
    each = losses(h, w, labels)
    return torch.where(each > 1.5, each, 0.0).sum() / each.numel()


def with_a_metric(h, w, labels, mask, advantages, old):
    """What else is made of the losses, without a gradient, is no reason."""
    each = losses(h, w, labels)
    return (each * mask).sum() / mask.sum(), each.detach().mean().exp()


#: What the forward can compute the gradients of; the names tell their plan in tests.
BY_ROW = {
    f.__name__: f
    for f in (
        masked_mean, mean_of_sequences, weighted, of_shifted_logits, some_tokens, with_options,
        capped, clipped, with_a_penalty, truncated, focal, squared, thresholded, with_a_metric,
    )
}  # fmt: skip


def preferences(h, w, labels, mask, advantages, old):
    """DPO: the log-probabilities of a sequence are summed first."""
    logps = -(losses(h, w, labels) * mask).sum(-1)
    chosen, rejected = logps.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def ratio_of_sequences(h, w, labels, mask, advantages, old):
    """GSPO."""
    log_ratio = ((-losses(h, w, labels) - old) * mask).sum(-1, keepdim=True) / TOKENS
    return -(torch.exp(log_ratio) * advantages * mask).mean()


def divided_by_itself(h, w, labels, mask, advantages, old):
    each = losses(h, w, labels)
    return (each * mask).sum() / each.detach().sum()


def softmax_weighted(h, w, labels, mask, advantages, old):
    each = losses(h, w, labels)
    return (each * each.detach().softmax(-1)).sum()


def squared_mean(h, w, labels, mask, advantages, old):
    return (losses(h, w, labels) * mask).mean() ** 2


def of_neighbours(h, w, labels, mask, advantages, old):
    each = losses(h, w, labels)
    return (each[:, 1:] * each[:, :-1]).sum()


def of_the_transposed(h, w, labels, mask, advantages, old):
    """Square, so that shapes alone don't tell."""
    each = losses(h, w, labels)[:, :BATCH]
    return (each * each.t()).sum()


def cumulative(h, w, labels, mask, advantages, old):
    return losses(h, w, labels).cumsum(-1).sigmoid().sum()


def each_of_them(h, w, labels, mask, advantages, old):
    """The gradient of each row comes from outside."""
    return losses(h, w, labels) * mask


def two_numbers(h, w, labels, mask, advantages, old):
    each = losses(h, w, labels)
    return each.square().sum(), each.sigmoid().sum()


#: These need the logits once more, or all along.
ACROSS_ROWS = {
    f.__name__: f
    for f in (
        preferences, ratio_of_sequences, divided_by_itself, softmax_weighted, squared_mean,
        of_neighbours, of_the_transposed, cumulative, each_of_them, two_numbers,
    )
}  # fmt: skip

PROGRAMS = programs(__name__, {**BY_ROW, **ACROSS_ROWS}, problem)
