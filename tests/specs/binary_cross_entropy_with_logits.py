"""Binary cross entropy of logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.specs.spec import Spec, Spelling, elementwise_samples

NAME = "binary_cross_entropy_with_logits"
loss = F.binary_cross_entropy_with_logits


def logits(shape, generator: torch.Generator) -> Tensor:
    """Some of them confident, right and wrong."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values * torch.where(values.abs() > 1.5, 20.0, 2.0)


def labels(shape, generator: torch.Generator) -> Tensor:
    """Half of them 0 or 1, the others between."""
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 0.5).clamp(0, 1)


def torch_loss(input, target, reduction=1, **weights):
    return loss(input, target, reduction=("none", "mean", "sum")[reduction], **weights)


def logits_and_labels():
    return torch.randn(6, 10, requires_grad=True), torch.rand(6, 10).round()


def weighted():
    return (*logits_and_labels(), torch.rand(6, 10), torch.rand(10) * 3)


def half_logits():
    x, t = logits_and_labels()
    return x.bfloat16(), t


def masked(x, t):
    """The mean over what is not padding, as token classifiers have it."""
    mask = (t >= 0).float()
    return (loss(x, t, reduction="none") * mask).sum() / mask.sum()


MATCHES = [
    Spelling("F", loss, logits_and_labels),
    Spelling("sum", lambda x, t: loss(x, t, reduction="sum"), logits_and_labels),
    Spelling("none", lambda x, t: loss(x, t, reduction="none"), logits_and_labels),
    Spelling("legacy", lambda x, t: loss(x, t, None, False), logits_and_labels),
    Spelling("keywords", lambda x, t: loss(target=t, input=x), logits_and_labels),
    Spelling("weight", lambda x, t, w, p: loss(x, t, w), weighted),
    Spelling("pos_weight", lambda x, t, w, p: loss(x, t, pos_weight=p), weighted),
    Spelling("both weights", lambda x, t, w, p: loss(x, t, w, pos_weight=p), weighted),
    Spelling("mask", lambda x, t, w, p: loss(x, t, w > 0.5), weighted),
    Spelling("weight of rows", lambda x, t, w, p: loss(x, t, w[:, :1]), weighted),
    Spelling("nn", lambda x, t: nn.BCEWithLogitsLoss()(x, t), logits_and_labels),
    Spelling(
        "nn with weights",
        lambda x, t, w, p: nn.BCEWithLogitsLoss(w, pos_weight=p, reduction="sum")(x, t),
        weighted,
    ),
    Spelling("target with a gradient", lambda x, t: loss(t, x.sigmoid()), logits_and_labels),
    Spelling("masked", masked, logits_and_labels),
    Spelling("of float()", lambda x, t: loss(x.float(), t), half_logits),
    Spelling("both of float()", lambda x, t: loss(x.float(), t.bfloat16().float()), half_logits),
    Spelling("target's dtype", lambda x, t: loss(x, t), half_logits),
    Spelling(
        "aten", lambda x, t, w, p: torch.ops.aten.binary_cross_entropy_with_logits(x, t, w, p, 2),
        weighted,
    ),
]  # fmt: skip

NEAR_MISSES = [
    Spelling(
        "of probabilities",
        lambda x, t: F.binary_cross_entropy(x.sigmoid(), t),
        logits_and_labels,
        "rounded probabilities",
    ),
    Spelling(
        "broadcast by aten",
        lambda x, t: torch.ops.aten.binary_cross_entropy_with_logits(x[:1].detach(), t),
        logits_and_labels,
        "expected target to have input's shape",
    ),
    Spelling("soft margin", lambda x, t: F.soft_margin_loss(x, 2 * t - 1), logits_and_labels),
]

SPEC = Spec(
    name=NAME,
    torch_loss=torch_loss,
    samples=elementwise_samples(
        logits,
        labels,
        [],
        weights=(("weight",), ("pos_weight",), ("weight", "pos_weight")),
        differentiable_weights=False,
        broadcasts=False,
    ),
    operands=lambda *shape, dtype=torch.float64: (
        torch.randn(shape, dtype=dtype),
        torch.rand(shape, dtype=dtype),
    ),
    matches=MATCHES,
    near_misses=NEAR_MISSES,
    broadcasts=False,
)
