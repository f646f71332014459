"""Linear layers and the cross entropy of their output."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.program import programs

ROWS, HIDDEN, CLASSES = (2, 6), 8, 50


def head(dtype=torch.float32):
    hidden = torch.randn(*ROWS, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, HIDDEN).to(dtype).requires_grad_()
    bias = torch.randn(CLASSES).to(dtype).requires_grad_()
    labels = torch.randint(CLASSES, ROWS)
    labels[0, 1] = -100
    return hidden, weight, bias, labels


def flat(logits, labels, **options):
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), **options)


def causal_lm(h, w, b, labels):
    """transformers' ForCausalLMLoss."""
    logits = F.linear(h[:, slice(0, None), :], w).float()
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.view(-1, CLASSES)
    return F.cross_entropy(logits, labels.view(-1), ignore_index=-100, reduction="sum") / 7


def shifted_logits(h, w, b, labels):
    """The older spelling: the logits are shifted."""
    logits = F.linear(h, w, b)[..., :-1, :].contiguous()
    return flat(logits, labels[..., 1:].contiguous())


def soft_capped(h, w, b, labels):
    logits = torch.tanh(F.linear(h, w) / 30.0) * 30.0
    return flat(logits.float(), labels)


def autocast_inside(h, w, b, labels):
    with torch.autocast("cpu", torch.bfloat16):
        return flat(F.linear(h, w, b), labels)


def autocast_of_the_layer(h, w, b, labels):
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(h, w, b)
    return flat(logits.float(), labels)


def autocast_after_a_layer(h, w, b, labels):
    """The head's input is bfloat16 already, its weight and bias are not."""
    with torch.autocast("cpu", torch.bfloat16):
        return flat(F.linear(F.linear(h, w[:8]).relu(), w, b), labels)


def autocast_of_the_loss(h, w, b, labels):
    logits = F.linear(h, w, b)
    with torch.autocast("cpu", torch.bfloat16):
        return flat(logits, labels)


MATCHES = {
    "two casts that change nothing": (
        lambda h, w, b, t: flat(F.linear(h, w).contiguous().float().contiguous(), t)
    ),
    "flattened": lambda h, w, b, t: flat(F.linear(h, w, b), t),
    "reshape": lambda h, w, b, t: F.cross_entropy(F.linear(h, w).reshape(12, 50), t.reshape(12)),
    "flatten": lambda h, w, b, t: F.cross_entropy(F.linear(h, w).flatten(0, 1), t.flatten()),
    "flattened before": lambda h, w, b, t: F.cross_entropy(F.linear(h.view(-1, 8), w), t.view(-1)),
    "causal": causal_lm,
    "shifted": shifted_logits,
    "soft-cap": soft_capped,
    "soft-cap by reciprocal": lambda h, w, b, t: flat(
        torch.tanh(F.linear(h, w, b) * (1 / 3)) * 3.0, t
    ),
    "factor and soft-cap": lambda h, w, b, t: flat(
        5.0 * torch.tanh(F.linear(h, w, b) * 0.5 / 5.0), t
    ),
    "factor": lambda h, w, b, t: flat(F.linear(h, w, b) * 0.3, t),
    "temperature": lambda h, w, b, t: flat(F.linear(h, w, b) / 0.7, t),
    "matmul": lambda h, w, b, t: flat(h @ w.t(), t),
    "method": lambda h, w, b, t: flat(h.matmul(w.T), t),
    "classes second": lambda h, w, b, t: F.cross_entropy(F.linear(h, w, b).transpose(1, 2), t),
    "permuted": lambda h, w, b, t: F.cross_entropy(F.linear(h, w, b).permute(1, 2, 0), t.t()),
    "one position": lambda h, w, b, t: F.cross_entropy(F.linear(h, w, b)[:, -1], t[:, -1] % 50),
    "every other": lambda h, w, b, t: F.cross_entropy(
        F.linear(h, w, b)[:, ::2].reshape(-1, 50), t[:, ::2].reshape(-1)
    ),
    "one dimension more": lambda h, w, b, t: flat(F.linear(h, w, b).unsqueeze(1).squeeze(1), t),
    "options": lambda h, w, b, t: flat(
        F.linear(h, w, b), t, weight=torch.linspace(1, 2, 50), label_smoothing=0.1
    ),
    "frozen head": lambda h, w, b, t: flat(F.linear(h, w.detach()), t),
    "frozen trunk": lambda h, w, b, t: flat(F.linear(h.detach(), w, b), t),
    "tied": lambda h, w, b, t: flat(F.linear(h + F.embedding(t.clamp(min=0), w), w), t),
    "without gradients": lambda h, w, b, t: flat(
        F.linear(h.detach(), w.detach(), b.detach()), t, reduction="none"
    ),
    "written out": lambda h, w, b, t: (
        -F.log_softmax(F.linear(h, w, b).float(), -1)
        .gather(-1, t.clamp(min=0).unsqueeze(-1))
        .mean()
    ),
    "autocast inside": autocast_inside,
    "autocast of the layer": autocast_of_the_layer,
    "autocast after a layer": autocast_after_a_layer,
    "autocast of the loss": autocast_of_the_loss,
}


def returned(h, w, b, labels):
    logits = F.linear(h, w, b)
    return flat(logits, labels) + logits.square().sum()


def changed_in_place(h, w, b, labels):
    h = h * 1
    logits = F.linear(h, w.detach(), b)
    h.add_(1)
    return flat(logits, labels)


def logits_changed_in_place(h, w, b, labels):
    logits = F.linear(h, w, b)
    logits[..., 0] = -torch.inf
    return flat(logits, labels.clamp(min=1))


def cut(h, w, b, labels):
    return flat(F.linear(h, w, b).detach() + 0 * h.sum(), labels)


def no_grad_layer(h, w, b, labels):
    with torch.no_grad():
        logits = F.linear(h, w, b)
    return flat(logits, labels) * h.sum()


CROSS_ENTROPY_ALONE = {
    "live logits": (returned, "the logits have other users"),
    "rows taken apart": (
        lambda h, w, b, t: F.cross_entropy(F.linear(h, w).view(-1, 25), t.view(-1).repeat(2) % 9),
        "takes the classes of a row apart",
    ),
    "changed hidden states": (changed_in_place, "changed in place"),
}  # fmt: skip

PROGRAMS = [
    *programs(__name__, MATCHES, head),
    *programs(__name__, CROSS_ENTROPY_ALONE, head),
    *programs(__name__, (logits_changed_in_place, cut, no_grad_layer), head),
]
