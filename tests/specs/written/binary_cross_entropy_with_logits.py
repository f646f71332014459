"""Binary cross entropy of logits, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.specs.spec import Spelling

AT_ZERO = "where a logit is 0"


def logits():
    return torch.randn(6, 10, requires_grad=True) * 3, torch.rand(6, 10).round()


def soft_labels():
    return torch.randn(6, 10, requires_grad=True), torch.rand(6, 10)


def integer_labels():
    x, t = logits()
    return x, t.long()


def boolean_labels():
    x, t = logits()
    return x, t.bool()


def half_logits():
    x, t = logits()
    return x.bfloat16(), t


def half_both():
    x, t = logits()
    return x.bfloat16(), t.bfloat16()


def learned_labels():
    return torch.randn(6, 10, requires_grad=True), torch.rand(6, 10, requires_grad=True)


def weighted():
    return (*logits(), torch.rand(6, 10) + 0.1)


def class_weighted():
    return (*logits(), torch.rand(10) * 3 + 0.1)


def padded():
    return (*logits(), (torch.arange(60).view(6, 10) % 3 > 0).float())


def no_gradient():
    return torch.randn(6, 10), torch.rand(6, 10).round()


def doubles():
    x, t = logits()
    return x.double(), t.double()


def rows_of_labels():
    """One label for each row, broadcast."""
    return torch.randn(6, 10, requires_grad=True), torch.rand(6, 1).round()


def maps():
    return torch.randn(2, 3, 4, 4, requires_grad=True), torch.rand(2, 3, 4, 4).round()


def of_logsigmoid(x, t):
    return -(t * F.logsigmoid(x) + (1 - t) * F.logsigmoid(-x))


def stable(x, t):
    """As in TensorFlow's documentation; with torch.maximum its gradient is right at 0, too."""
    zero = torch.zeros_like(x)
    return torch.maximum(x, zero) - x * t + torch.log(1 + torch.exp(-torch.abs(x)))


def stable_by_where(logits, labels):
    """As in TensorFlow's source."""
    zeros = torch.zeros_like(logits)
    relu_logits = torch.where(logits >= 0, logits, zeros)
    neg_abs_logits = torch.where(logits >= 0, -logits, logits)
    return torch.mean(relu_logits - logits * labels + torch.log1p(torch.exp(neg_abs_logits)))


def stable_by_shift(input, target):
    """As torch had it before it used a log-sigmoid. Through the shift no gradient is lost."""
    max_val = (-input).clamp(min=0)
    loss = input - input * target + max_val + ((-max_val).exp() + (-input - max_val).exp()).log()
    return loss.mean()


def smoothed(x, t, epsilon=0.1):
    smooth = t * (1 - epsilon) + 0.5 * epsilon
    return -(smooth * F.logsigmoid(x) + (1 - smooth) * F.logsigmoid(-x)).mean()


def positive_weight(x, t, p):
    return -(p * t * F.logsigmoid(x) + (1 - t) * F.logsigmoid(-x)).mean()


def both_sides_weighted(x, t, w):
    return (w * t * F.softplus(-x) + w * (1 - t) * F.softplus(x)).sum()


def masked(x, t, mask):
    """The mean over what is not padding."""
    return (of_logsigmoid(x, t) * mask).sum() / mask.sum()


def detector(prediction, target):
    """Summed over each image's map, then the mean."""
    loss = F.softplus(prediction) - prediction * target
    return loss.flatten(1).sum(dim=1).mean()


