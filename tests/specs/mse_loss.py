"""Squared error: F.mse_loss, nn.MSELoss and hand-written forms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.specs.spec import Spec, Spelling, elementwise_samples, normal, weighted


def pair():
    return torch.randn(6, 10, requires_grad=True), torch.randn(6, 10)


def plain_pair():
    return torch.randn(6, 10), torch.randn(6, 10)


def half_pair():
    return torch.randn(6, 10, requires_grad=True).bfloat16(), torch.randn(6, 10).bfloat16()


def written_out(a, b):
    d = a - b
    return (d * d).sum() / d.numel()


def with_module(a, b):
    return nn.MSELoss()(a, b)


def detached_target(a, b):
    return ((a - b.detach()) ** 2).mean()


def used_twice(a, b):
    d = a - b
    return (d**2).mean() + d.sum() * 0


def mutated_difference(a, b):
    d = a - b
    s = d**2
    d.add_(1)
    return s.mean() + d.sum() * 0


def mutated_square(a, b):
    s = (a - b) ** 2
    s.mul_(2)
    return s.mean()


def mutated_through_view(a, b):
    d = a - b
    d.view(-1)[0] = 5.0
    return (d * d).mean()


def mutated_argument(a, b):
    c = b + 1
    d = a - c
    c.mul_(0)
    return (d * d).mean() + c.sum()


def cut_gradient(a, b):
    with torch.no_grad():
        d = a - b
    return (d**2).mean() + a.sum() * 0


def cut_gradient_of_root(a, b):
    d = a - b
    with torch.no_grad():
        return (d**2).mean() + b.sum() * 0


def cut_and_restored(a, b):
    with torch.no_grad():
        d = a - b
        with torch.enable_grad():
            return (d**2).mean()


def clamped(a, b):
    return ((a - b) ** 2).clamp(max=100).mean()


def masked(a, b):
    return torch.where(b > -50, (a - b) ** 2, torch.zeros_like(a)).mean()


MATCHES = [
    Spelling("F.mse_loss", F.mse_loss, pair),
    Spelling("F.mse_loss sum", lambda a, b: F.mse_loss(a, b, reduction="sum"), pair),
    Spelling("F.mse_loss none", lambda a, b: F.mse_loss(a, b, reduction="none"), pair),
    Spelling("F.mse_loss keywords", lambda a, b: F.mse_loss(target=b, input=a), pair),
    Spelling("F.mse_loss size_average", lambda a, b: F.mse_loss(a, b, size_average=False), pair),
    Spelling("F.mse_loss reduce", lambda a, b: F.mse_loss(a, b, reduce=False), pair),
    Spelling("nn.MSELoss", with_module, pair),
    Spelling("weight", lambda a, b: F.mse_loss(a, b, weight=b.abs()), pair),
    Spelling("weight sum", lambda a, b: F.mse_loss(a, b, reduction="sum", weight=b.abs()), pair),
    Spelling("weight none", lambda a, b: F.mse_loss(a, b, reduction="none", weight=b), pair),
    Spelling("weight legacy", lambda a, b: F.mse_loss(a, b, None, False, weight=b.abs()), pair),
    Spelling("weight with a gradient", lambda a, b: F.mse_loss(b, a * 2, weight=a.abs()), pair),
    Spelling("weight of a broadcast target", lambda a, b: F.mse_loss(a, b[0], weight=b), pair),
    Spelling("wide weight", lambda a, b: F.mse_loss(a, b, weight=b.float().abs()), half_pair),
    Spelling("integer weight", lambda a, b: F.mse_loss(a, b, weight=b.long().abs() + 1), pair),
    Spelling("aten.mse_loss", lambda a, b: torch.ops.aten.mse_loss(a, b, 2), pair),
    Spelling("torch.mean of a power", lambda a, b: torch.mean((a - b) ** 2), pair),
    Spelling("mean of a power", lambda a, b: ((a - b) ** 2).mean(), pair),
    Spelling("pow method", lambda a, b: (a - b).pow(2).mean(), pair),
    Spelling("torch.pow 2.0", lambda a, b: torch.pow(a - b, 2.0).mean(), pair),
    Spelling("torch.square", lambda a, b: torch.square(a - b).mean(), pair),
    Spelling("torch.sub", lambda a, b: torch.sub(a, b).square().mean(), pair),
    Spelling("sub method", lambda a, b: a.sub(b).square().mean(), pair),
    Spelling("difference times itself", written_out, pair),
    Spelling("swapped operands", lambda a, b: ((b - a) ** 2).mean(), pair),
    Spelling("plus the negative", lambda a, b: ((a + (-b)) ** 2).mean(), pair),
    Spelling("negative plus", lambda a, b: ((-a + b) ** 2).mean(), pair),
    Spelling("negated difference", lambda a, b: ((-(a - b)) ** 2).mean(), pair),
    Spelling("absolute value squared", lambda a, b: (a - b).abs().pow(2).mean(), pair),
    Spelling("sum", lambda a, b: ((a - b) ** 2).sum(), pair),
    Spelling("half the sum", lambda a, b: 0.5 * ((a - b) ** 2).sum(), pair),
    Spelling("sum over numel", lambda a, b: ((a - b) ** 2).sum() / a.numel(), pair),
    Spelling("sum over batch", lambda a, b: ((a - b) ** 2).sum() / a.shape[0], pair),
    Spelling("mean of means", lambda a, b: ((a - b) ** 2).mean(dim=-1).mean(), pair),
    Spelling("mean of sums", lambda a, b: ((a - b) ** 2).sum(dim=1).mean(), pair),
    Spelling("mean over both dims", lambda a, b: ((a - b) ** 2).mean(dim=(0, 1)), pair),
    Spelling("mean of the half", lambda a, b: (0.5 * (a - b) ** 2).mean(), pair),
    Spelling("flattened", lambda a, b: ((a - b) ** 2).view(-1).mean(), pair),
    Spelling("squared norm", lambda a, b: torch.norm(a - b) ** 2, pair),
    Spelling("squared linalg norm", lambda a, b: torch.linalg.norm(a - b).pow(2), pair),
    Spelling("none then mean", lambda a, b: F.mse_loss(a, b, reduction="none").mean(), pair),
    Spelling("detached target", detached_target, pair),
    Spelling("difference used elsewhere", used_twice, pair),
    Spelling("root of the mean", lambda a, b: ((a - b) ** 2).mean().sqrt(), pair),
    Spelling("F.mse_loss of float()", lambda a, b: F.mse_loss(a.float(), b.float()), half_pair),
    Spelling("power of float()", lambda a, b: ((a.float() - b.float()) ** 2).mean(), half_pair),
    Spelling(
        "F.mse_loss of to()",
        lambda a, b: F.mse_loss(a.to(torch.float32), b),
        half_pair,
        since=(2, 12),  # the gradient of mixed dtypes
    ),
    Spelling("root without gradients", cut_gradient_of_root, pair),
    Spelling("bfloat16", lambda a, b: ((a - b) ** 2).mean(), half_pair),
]

NEAR_MISSES = [
    Spelling("clamped", clamped, pair),
    Spelling("data-dependent mask", masked, pair),
    Spelling("power 3", lambda a, b: ((a - b) ** 3).mean(), pair),
    Spelling("power 1.9999", lambda a, b: ((a - b).abs() ** 1.9999).mean(), pair),
    Spelling("sum of squares", lambda a, b: ((a + b) ** 2).mean(), pair),
    Spelling("alpha 2", lambda a, b: torch.sub(a, b, alpha=2).pow(2).mean(), pair),
    Spelling("square of the mean", lambda a, b: (a - b).mean() ** 2, pair),
    Spelling("regulariser", lambda a, b: (a**2).mean() + b.sum(), pair),
    Spelling("product", lambda a, b: ((a - b) * (a + b)).mean(), pair),
    Spelling("two differences", lambda a, b: ((a - b) * (a - b - 1)).mean(), pair),
    Spelling("constant target", lambda a, b: ((a - 1.0) ** 2).mean() + b.sum(), pair),
    Spelling("per-row mean", lambda a, b: ((a - b) ** 2).mean(dim=1), pair),
    Spelling("1-norm squared", lambda a, b: torch.norm(a - b, p=1) ** 2, pair),
    Spelling("row norms", lambda a, b: (torch.norm(a - b, dim=1) ** 2)[0], pair),
    Spelling("mean of a norm", lambda a, b: torch.norm(a - b).mean(), pair),
    Spelling("sum of a norm", lambda a, b: torch.norm(a - b).sum() / a.numel(), pair),
    Spelling("norm to the power 2.5", lambda a, b: torch.norm(a - b) ** 2.5, pair),
    Spelling("square of a sum", lambda a, b: ((a - b) ** 2).sum(dim=1).pow(2).mean(), pair),
    Spelling("fourth power", lambda a, b: (((a - b) ** 2) ** 2).mean(), pair),
    Spelling("norm alone", lambda a, b: torch.norm(a - b), pair),
    Spelling("double sum", lambda a, b: ((a - b) ** 2).sum(dtype=torch.float64), pair),
    Spelling("slice of the square", lambda a, b: ((a - b) ** 2)[1:].mean(), pair),
    Spelling("median", lambda a, b: ((a - b) ** 2).median(), pair),
    Spelling(
        "complex",
        lambda a, b: ((a - b) ** 2).mean().abs(),
        lambda: (torch.randn(4, dtype=torch.complex64), torch.randn(4, dtype=torch.complex64)),
    ),
    Spelling(
        "integers",
        lambda a, b: ((a - b) ** 2).sum(),
        lambda: (torch.arange(6), torch.arange(6) + 1),
    ),
    Spelling(
        "integer target",
        lambda a, b: ((a - b) ** 2).mean(),
        lambda: (torch.randn(6), torch.arange(6)),
        "expected target to be float",
    ),
    Spelling("difference changed in place", mutated_difference, plain_pair, "changed in place"),
    Spelling("square changed in place", mutated_square, plain_pair, "changed in place"),
    Spelling("changed through a view", mutated_through_view, plain_pair, "changed in place"),
    Spelling("argument changed in place", mutated_argument, plain_pair, "changed in place"),
    Spelling("gradient cut", cut_gradient, pair, "without gradients"),
    Spelling("gradient cut and restored", cut_and_restored, pair, "without gradients"),
    Spelling(
        "weight of a broadcast input",
        lambda a, b: F.mse_loss(a[:, :1], b, weight=b[:, :1]),
        pair,
        "torch divides by the weight's sum",
    ),
]

SPEC = Spec(
    name="mse_loss",
    torch_loss=weighted(F.mse_loss, normalize=True),
    samples=elementwise_samples(normal, normal, [], weights=(("weight",),)),
    operands=lambda *shape, dtype=torch.float64: (
        torch.randn(shape, dtype=dtype),
        torch.randn(shape, dtype=dtype),
    ),
    matches=MATCHES,
    near_misses=NEAR_MISSES,
)
