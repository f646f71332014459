"""Entropies, and what else is read of the rows of logits that are held anyway."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.program import programs
from tests.corpus.shared import entropy_in_chunks, entropy_of, picked, picked_in_a_loop

BATCH, TOKENS, CLASSES = 4, 6, 11


def reinforce(log_probabilities, entropy):
    """Each number has a weight of its own, so that their order counts."""
    weights = torch.linspace(0.5, 2, entropy.numel(), dtype=entropy.dtype).view(entropy.shape)
    return (log_probabilities.exp() * weights).sum() - 0.1 * (entropy * weights.flip(0)).sum()


def in_loops(x, t):
    return reinforce(picked_in_a_loop(x, t), entropy_in_chunks(x))


def of_float32(x, t):
    return reinforce(picked(x, t), entropy_in_chunks(x))


def without_loops(x, t):
    log_probabilities = F.log_softmax(x, -1).gather(-1, t[..., None])[..., 0]
    return reinforce(log_probabilities, entropy_of(x))


def entropy_alone(x, t):
    entropy = entropy_of(x)
    return (entropy * torch.arange(entropy.numel()).view(entropy.shape)).mean()


def logged_entropy(x, t):
    log_probabilities = picked_in_a_loop(x, t)
    with torch.no_grad():
        entropy = entropy_in_chunks(x)
    return log_probabilities.exp().mean(), entropy.mean()


def entropy_logged_before(x, t):
    """The graph does not say whether gradients are recorded where it begins."""
    with torch.no_grad():
        entropy = entropy_in_chunks(x)
    return picked(x, t).exp().mean(), entropy.mean()


def categorical(x, t):
    actor = torch.distributions.Categorical(logits=x, validate_args=False)
    return reinforce(actor.log_prob(t), actor.entropy())


def regularised(x, t):
    flat = x.view(-1, CLASSES)
    loss = F.cross_entropy(flat, t.flatten(), ignore_index=3)
    return loss - 0.1 * entropy_of(flat).mean() + 1e-2 * flat.logsumexp(-1).square().mean()


def with_accuracy(x, t):
    log_probabilities, entropy = picked(x, t), entropy_of(x)
    hits = (x.detach().argmax(-1) == t).double().mean()
    return reinforce(log_probabilities, entropy), hits, x.detach().amax(-1).mean()


def of_shifted_tokens(x, t):
    return reinforce(picked(x[:, :-1], t[:, 1:]), entropy_in_chunks(x[:, :-1]))


def of_a_temperature_of_one(x, t):
    return without_loops(x / 1.0, t)


def of_a_softcap(x, t):
    return without_loops(3.0 * torch.tanh(x / 3.0), t)


def of_the_likeliest(x, t):
    """Class indices may be made of the logits, which are there."""
    return without_loops(x, x.detach().argmax(-1))


def used_otherwise(x, t):
    return without_loops(x, t) + (x.square() * x.softmax(-1)).sum()


def two_sets_of_classes(x, t):
    """The gradients of both sets would have to be added."""
    return reinforce(picked(x, t), entropy_of(x)) + 2 * picked(x, (t + 1) % CLASSES).sum()


def changed_before(x, t):
    x = x * 1.0
    x.mul_(0.5)
    return without_loops(x @ torch.eye(CLASSES, dtype=x.dtype), t)


TAKEN = {
    f.__name__: f
    for f in (
        in_loops, of_float32, without_loops, entropy_alone, logged_entropy, categorical,
        regularised, with_accuracy, of_shifted_tokens, of_a_temperature_of_one, of_a_softcap,
        of_the_likeliest, changed_before,
    )
}  # fmt: skip


def no_entropy(x, t):
    """Inductor reads a row once for all of it."""
    return picked(x, t).exp().mean() + 1e-2 * x.logsumexp(-1).square().mean() + x.sum(-1).mean()


def of_a_temperature(x, t):
    return without_loops(x / 0.7, t)


def of_a_sum(x, t):
    return without_loops(x + x.detach().sin(), t)


def of_a_shift(x, t):
    return without_loops(x + 1, t)


def of_some_classes(x, t):
    return entropy_alone(x[..., :-2], t)


def of_a_few_tokens(x, t):
    return without_loops(x[:, :2], t[:, :2])


def of_picked_rows(x, t):
    return entropy_alone(x[torch.tensor([2, 0, 1, 3])], t)


def over_the_tokens(x, t):
    probabilities = x.softmax(1)
    return (x.logsumexp(1) - (probabilities * x).sum(1)).square().mean()


def of_two_tensors(x, t):
    """The probabilities are those of other logits."""
    return (x.logsumexp(-1) - (F.softmax(x.flip(0), -1) * x).sum(-1)).square().mean()


def of_another_logarithm(x, t):
    """A cross entropy of two distributions."""
    return -(x.softmax(-1) * x.flip(-1).log_softmax(-1)).sum(-1).square().mean()


def half_of_the_chunks(x, t):
    parts = x.reshape(-1, CLASSES).split(6)
    return torch.cat([entropy_of(part) for part in parts[::2]]).square().mean()


def chunks_out_of_order(x, t):
    first, *rest = x.reshape(-1, CLASSES).split(6)
    entropies = torch.cat([entropy_of(part) for part in (*rest, first)])
    return (entropies * torch.arange(entropies.numel())).mean()


def overlapping_chunks(x, t):
    flat = x.reshape(-1, CLASSES)
    entropies = torch.cat([entropy_of(flat[i : i + 8]) for i in (0, 4, 8, 12, 16)])
    return (entropies * torch.arange(entropies.numel())).mean()


def changed_between(x, t):
    x = x @ torch.eye(CLASSES, dtype=x.dtype)
    log_probabilities = picked(x.detach(), t)
    x.mul_(0.5)
    return reinforce(log_probabilities, entropy_of(x))


def changed_between_chunks(x, t):
    x = (x.detach() @ torch.eye(CLASSES, dtype=x.dtype)).view(-1, CLASSES)
    entropies = []
    for chunk in x.split(6):
        entropies.append(entropy_of(chunk))
        x[-1].mul_(0.5)
    return torch.cat(entropies).square().sum()


LEFT = {
    f.__name__: f
    for f in (
        no_entropy, of_a_temperature, of_a_sum, of_a_shift, of_some_classes, of_a_few_tokens,
        of_picked_rows, over_the_tokens, of_two_tensors, of_another_logarithm, half_of_the_chunks,
        overlapping_chunks, changed_between_chunks, used_otherwise, two_sets_of_classes,
    )
}  # fmt: skip
#: Whatever is taken, the numbers are the same.
OTHERS = {f.__name__: f for f in (chunks_out_of_order, changed_between, entropy_logged_before)}


def problem(dtype=torch.float64):
    x = (torch.randn(BATCH, TOKENS, CLASSES) * 2).to(dtype).requires_grad_()
    return x, torch.randint(CLASSES, (BATCH, TOKENS))


PROGRAMS = programs(__name__, {**TAKEN, **LEFT, **OTHERS}, problem)