MATCHES = [
    Spelling("logsigmoid", lambda x, t: of_logsigmoid(x, t).mean(), logits),
    Spelling("logsigmoid, sum", lambda x, t: of_logsigmoid(x, t).sum(), logits),
    Spelling("logsigmoid, torch.mean", lambda x, t: torch.mean(of_logsigmoid(x, t)), soft_labels),
    Spelling(
        "negative mean",
        lambda x, t: -(t * F.logsigmoid(x) + (1 - t) * F.logsigmoid(-x)).mean(),
        logits,
    ),
    Spelling(
        "nn.LogSigmoid",
        lambda x, t: -(t * torch.nn.LogSigmoid()(x) + (1.0 - t) * torch.nn.LogSigmoid()(-x)).mean(),
        logits,
    ),
    Spelling("logsigmoid(x) - x", lambda x, t: -(F.logsigmoid(x) - x * (1 - t)).mean(), logits),
    Spelling("torch's formula", lambda x, t: ((1 - t) * x - F.logsigmoid(x)).mean(), soft_labels),
    Spelling("softplus", lambda x, t: (F.softplus(x) - x * t).mean(), logits),
    Spelling("softplus, target first", lambda x, t: (-t * x + F.softplus(x)).sum(), logits),
    Spelling(
        "two softplus", lambda x, t: (t * F.softplus(-x) + (1 - t) * F.softplus(x)).mean(), logits
    ),
    Spelling("softplus of -x", lambda x, t: (F.softplus(-x) + (1 - t) * x).mean(), logits),
    Spelling("softplus of x * -1", lambda x, t: (F.softplus(x * -1) + x - t * x).mean(), logits),
    Spelling(
        "softplus of a larger threshold",
        lambda x, t: (F.softplus(x, threshold=50) - x * t).mean(),
        doubles,
    ),
    Spelling(
        "logaddexp",
        lambda x, t: (torch.logaddexp(x, torch.zeros_like(x)) - x * t).mean(),
        logits,
    ),
    Spelling(
        "logaddexp of zeros",
        lambda x, t: (torch.logaddexp(torch.zeros(()), -x) + x * (1 - t)).sum(),
        logits,
    ),
    Spelling("stable", lambda x, t: stable(x, t).mean(), logits),
    Spelling("stable, sum over batch", lambda x, t: stable(x, t).sum() / x.size(0), logits),
    Spelling(
        "stable, log1p",
        lambda x, t: ((x.abs() + x) / 2 - x * t + (-x.abs()).exp().log1p()).mean(),
        logits,
    ),
    Spelling("stable by where", stable_by_where, logits),
    Spelling("stable by a shift", stable_by_shift, logits),
    Spelling("smoothed labels", smoothed, logits),
    Spelling("integer labels", lambda x, t: of_logsigmoid(x, t).mean(), integer_labels),
    Spelling("boolean labels", lambda x, t: (F.softplus(x) - x * t).mean(), boolean_labels),
    Spelling("labels cast", lambda x, t: (F.softplus(x) - x * t.float()).mean(), boolean_labels),
    Spelling("learned labels", lambda x, t: of_logsigmoid(x, t).mean(), learned_labels),
    Spelling("in float32", lambda x, t: of_logsigmoid(x.float(), t).mean(), half_logits),
    Spelling("bfloat16", lambda x, t: (F.softplus(x) - x * t).mean(), half_both),
    Spelling("wider target", lambda x, t: (F.softplus(x) - x * t).mean(), half_logits),
    Spelling("without a gradient", lambda x, t: of_logsigmoid(x, t).mean(), no_gradient),
    Spelling("logsigmoid in float64", lambda x, t: of_logsigmoid(x, t).mean(), doubles),
    Spelling(
        "labels of rows", lambda x, t: (F.softplus(x) - x * t).mean(), rows_of_labels, dynamic=False
    ),
    Spelling("weighted", lambda x, t, w: (of_logsigmoid(x, t) * w).mean(), weighted),
    Spelling("weighted in each term", both_sides_weighted, weighted),
    Spelling("weight of a class", lambda x, t, w: (of_logsigmoid(x, t) * w).mean(), class_weighted),
    Spelling("masked mean", masked, padded),
    Spelling("positive weight", positive_weight, class_weighted),
    Spelling(
        "positive weight, a number",
        lambda x, t: (3.0 * t * F.softplus(-x) + (1 - t) * F.softplus(x)).mean(),
        logits,
    ),
    Spelling("scaled", lambda x, t: 0.5 * (F.softplus(x) - x * t).sum(-1).mean(), logits),
    Spelling("of maps", detector, maps),
    Spelling("of a temperature", lambda x, t: of_logsigmoid(x / 2.5, t).mean(), logits),
    Spelling("multilabel_soft_margin_loss", F.multilabel_soft_margin_loss, logits),
    Spelling(
        "multilabel_soft_margin_loss, sum",
        lambda x, t: F.multilabel_soft_margin_loss(x, t, reduction="sum"),
        logits,
    ),
    Spelling(
        "multilabel_soft_margin_loss, weight",
        lambda x, t, w: F.multilabel_soft_margin_loss(x, t, w),
        class_weighted,
    ),
    Spelling(
        "multilabel_soft_margin_loss, none",
        lambda x, t: F.multilabel_soft_margin_loss(x, t, reduction="none").mean(),
        logits,
    ),
    Spelling(
        "nn.MultiLabelSoftMarginLoss",
        lambda x, t: torch.nn.MultiLabelSoftMarginLoss()(x, t),
        integer_labels,
    ),
]


def filled_zeros(x, t):
    """The zeros that the logits are compared with are none."""
    zeros = torch.zeros(10)
    zeros[3] = 1.0
    return (torch.maximum(x, zeros) - x * t + torch.log1p(torch.exp(-x.abs()))).mean()


