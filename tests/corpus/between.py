"""What models have between a head and its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.heads import CLASSES, HIDDEN, flat, head
from tests.corpus.program import programs

PADDING = torch.arange(CLASSES) >= CLASSES - 6


def known(labels):
    """Labels among the first classes, none of them padding or ignored."""
    return labels.clamp(min=0) % 40


def padded_vocabulary(h, w, b, t):
    """Megatron's and NeMo's: the last classes are there for the matrix product only."""
    return flat(F.linear(h, w).masked_fill(PADDING, -torch.inf), known(t))


def nanochat(h, w, b, t):
    logits = F.linear(h, w)[..., :44].float()
    logits = 15 * torch.tanh(logits / 15)
    return F.cross_entropy(logits.view(-1, 44), known(t).view(-1), ignore_index=-1)


def log_priors(h, w, b, t):
    """Logit adjustment for classes of different frequencies."""
    priors = torch.arange(1, CLASSES + 1, dtype=h.dtype).div(CLASSES).log()
    return flat(F.linear(h, w, b) + 0.5 * priors, t)


def last_tokens(h, w, b, t):
    """Sequence classification: the last token of each sequence."""
    lengths = torch.tensor([3, 5])
    return F.cross_entropy(F.linear(h, w)[torch.arange(2), lengths], known(t)[:, 0])


def multiple_choice(h, w, b, t):
    index = torch.tensor([[0, 2], [1, 3]])
    picked = F.linear(h, w).view(-1, CLASSES)[index]
    return F.cross_entropy(picked.view(-1, CLASSES), known(t)[:, :2].reshape(-1))


def modded_nanogpt(h, w, b, t):
    """In float32 that is a soft-cap of 7.5."""
    return flat(15 * torch.sigmoid(F.linear(h, w) / (7.5 * h.size(-1) ** 0.5)), t)


def temperature_of_rows(h, w, b, t):
    temperatures = torch.linspace(0.5, 2, 6, dtype=h.dtype).view(1, 6, 1)
    return flat(F.linear(h, w) / temperatures, t)


MATCHES = {
    # An addend for each class.
    "bias written out": lambda h, w, b, t: flat(F.linear(h, w) + b, t),
    "bias of two dimensions": lambda h, w, b, t: flat(h @ w.t() + b.view(1, -1), t),
    "bias ahead": lambda h, w, b, t: flat(b + h @ w.t(), t),
    "two biases": lambda h, w, b, t: flat(F.linear(h, w, b) + b.detach(), t),
    "bias subtracted": lambda h, w, b, t: flat(F.linear(h, w) - b, t),
    "bias of flat rows": lambda h, w, b, t: flat(F.linear(h, w).view(-1, CLASSES) + b, t),
    "merged and split again": lambda h, w, b, t: flat(F.linear(h, w).view(-1).view(-1, CLASSES), t),
    "bias, then classes second": lambda h, w, b, t: F.cross_entropy(
        (F.linear(h, w) + b).transpose(1, 2), t
    ),
    "bias of classes second": lambda h, w, b, t: F.cross_entropy(
        F.linear(h, w).transpose(1, 2) + b[:, None], t
    ),
    "log-priors": log_priors,
    "bias, then factor": lambda h, w, b, t: flat((F.linear(h, w) + b) * 0.5, t),
    "factor, then bias": lambda h, w, b, t: flat(F.linear(h, w, b) * 0.5 + b, t),
    "bias, then soft-cap": lambda h, w, b, t: flat(torch.tanh((F.linear(h, w) + b) / 5) * 5, t),
    "a number added": lambda h, w, b, t: flat(F.linear(h, w) + 3.0, t),
    "a number subtracted from a soft-cap": lambda h, w, b, t: flat(
        5 * torch.tanh(F.linear(h, w) / 5) - 2.5, t
    ),
    # Factors that are tensors.
    "learned scale": lambda h, w, b, t: flat(F.linear(h, w) * b[0], t),
    "learned scale ahead": lambda h, w, b, t: flat(b[0].exp() * F.linear(h, w, b), t),
    "learned temperature": lambda h, w, b, t: flat(F.linear(h, w) / b[:1].exp(), t),
    "learned scale of flat rows": lambda h, w, b, t: flat(
        F.linear(h, w, b).view(-1, CLASSES) * b[:1], t
    ),
    "factor of the layer": lambda h, w, b, t: flat(F.linear(h, w) * b.mean(), t),
    "scale of each class": lambda h, w, b, t: flat(F.linear(h, w, b) * b, t),
    "divisor of each class": lambda h, w, b, t: flat(F.linear(h, w) / (1 + b**2), t),
    "scale of classes second": lambda h, w, b, t: F.cross_entropy(
        F.linear(h, w).transpose(1, 2) * b[:, None], t
    ),
    "temperature of each row": temperature_of_rows,
    # Some of the classes.
    "slice of the vocabulary": lambda h, w, b, t: F.cross_entropy(
        F.linear(h, w, b)[..., :44].reshape(-1, 44), known(t).view(-1)
    ),
    "slice without the last": lambda h, w, b, t: F.cross_entropy(
        F.linear(h, w, b)[:, :, :-3].transpose(1, 2), known(t)
    ),
    "narrow": lambda h, w, b, t: F.cross_entropy(
        F.linear(h, w).narrow(-1, 2, 41).reshape(-1, 41), known(t).view(-1)
    ),
    "padded vocabulary": padded_vocabulary,
    "padded vocabulary with a bias": lambda h, w, b, t: flat(
        F.linear(h, w, b).masked_fill(PADDING, -1e4 if h.dtype == torch.float32 else -(2.0**12)),
        known(t),
    ),
    "padding by where": lambda h, w, b, t: flat(
        torch.where(PADDING, -torch.inf, F.linear(h, w)), known(t)
    ),
    "classes kept by where": lambda h, w, b, t: flat(
        torch.where(~PADDING, F.linear(h, w), -torch.inf), known(t)
    ),
    "mask added": lambda h, w, b, t: flat(
        F.linear(h, w) + torch.zeros(CLASSES, dtype=h.dtype).masked_fill(PADDING, -torch.inf),
        known(t),
    ),
    # Soft-caps in other clothes.
    "nanochat": nanochat,
    "soft-cap after a cast": lambda h, w, b, t: flat(
        torch.tanh(F.linear(h, w).float() / 30) * 30, t
    ),
    "cast inside a soft-cap": lambda h, w, b, t: flat(
        torch.tanh(F.linear(h, w) / 30).float() * 30, t
    ),
    "tanh": lambda h, w, b, t: flat(torch.tanh(F.linear(h, w)), t),
    "tanh with a factor": lambda h, w, b, t: flat(torch.tanh(F.linear(h, w)) * 8, t),
    "tanh with a divisor": lambda h, w, b, t: flat(torch.tanh(F.linear(h, w) / 3), t),
    "two factors around tanh": lambda h, w, b, t: flat(torch.tanh(F.linear(h, w) / 4) * 2, t),
    "tanh turned over": lambda h, w, b, t: flat(torch.tanh(F.linear(h, w) / 4) * -4, t),
    "soft-cap, then factor": lambda h, w, b, t: flat(torch.tanh(F.linear(h, w) / 3) * 3 * 2, t),
    "sigmoid": lambda h, w, b, t: flat(F.linear(h, w).sigmoid(), t),
    "sigmoid as a soft-cap": lambda h, w, b, t: flat(15 * (F.linear(h, w, b) / 7.5).sigmoid(), t),
    "modded-nanogpt": modded_nanogpt,
    "offset of a sigmoid": lambda h, w, b, t: flat(
        23 * torch.sigmoid((F.linear(h, w) + 5) / 7.5), t
    ),
    "offsets around a factor": lambda h, w, b, t: flat(
        8 * torch.tanh(((F.linear(h, w, b) - 0.5) * 0.3 - 1) / 8), t
    ),
    "a number for each row": lambda h, w, b, t: flat(F.linear(h, w) + h.detach()[..., :1], t),
    # Rows picked.
    "last token of each": last_tokens,
    "multiple choice": multiple_choice,
    "index_select": lambda h, w, b, t: F.cross_entropy(
        F.linear(h, w).view(-1, CLASSES).index_select(0, torch.tensor([1, 5, 5, 2])),
        known(t).view(-1)[:4],
    ),
    "index_select of positions": lambda h, w, b, t: flat(
        F.linear(h, w, b).index_select(1, t[0].abs() % 6), known(t)
    ),
    "brackets": lambda h, w, b, t: F.cross_entropy(F.linear(h, w)[0][t[0].abs() % 6], known(t[0])),
    # Heads in other words.
    "einsum": lambda h, w, b, t: flat(torch.einsum("bth,vh->btv", h, w), t),
    "einsum of the transposed": lambda h, w, b, t: flat(
        torch.einsum("... h, h v -> ... v", h, w.t()), t
    ),
    "einsum, weight first": lambda h, w, b, t: flat(torch.einsum("vh,bth->btv", w, h) + b, t),
    "einsum of two matrices": lambda h, w, b, t: flat(
        torch.einsum("vh,nh->nv", [w, h.view(-1, HIDDEN)]), t
    ),
    "addmm": lambda h, w, b, t: flat(torch.addmm(b, h.view(-1, HIDDEN), w.t()), t),
    "addmm method": lambda h, w, b, t: flat(b.addmm(h.view(-1, HIDDEN), w.t()), t),
    "inner": lambda h, w, b, t: flat(torch.inner(h, w), t),
    "cat of one": lambda h, w, b, t: flat(torch.cat([F.linear(h, w, b)], 0), t),
    "cat of weights": lambda h, w, b, t: F.cross_entropy(
        F.linear(h, torch.cat([w, w[:4]])).view(-1, CLASSES + 4), known(t).view(-1)
    ),
}


def cosface(h, w, b, t):
    cosines = F.linear(F.normalize(h, dim=-1), F.normalize(w, dim=-1)).view(-1, CLASSES)
    margin = 0.35 * F.one_hot(known(t).view(-1), CLASSES)
    return F.cross_entropy(16.0 * (cosines - margin), known(t).view(-1))


def lora(h, w, b, t):
    return flat(F.linear(h, w) + 0.5 * F.linear(F.linear(h, w[:4]), w[:, :4]), t)


def rsqrt_cap(h, w, b, t):
    logits = F.linear(h, w)
    return flat(5 * logits * torch.rsqrt(logits**2 + 25), t)


def shifted_before_a_mask(h, w, b, t):
    return flat((F.linear(h, w) + 3).masked_fill(PADDING, 0.5), t)


def written_between(h, w, b, t):
    """The bias is changed between the place that adds it and the loss."""
    b = b.detach().clone()
    logits = F.linear(h, w) + b
    b.mul_(2)
    return flat(logits, t)


def scale_without_gradient(h, w, b, t):
    with torch.no_grad():
        logits = F.linear(h, w) * b[0]
    return flat(logits, t) * b.sum()


def far_above(h, w, b, t):
    logits = F.linear(h, w)
    for _ in range(20):
        logits = logits.unsqueeze(0).squeeze(0)
    return flat(logits, t)


#: Each stays cross entropy of its logits, with a reason that has these words.
NEAR_MISSES = {
    "an addend of each row": (
        lambda h, w, b, t: flat(F.linear(h, w) + h[..., :1], t), "a number to each row"
    ),
    "an addend of each logit": (
        lambda h, w, b, t: flat(F.linear(h, w) + torch.ones(2, 6, CLASSES), t), "a tensor to"
    ),
    "merged and split otherwise": (
        lambda h, w, b, t: F.cross_entropy(
            F.linear(h, w).view(-1).view(-1, CLASSES // 2), known(t).view(-1).repeat(2) % 20
        ),
        "takes the classes of a row apart",
    ),
    "an addend after a soft-cap": (
        lambda h, w, b, t: flat(5 * torch.tanh(F.linear(h, w) / 5) + b, t), "after their soft-cap"
    ),
    "a number before factors": (
        lambda h, w, b, t: flat((F.linear(h, w) + 1) * b, t), "a number is added"
    ),
    "a number before a mask": (shifted_before_a_mask, "a number is added"),
    "alpha": (lambda h, w, b, t: flat(torch.add(F.linear(h, w), b, alpha=2), t), "a multiple"),
    "a low-rank addend": (lora, "adds a tensor to the logits"),
    "a factor of each logit": (
        lambda h, w, b, t: flat(F.linear(h, w) * torch.ones(2, 6, CLASSES), t), "number of its own"
    ),
    "a factor of each row of a layer with a bias": (
        lambda h, w, b, t: flat(F.linear(h, w, b) * h.detach()[..., :1], t), "with a bias"
    ),
    "rows repeated": (
        lambda h, w, b, t: flat(F.linear(h, w)[:1] * torch.ones(2, 1, 1), t), "repeats the logits"
    ),
    "a factor of 0": (lambda h, w, b, t: flat(F.linear(h, w) * 0.0, t), "by 0"),
    "a learned soft-cap": (
        lambda h, w, b, t: flat(b[0] * torch.tanh(F.linear(h, w) / 5), t), "after their soft-cap"
    ),
    "a soft-cap of a soft-cap": (
        lambda h, w, b, t: flat(torch.tanh(torch.tanh(F.linear(h, w))), t), "after their soft-cap"
    ),
    "another cap": (rsqrt_cap, "made of the logits as well"),
    "floor": (
        lambda h, w, b, t: flat(torch.div(F.linear(h, w), 0.5, rounding_mode="floor"), t), "rounds"
    ),
    "many ops": (far_above, None),
    "squares": (lambda h, w, b, t: flat(F.linear(h, w).square(), t), "is none of"),
    "clamp": (lambda h, w, b, t: flat(F.linear(h, w).clamp(-5, 5), t), "bounds the logits"),
    "nan_to_num": (lambda h, w, b, t: flat(F.linear(h, w).nan_to_num(), t), "not finite"),
    "two layers": (
        lambda h, w, b, t: flat(torch.cat([F.linear(h, w[:9]), F.linear(h, w[9:])], -1), t),
        "one layer that has all their weights",
    ),
    "a margin": (cosface, "adds a tensor to the logits"),
    "rows masked": (
        lambda h, w, b, t: flat(F.linear(h, w).masked_fill(t[..., None] > 7, 0.0), t),
        "some of the logits, not some of the classes",
    ),
    "a mask after a soft-cap": (
        lambda h, w, b, t: flat(
            (5 * torch.tanh(F.linear(h, w) / 5)).masked_fill(PADDING, -torch.inf), known(t)
        ),
        "after their soft-cap",
    ),
    "classes replaced by a tensor": (
        lambda h, w, b, t: flat(torch.where(PADDING, b, F.linear(h, w)), t), "a tensor's values"
    ),
    "classes picked": (
        lambda h, w, b, t: F.cross_entropy(
            F.linear(h, w)[:, :, torch.arange(9).view(3, 3)].reshape(-1, 9), t.view(-1) % 9
        ),
        "only some classes",
    ),
    "rows and classes picked": (
        lambda h, w, b, t: F.cross_entropy(
            F.linear(h, w)[:, torch.arange(h.shape[1])[:, None], torch.arange(9)].reshape(-1, 9),
            t.view(-1) % 9,
        ),
        "only some classes",
    ),
    "changed between": (written_between, "changed in place"),
    "an einsum of batches": (
        lambda h, w, b, t: flat(
            torch.einsum("bth,vh->btv", h, w) + torch.einsum("bth,bth->bt", h, h)[..., None], t
        ),
        "a number to each row",
    ),
    "classes of an einsum in the middle": (
        lambda h, w, b, t: F.cross_entropy(torch.einsum("bth,vh->bvt", h, w), t), None
    ),
    "addmm with factors": (
        lambda h, w, b, t: flat(torch.addmm(b, h.view(-1, HIDDEN), w.t(), beta=2), t), None
    ),
    "a convolution": (
        lambda h, w, b, t: F.cross_entropy(F.conv1d(h.transpose(1, 2), w[..., None], b), t),
        "a convolution of width 1",
    ),
}  # fmt: skip


def rows_with_labels(h, w, b, t):
    kept = t.view(-1) >= 0
    return F.cross_entropy(F.linear(h, w).view(-1, CLASSES)[kept], t.view(-1)[kept])


NARROW_MISSES = {
    "learned factor in float32": (
        lambda h, w, b, t: flat(F.linear(h, w).float() * b[0], t), "float32 after a narrower"
    ),
    "addend in float32": (
        lambda h, w, b, t: flat(F.linear(h, w).float() + b.float(), t), "float32 after a narrower"
    ),
    "a mask of a number that is rounded": (
        lambda h, w, b, t: flat(F.linear(h, w).float().masked_fill(PADDING, -1e4), known(t)),
        "rounds",
    ),
}  # fmt: skip


def narrow_head():
    return head(torch.bfloat16)


PROGRAMS = [
    *programs(__name__, MATCHES, head),
    *programs(__name__, {f"no {name}": f for name, f in NEAR_MISSES.items()}, head),
    *programs(__name__, {f"narrow {n}": f for n, f in NARROW_MISSES.items()}, narrow_head),
]
