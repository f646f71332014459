"""Logits of a head that several losses and metrics read."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.program import programs
from tests.corpus.rows import CLASSES, problem


def logits_of(h, w):
    return F.linear(h, w)


def picked(logits, labels):
    """Log-probabilities as TRL computes them of float32 logits."""
    found = torch.gather(logits, -1, labels.unsqueeze(-1)).squeeze(-1)
    return found - torch.stack([torch.logsumexp(sample, dim=-1) for sample in logits])


def picked_in_a_loop(logits, labels):
    """As TRL computes them of narrower logits."""
    rows = []
    for sample, index in zip(logits, labels, strict=True):
        all_classes = F.log_softmax(sample, dim=-1)
        rows.append(all_classes.gather(dim=-1, index=index.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def entropy_in_chunks(logits):
    """As TRL has it, a few rows at a time."""
    entropies = []
    for chunk in logits.reshape(-1, logits.shape[-1]).split(17, dim=0):
        log_probabilities = F.log_softmax(chunk, dim=-1)
        entropies.append(-(torch.exp(log_probabilities) * log_probabilities).sum(-1))
    return torch.cat(entropies, dim=0).reshape(logits.shape[:-1])


def entropy_of(logits):
    """As verl has it."""
    return torch.logsumexp(logits, -1) - (F.softmax(logits, -1) * logits).sum(-1)


def clipped(log_probabilities, mask, advantages, old):
    ratio = torch.exp(log_probabilities - old)
    each = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(each * mask).sum() / mask.sum()


def grpo_with_logged_entropy(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w) / 0.9, labels.clamp(min=0)
    log_probabilities = picked(logits, labels)
    with torch.no_grad():
        entropy = entropy_in_chunks(logits)
    return clipped(log_probabilities, mask, advantages, old), (entropy * mask).sum()


def grpo_in_loops(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w), labels.clamp(min=0)
    log_probabilities = picked_in_a_loop(logits, labels)
    entropy = entropy_in_chunks(logits)
    return clipped(log_probabilities, mask, advantages, old) - 0.01 * (entropy * mask).mean()


def ppo_with_entropy(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w), labels.clamp(min=0)
    log_probabilities = F.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]
    entropy = (entropy_of(logits) * mask).sum() / mask.sum()
    return clipped(log_probabilities, mask, advantages, old) - 0.01 * entropy


def token_accuracy(h, w, labels, mask, advantages, old):
    """As TRL's SFTTrainer logs it beside the model's loss."""
    shifted, targets = logits_of(h, w)[:, :-1].contiguous(), labels[:, 1:].contiguous()
    loss = F.cross_entropy(shifted.view(-1, CLASSES), targets.view(-1))
    with torch.no_grad():
        counted = targets != -100
        hits = ((shifted.argmax(dim=-1) == targets) & counted).sum()
    return loss, hits / counted.sum()


def with_z_loss(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), label_smoothing=0.1)
    return loss + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def with_shared_logsumexp(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w), labels.clamp(min=0)
    lse = torch.logsumexp(logits, dim=-1)
    log_probabilities = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - lse
    return -(log_probabilities * mask).sum() + 1e-2 * (lse**2 * mask).sum()


def smoothed_by_hand(h, w, labels, mask, advantages, old):
    """As fairseq has it."""
    lprobs = F.log_softmax(logits_of(h, w), -1).view(-1, CLASSES)
    target = labels.clamp(min=0).view(-1, 1)
    nll, smooth = -lprobs.gather(-1, target), -lprobs.sum(-1, keepdim=True)
    return 0.9 * nll.sum() + 0.1 / CLASSES * smooth.sum()


def categorical(h, w, labels, mask, advantages, old):
    actor = torch.distributions.Categorical(logits=logits_of(h, w), validate_args=False)
    gain = (actor.log_prob(labels.clamp(min=0)) * advantages).mean()
    return -gain - 0.01 * actor.entropy().mean()


def weighted_classes(h, w, labels, mask, advantages, old):
    """Also of classes in the second dimension, the maximum with its place, and detached."""
    logits = logits_of(h, w)
    weight = torch.linspace(0.5, 2, CLASSES, dtype=h.dtype)
    loss = F.cross_entropy(logits.transpose(1, 2), labels, weight, reduction="mean")
    largest, place = logits.detach().max(-1)
    return loss, largest.mean(), (place == labels).double().mean()


def two_cross_entropies(h, w, labels, mask, advantages, old):
    """Of the same classes, one smoothed and summed, the other by row."""
    logits, flat = logits_of(h, w).flatten(0, 1), labels.flatten()
    each = F.cross_entropy(logits, flat, reduction="none")
    return (each.square() * mask.flatten()).mean() + F.cross_entropy(logits, flat, reduction="sum")


def metrics_of_some_rows(h, w, labels, mask, advantages, old):
    """A loss of transformers pads its labels, and metrics leave the last row out."""
    logits = logits_of(h, w)
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(logits.view(-1, CLASSES), shifted.view(-1))
    with torch.no_grad():
        hits = (logits[..., :-1, :].argmax(-1) == labels[..., 1:]).double().mean()
    last = entropy_of(logits[:, -1])
    return loss + 0.1 * last.mean() + torch.logsumexp(logits, -1).transpose(0, 1)[3].sum(), hits


def entropies_of_transposed_rows(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    entropy = entropy_of(logits.transpose(0, 1)[2:])  # [rows, batch]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + (entropy * mask.t()[2:]).mean()


def loss_of_some_rows(h, w, labels, mask, advantages, old):
    """Predictions are of all rows, and the last has no label."""
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return loss, logits.argmax(-1)


def smoothed_loss_of_some_rows(h, w, labels, mask, advantages, old):
    """Of every second row of one sample, beside a gradient of all rows."""
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits[1, ::2], labels[1, ::2], label_smoothing=0.2)
    return loss - 0.1 * (entropy_of(logits) * mask).mean()


def weighted_loss_of_transposed_rows(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    weight = torch.linspace(0.5, 2, CLASSES, dtype=h.dtype)
    some = logits.transpose(0, 1)[2:]
    loss = F.cross_entropy(some.flatten(0, 1), labels.t()[2:].flatten(), weight)
    return loss + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def likelihoods_of_some_rows(h, w, labels, mask, advantages, old):
    """An answer behind a prompt, and the entropy of both."""
    logits = logits_of(h, w)
    answers = picked(logits[:, 2:], labels[:, 2:].clamp(min=0))
    return clipped(answers, mask[:, 2:], advantages, old[:, 2:]), entropy_of(logits).detach()


def entropy_alone(h, w, labels, mask, advantages, old):
    return (entropy_of(5 * torch.tanh(logits_of(h, w) / 5)) * mask).mean()


def of_scaled_hidden(h, w, labels, mask, advantages, old):
    """A layer with a bias for each class, temperature and soft-cap."""
    logits = 3 * torch.tanh((logits_of(h, w) + advantages.sum()) / 6)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + entropy_of(logits).mean()


def classes_of_two_sets_of_rows(h, w, labels, mask, advantages, old):
    """As ORPO has it: likelihoods of all answers, and a loss of the first alone."""
    logits = logits_of(h, w)
    answers = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten())
    return F.cross_entropy(logits[0], labels[0]) + 0.1 * answers


def other_classes(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w).flatten(0, 1)
    labels = labels.clamp(min=0).flatten()
    other = (labels + 1) % CLASSES
    return F.cross_entropy(logits, labels) - 0.1 * F.cross_entropy(logits, other)


def other_ignored_classes(h, w, labels, mask, advantages, old):
    logits, labels = logits_of(h, w).flatten(0, 1), labels.clamp(min=0).flatten()
    one = F.cross_entropy(logits, labels, ignore_index=3)
    return one + F.cross_entropy(logits, labels, ignore_index=5)


#: What the forward can compute the gradients of.
BY_ROW = {
    f.__name__: f
    for f in (
        grpo_with_logged_entropy, grpo_in_loops, ppo_with_entropy, token_accuracy, with_z_loss,
        with_shared_logsumexp, smoothed_by_hand, categorical, weighted_classes,
        two_cross_entropies, metrics_of_some_rows, entropies_of_transposed_rows, entropy_alone,
        loss_of_some_rows, smoothed_loss_of_some_rows, weighted_loss_of_transposed_rows,
        classes_of_two_sets_of_rows, other_classes, other_ignored_classes,
    )
}  # fmt: skip


def of_other_rows(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    entropy = entropy_of(logits)
    spread = (entropy - entropy.mean()).square().mean()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + spread


def probabilities_are_used(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), F.softmax(logits, -1)


def another_temperature(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + entropy_of(logits / 2).mean()


def gradient_of_the_maximum(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.amax(-1).mean()


def over_the_rows(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + torch.logsumexp(logits, 1).mean()


def half_detached(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss - (F.softmax(logits.detach(), -1) * F.log_softmax(logits, -1)).sum(-1).mean()


def half_without_gradients(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    with torch.no_grad():
        probabilities = F.softmax(logits, -1)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss - (probabilities * F.log_softmax(logits, -1)).sum(-1).mean()


def shifted(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w) + 1.5
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + torch.logsumexp(logits, -1).mean()


def picked_of_bounded(h, w, labels, mask, advantages, old):
    """A bound matters where a class is picked that has no probability."""
    logits, labels = logits_of(h, w), labels.clamp(min=0)
    bounded = F.log_softmax(logits, -1).clamp(min=torch.finfo(h.dtype).min)
    picked = bounded.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(logits, -1).mean() - (picked * mask).mean()


def of_sigmoids(h, w, labels, mask, advantages, old):
    """A soft-cap whose addend softmax drops, and a logsumexp does not."""
    logits = 30 * torch.sigmoid(logits_of(h, w) / 7.5)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + torch.logsumexp(logits, -1).mean()


def picked_by_themselves(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    best = logits.argmax(-1)
    return -(F.log_softmax(logits, -1).gather(-1, best.unsqueeze(-1)).squeeze(-1) * mask).sum()


def written_between(h, w, labels, mask, advantages, old):
    """The classes that are picked last are others, in the memory of the first."""
    logits, labels = logits_of(h, w).flatten(0, 1), labels.clamp(min=0).flatten()
    with torch.no_grad():
        first = F.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1))
        labels.add_(1).remainder_(CLASSES)
        last = F.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1))
    return torch.logsumexp(logits, -1).mean(), first, last


def in_place(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    logits = logits.detach().clone()
    logits[..., 3] = 100.0
    return loss, logits.argmax(-1)


def used_before(h, w, labels, mask, advantages, old):
    """The labels depend on what is read of the logits."""
    logits = logits_of(h, w)
    entropy = entropy_of(logits).detach()
    chosen = torch.where(entropy > entropy.mean(), labels, -100)
    return F.cross_entropy(logits.flatten(0, 1), chosen.flatten())


def learned_temperature_of_one(h, w, labels, mask, advantages, old):
    logits = logits_of(h, w)
    scaled = logits * w[0, 0].exp()
    return F.cross_entropy(scaled.flatten(0, 1), labels.flatten()) + entropy_of(logits).mean()


NEAR_MISSES = (
    probabilities_are_used, another_temperature, gradient_of_the_maximum, over_the_rows,
    half_detached, half_without_gradients, shifted, of_sigmoids, picked_by_themselves,
    written_between, in_place, used_before, learned_temperature_of_one, picked_of_bounded,
)  # fmt: skip

OTHERS = (of_other_rows, likelihoods_of_some_rows, of_scaled_hidden)

PROGRAMS = [
    *programs(__name__, BY_ROW, problem),
    *programs(__name__, (*OTHERS, *NEAR_MISSES), problem),
]