def detached_logits(x, t):
    return (F.softplus(x.detach()) - x * t).mean()


def siglip(x, t):
    """An infinite logit with the right sign counts as 0 here, and is nan in the op."""
    labels = 2 * torch.eye(6, 10) - torch.ones(6, 10)
    return -F.logsigmoid(labels * x).sum(-1).mean()


NEAR_MISSES = [
    Spelling("nansum", lambda x, t: of_logsigmoid(x, t).nansum(), logits, "terms that are nan"),
    Spelling(
        "clamp",
        lambda x, t: (x.clamp(min=0) - x * t + torch.log(1 + torch.exp(-x.abs()))).mean(),
        logits,
        AT_ZERO,
    ),
    Spelling(
        "relu",
        lambda x, t: (F.relu(x) - x * t + torch.log1p(torch.exp(-x.abs()))).sum(),
        logits,
        AT_ZERO,
    ),
    Spelling(
        "clamp_min",
        lambda x, t: torch.mean(x.clamp_min(0) - x * t + torch.log1p((-x.abs()).exp())),
        logits,
        AT_ZERO,
    ),
    Spelling(
        "softplus in float64", lambda x, t: (F.softplus(x) - x * t).mean(), doubles, "threshold"
    ),
    Spelling(
        "learned weight",
        lambda x, t: (of_logsigmoid(x, t) * x.exp()).mean(),
        logits,
        "a weight requires a gradient",
    ),
    Spelling("sign of the product", lambda x, t: (F.softplus(x) + x * t).mean(), logits),
    Spelling("factor of the product", lambda x, t: (F.softplus(x) - 2 * x * t).mean(), logits),
    Spelling("beta", lambda x, t: (F.softplus(x, beta=2) - x * t).mean(), logits),
    Spelling(
        "small threshold",
        lambda x, t: (F.softplus(x, threshold=1) - x * t).mean(),
        logits,
        "threshold",
    ),
    Spelling("target squared", lambda x, t: (F.softplus(x) - x * t * t).mean(), soft_labels),
    Spelling("logit squared", lambda x, t: (F.softplus(x) - x * x * t).mean(), logits),
    Spelling("of other logits", lambda x, t: (F.softplus(x) - (x + 1) * t).mean(), logits),
    Spelling("eps", lambda x, t: (F.softplus(x) - x * t + 1e-6).mean(), logits),
    Spelling(
        "eps in the logarithm",
        lambda x, t: (
            torch.maximum(x, 0 * x) - x * t + torch.log(1.1 + torch.exp(-x.abs()))
        ).mean(),
        logits,
    ),
    Spelling(
        "both of x", lambda x, t: -(t * F.logsigmoid(x) + (1 - t) * F.logsigmoid(x)).mean(), logits
    ),
    Spelling(
        "exchanged", lambda x, t: -(t * F.logsigmoid(x) + (2 - t) * F.logsigmoid(-x)).mean(), logits
    ),
    Spelling("one term", lambda x, t: -(t * F.logsigmoid(x)).mean(), logits),
    Spelling("softplus alone", lambda x, t: F.softplus(-x).mean(), logits),
    Spelling("naive softplus", lambda x, t: (torch.log(1 + torch.exp(x)) - x * t).mean(), logits),
    Spelling(
        "logarithm of a sigmoid",
        lambda x, t: -(t * x.sigmoid().log() + (1 - t) * (1 - x.sigmoid()).log()).mean(),
        logits,
    ),
    Spelling("squared", lambda x, t: of_logsigmoid(x, t).square().mean(), logits),
    Spelling("clamped", lambda x, t: of_logsigmoid(x, t).clamp(max=1).mean(), logits),
    Spelling("product of logarithms", lambda x, t: (F.softplus(x) * F.softplus(-x)).mean(), logits),
    Spelling("unreduced", of_logsigmoid, logits),
    Spelling("row sums", lambda x, t: of_logsigmoid(x, t).sum(1), logits),
    Spelling("filled zeros", filled_zeros, logits, "changed in place"),
    Spelling(
        "another bound",
        lambda x, t: (x.clamp(min=0.1) - x * t + torch.log1p(torch.exp(-x.abs()))).mean(),
        logits,
    ),
    Spelling(
        "another branch",
        lambda x, t: (
            torch.where(x >= 1, x, 0.0) - x * t + torch.log1p(torch.exp(-x.abs()))
        ).mean(),
        logits,
    ),
    Spelling("detached logits", detached_logits, logits),
    Spelling("SigLIP", siglip, logits),
]
