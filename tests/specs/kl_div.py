"""Kullback-Leibler divergence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_losses.ops.kl_div import reference
from tests.specs.spec import Spec, Spelling, elementwise_samples


def probabilities(shape, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.98 + 0.01


def distributions():
    return (
        torch.rand(6, 10, requires_grad=True).softmax(-1),
        torch.rand(6, 10).softmax(-1),
    )


def half_distributions():
    return tuple(t.bfloat16() for t in distributions())


def log_used_twice(p, q):
    log_p = p.log()
    return F.kl_div(log_p, q, reduction="sum") + log_p.sum() * 0


def log_changed(p, q):
    log_p = p.log()
    log_p.mul_(2)
    return F.kl_div(log_p, q, reduction="sum")


def log_cut(p, q):
    with torch.no_grad():
        log_p = p.log()
    return F.kl_div(log_p, q, reduction="sum") + p.sum() * 0


MATCHES = [
    Spelling(
        "log and batchmean",
        lambda p, q: F.kl_div(torch.log(p), q, reduction="batchmean"),
        distributions,
    ),
    Spelling("log method", lambda p, q: F.kl_div(p.log(), q, reduction="sum"), distributions),
    Spelling("mean", lambda p, q: F.kl_div(p.log(), q), distributions),
    Spelling("none", lambda p, q: F.kl_div(p.log(), q, reduction="none"), distributions),
    Spelling("plain", lambda p, q: F.kl_div(p, q, reduction="batchmean"), distributions),
    Spelling(
        "log_target",
        lambda p, q: F.kl_div(p.log(), q.log(), reduction="batchmean", log_target=True),
        distributions,
    ),
    Spelling(
        "log_softmax",
        lambda p, q: F.kl_div(F.log_softmax(p, -1), q, reduction="batchmean"),
        distributions,
    ),
    Spelling(
        "nn.KLDivLoss", lambda p, q: nn.KLDivLoss(reduction="batchmean")(p.log(), q), distributions
    ),
    Spelling("legacy sum", lambda p, q: F.kl_div(p.log(), q, size_average=False), distributions),
    Spelling("aten", lambda p, q: torch.ops.aten.kl_div(p, q, 2, log_target=True), distributions),
    Spelling("log used elsewhere", log_used_twice, distributions),
    Spelling("log changed in place", log_changed, distributions),
    Spelling("log without gradients", log_cut, distributions),
    Spelling(
        "of float()",
        lambda p, q: F.kl_div(p.float().log(), q.float(), reduction="batchmean"),
        half_distributions,
    ),
]

NEAR_MISSES = [
    Spelling(
        "legacy with batchmean",
        lambda p, q: F.kl_div(p.log(), q, size_average=False, reduction="batchmean"),
        distributions,
        "batchmean",
    ),
    Spelling(
        "binary cross entropy", F.binary_cross_entropy, distributions, "rounded probabilities"
    ),
    Spelling("entropy", lambda p, q: -(p * p.log()).sum() + q.sum() * 0, distributions),
]


def torch_loss(input, target, reduction=1, log_target=False, log_input=True):
    return reference(input, target, reduction, log_target, log_input)


SPEC = Spec(
    name="kl_div",
    torch_loss=torch_loss,
    samples=elementwise_samples(
        probabilities,
        probabilities,
        [
            {"log_target": log_target, "log_input": log_input}
            for log_target in (False, True)
            for log_input in (False, True)
        ],
        reductions=(0, 1, 2, 3),
    ),
    operands=lambda *shape, dtype=torch.float64: (
        torch.rand(shape, dtype=dtype) + 0.1,
        torch.rand(shape, dtype=dtype) + 0.1,
    ),
    matches=MATCHES,
    near_misses=NEAR_MISSES,
)
