"""Heads in 16 bits whose logits are scaled after a cast to float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.program import programs
from tests.corpus.rows import CLASSES, problem
from tests.corpus.shared import entropy_of


def narrow_problem():
    return problem(torch.bfloat16)


def wide(logits):
    """In float32, as models write it; float64 stays, for tests."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def flat(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def temperature(h, w, labels, mask, advantages, old):
    return flat(wide(F.linear(h, w)) / 0.7, labels)


def negative_factor(h, w, labels, mask, advantages, old):
    """Of a layer with a bias, summed, with weights of classes."""
    weight = torch.linspace(0.5, 2, CLASSES, dtype=torch.promote_types(h.dtype, torch.float32))
    logits = wide(F.linear(h, w, w.sum(1))) * -0.3
    return flat(logits, labels, weight=weight, reduction="sum")


def before_a_soft_cap(h, w, labels, mask, advantages, old):
    return flat(15 * torch.tanh(wide(F.linear(h, w)) / 7.3), labels)


def modded_nanogpt(h, w, labels, mask, advantages, old):
    logits = 15 * torch.sigmoid(wide(F.linear(h, w)) / (7.5 * CLASSES**0.5))
    return flat(logits, labels, label_smoothing=0.1)


def of_tokens(h, w, labels, mask, advantages, old):
    """Factors on both sides of the cast, and rows in another order."""
    logits = wide(F.linear(h, w).transpose(0, 1) * 0.5) / 1.7
    each = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
    return (each * mask.t().flatten()).sum() / mask.sum()


def several_losses(h, w, labels, mask, advantages, old):
    logits = wide(F.linear(h, w)) * 1.3
    lse = torch.logsumexp(logits, -1)
    loss = flat(logits, labels) + 1e-2 * lse.square().mean() - 0.1 * entropy_of(logits).mean()
    return loss, (logits.detach().argmax(-1) == labels).to(h.dtype).mean()


#: What the forward can compute the gradients of.
BY_ROW = {
    f.__name__: f
    for f in (
        temperature, negative_factor, before_a_soft_cap, modded_nanogpt, of_tokens, several_losses,
    )
}  # fmt: skip


def preferences(h, w, labels, mask, advantages, old):
    """DPO: the log-probabilities of a sequence are summed first."""
    each = flat(wide(F.linear(h, w)) / 0.7, labels, reduction="none").view(labels.shape)
    chosen, rejected = (-(each * mask).sum(-1)).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def preferences_with_a_bias(h, w, labels, mask, advantages, old):
    logits = wide(F.linear(h, w, w.sum(1))) * 0.3
    log_probs = F.log_softmax(logits, -1)
    picked = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    chosen, rejected = (picked * mask).sum(-1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean() - 0.1 * entropy_of(logits).mean()


#: These need the logits once more, or all along.
ACROSS_ROWS = {f.__name__: f for f in (preferences, preferences_with_a_bias)}


def masked_after(h, w, labels, mask, advantages, old):
    """The mask's number would be scaled, too."""
    padding = torch.arange(CLASSES) >= CLASSES - 3
    logits = (wide(F.linear(h, w)) / 0.7).masked_fill(padding, -64.0)
    return flat(logits, labels.clamp(min=0, max=CLASSES - 4))


def masked_before(h, w, labels, mask, advantages, old):
    """The mask's number times the factor would be rounded."""
    padding = torch.arange(CLASSES) >= CLASSES - 3
    logits = wide(F.linear(h, w)).masked_fill(padding, -64.0) / 0.7
    return flat(logits, labels.clamp(min=0), label_smoothing=0.1)


def learned_factor(h, w, labels, mask, advantages, old):
    return flat(wide(F.linear(h, w)) * wide(w[0, 0]).exp(), labels)


def offset(h, w, labels, mask, advantages, old):
    """A number that is added in float32 is more exact than a bias."""
    return flat(23 * torch.sigmoid((wide(F.linear(h, w)) + 5) / 7.5), labels)


def two_factors(h, w, labels, mask, advantages, old):
    logits = wide(F.linear(h, w))
    return flat(logits / 0.7, labels) + entropy_of(logits / 0.9).mean()


#: With words of the reason.
NEAR_MISSES = {
    "masked after": (masked_after, "scaled in float32"),
    "masked before": (masked_before, "scaled in float32"),
    "learned factor": (learned_factor, "float32 after a narrower"),
    "offset": (offset, "a number is added to the logits before"),
    "two factors": (two_factors, "scales them otherwise"),
}

PROGRAMS = [
    *programs(__name__, {**BY_ROW, **ACROSS_ROWS}, narrow_problem),
    *programs(__name__, NEAR_MISSES, narrow_problem),
]
