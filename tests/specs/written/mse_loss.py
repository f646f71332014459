"""Squared error with weights and masks, and in the models that people train."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.specs.inputs import images, learned_pair, masked_pair, pair, patches, weighted_pair
from tests.specs.spec import Spelling


def masked_mean(a, b, mask):
    return ((a - b) ** 2 * mask).sum() / mask.sum()


def masked_autoencoder(prediction, target, mask):
    """ViT-MAE: the mean of each patch, then of the masked ones."""
    loss = (prediction - target) ** 2
    loss = loss.mean(dim=-1)
    return (loss * mask).sum() / mask.sum()


def normalised_patches(prediction, target, mask):
    mean, var = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
    target = (target - mean) / (var + 1.0e-6) ** 0.5
    return ((prediction - target) ** 2).mean()


def min_snr(prediction, noise, weights):
    """Diffusers' training scripts, with a weight for each timestep."""
    loss = F.mse_loss(prediction.float(), noise.float(), reduction="none")
    loss = loss.mean(dim=list(range(1, len(loss.shape)))) * weights
    return loss.mean()


def flattened_samples(prediction, noise, weights):
    error = (prediction - noise).pow(2).flatten(1).mean(1)
    return torch.mean(weights * error)


def mean_over_masked_steps(a, b, mask):
    per_row = ((a - b).square() * mask).sum(dim=1) / mask.sum(dim=1)
    return per_row.mean()


def value_loss(a, b, mask):
    """PPO's value loss without clipping."""
    return 0.5 * ((a - b) ** 2 * mask).sum() / mask.sum()


def velocity(a, b):
    """Flow matching: the target is a difference, too."""
    noise = b * 2
    return ((a - (noise - b)) ** 2).mean()


MATCHES = [
    Spelling("weighted mean", lambda a, b, w: (w * (a - b) ** 2).mean(), weighted_pair),
    Spelling("weighted sum", lambda a, b, w: ((a - b).pow(2) * w).sum(), weighted_pair),
    Spelling("weight of each column", lambda a, b: (b[0] * (a - b) ** 2).mean(), pair),
    Spelling("weight of each row", lambda a, b: (b[:, :1] * (a - b) ** 2).mean(), pair),
    Spelling("two weights", lambda a, b, w: ((a - b) ** 2 * w * b[0]).sum(), weighted_pair),
    Spelling("learned weight", lambda a, w: (w.exp() * (a - w.detach()) ** 2).mean(), learned_pair),
    Spelling("divided by a variance", lambda a, b, v: ((a - b) ** 2 / v).mean(), weighted_pair),
    Spelling(
        "half, divided by a variance",
        lambda a, b, v: (0.5 * (a - b) ** 2 / (2 * v)).sum(),
        weighted_pair,
    ),
    Spelling("masked", lambda a, b, m: ((a - b) ** 2 * m).mean(), masked_pair),
    Spelling("masked mean", masked_mean, masked_pair),
    Spelling(
        "mask times", lambda a, b, m: (m.float() * (a - b).square()).sum() / m.sum(), masked_pair
    ),
    Spelling("mean of masked means", mean_over_masked_steps, masked_pair),
    Spelling(
        "none, weighted",
        lambda a, b, w: (F.mse_loss(a, b, reduction="none") * w).mean(),
        weighted_pair,
    ),
    Spelling("ViT-MAE", masked_autoencoder, patches),
    Spelling("ViT-MAE, normalised", normalised_patches, patches),
    Spelling("min-SNR", min_snr, images),
    Spelling("flattened samples", flattened_samples, images),
    Spelling("value loss", value_loss, masked_pair),
    Spelling("flow matching", velocity, pair),
    Spelling("rounded root", lambda a, b: (a - b).square().mean().sqrt(), pair),
    Spelling("three dimensions", lambda a, b, m: ((a - b) ** 2).sum((1, 2)).mean(0), patches),
    Spelling("reshaped", lambda a, b, m: ((a - b) ** 2).reshape(2, -1).sum(1).mean(), patches),
    Spelling("kept dimensions", lambda a, b: ((a - b) ** 2).mean(1, keepdim=True).mean(), pair),
    Spelling("quotient of the difference", lambda a, b: (((a - b) ** 2) / 4.0).sum(), pair),
    Spelling("rsub", lambda a, b: torch.rsub(a, b).pow(2).mean(), pair),
    Spelling("minus one times", lambda a, b: ((a + b * -1) ** 2).mean(), pair),
    Spelling(
        "positive part and negative part",
        lambda a, b: (F.relu(a - b) + F.relu(b - a)).pow(2).mean(),
        pair,
    ),
]


def masked_by_where(a, b, mask):
    """Masked elements may be infinite."""
    return torch.where(mask, (a - b) ** 2, 0.0).mean()


def enlarging(a, b):
    return ((a[0] - b[0]) ** 2 * b).mean()


def detached_weight(a, b):
    d = a - b
    return (d.detach() * d).mean()


def weight_in_place(a, b, w):
    loss = (a - b) ** 2
    loss *= w
    return loss.mean()


def outer_weights(a, b, w):
    """One row of weights for each row of errors: weights enlarge the mean that they multiply."""
    return (((a - b) ** 2).mean(1) * w).mean()


NEAR_MISSES = [
    Spelling("nanmean", lambda a, b: ((a - b) ** 2).nanmean(), pair, "terms that are nan"),
    Spelling(
        "selected by a mask",
        lambda a, b, m: ((a - b) ** 2)[b > 0].mean() + 0 * m.sum(),
        weighted_pair,
    ),
    Spelling("where with a mask", masked_by_where, masked_pair),
    Spelling("filled", lambda a, b, m: ((a - b) ** 2).masked_fill(m, 0.0).sum(), masked_pair),
    Spelling("a weight that enlarges", enlarging, pair),
    Spelling("detached factor", detached_weight, pair),
    Spelling("weighted in place", weight_in_place, weighted_pair),
    Spelling(
        "weights of another rank",
        outer_weights,
        lambda: (torch.randn(4, 4, requires_grad=True), torch.randn(4, 4), torch.rand(4, 4)),
    ),
    Spelling(
        "weight inside the square", lambda a, b, w: ((w * (a - b)) ** 2).mean(), weighted_pair
    ),
    Spelling("maximum", lambda a, b: ((a - b) ** 2).max(), pair),
    Spelling("standard deviation", lambda a, b: (a - b).std(), pair),
    Spelling(
        "clipped values",
        lambda a, b: torch.max((a - b) ** 2, (a.clamp(-1, 1) - b) ** 2).mean(),
        pair,
    ),
    Spelling(
        "root inside the mean",
        lambda a, b: ((a - b) ** 2).sqrt().mean() * 0 + (a - b).pow(4).mean(),
        pair,
    ),
    Spelling("relative error", lambda a, b: (((a - b) / b) ** 2).mean(), pair),
    Spelling(
        "logarithmic error", lambda a, b: ((a.exp().log1p() - b) ** 2).clamp(min=1e-3).mean(), pair
    ),
    Spelling(
        "far threshold",
        lambda a, b: torch.where(
            (a - b).abs() < 1e4, (a - b) ** 2, 1e8 * torch.ones_like(a)
        ).mean(),
        pair,
    ),
]
