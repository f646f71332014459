"""Generalised Jensen-Shannon divergence of two softmaxes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from compile_losses.ops.checks import reduction_name
from tests.specs import softmaxes
from tests.specs.spec import Sample, Spec


def torch_loss(input, target, reduction=3, beta=0.5, temperature=1.0, dim=-1):
    """The loss as TRL writes it, but for logits of -inf, for which 0 * inf makes that one nan."""
    log_p, log_q = (F.log_softmax(x / temperature, dim) for x in (input, target))
    lowest = torch.finfo(log_p.dtype).min / 2
    log_p, log_q = log_p.clamp(min=lowest), log_q.clamp(min=lowest)
    mixture = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    kl_target = F.kl_div(mixture, log_q, reduction="none", log_target=True)
    kl_input = F.kl_div(mixture, log_p, reduction="none", log_target=True)
    each = beta * kl_target + (1 - beta) * kl_input
    name = reduction_name(reduction)
    if name == "none":
        return each.sum(dim)
    if name == "mean":
        return each.mean()
    return each.sum() if name == "sum" else each.sum() / input.size(0)


def _divergence(beta):
    beta = np.longdouble(beta)

    def divergence(log_p, log_q, dim):
        a, b = np.log1p(-beta), np.log(beta)
        p, q = np.exp(log_p), np.exp(log_q)
        mixture = np.logaddexp(log_p + a, log_q + b)
        over = np.where(p == 0, 0, log_p - mixture)
        under = np.where(q == 0, 0, log_q - mixture)
        terms = (1 - beta) * p * over, beta * q * under
        apart = ((p * over).sum(dim, keepdims=True), (q * under).sum(dim, keepdims=True))
        gradients = (1 - beta) * p * (over - apart[0]), beta * q * (under - apart[1])
        return terms[0] + terms[1], gradients

    return divergence


def exact_loss(input, target, reduction=3, beta=0.5, temperature=1.0, dim=-1):
    return softmaxes.exact(_divergence(beta), input, target, reduction, temperature, dim)


def samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    yield from softmaxes.samples(device, dtype, beta=0.3)
    generator = torch.Generator(device="cpu").manual_seed(1)
    x, t = (torch.randn(20, 37, generator=generator).to(device, dtype) for _ in range(2))
    nearly = x + 0.01 * t
    masked = [
        logits.clone().index_fill_(1, torch.arange(3, 9, device=device), -torch.inf)
        for logits in (x, t)
    ]
    for reduction in (0, 1, 2, 3):

        def sample(name, x, t, beta=0.5, reduction=reduction):
            return Sample(name, (x, t), {"reduction": reduction, "beta": beta}, (0, 1))

        yield sample("equal weights", x, t)
        yield sample("little of target", x, t, beta=0.001)
        yield sample("little of input", x, t, beta=0.999)
        yield sample("nearly equal", x, nearly)
        yield sample("-inf in both", *masked, beta=0.1)


MATCHES = []
NEAR_MISSES = []

SPEC = Spec(
    name="softmax_js_div",
    torch_loss=torch_loss,
    exact_loss=exact_loss,
    samples=samples,
    operands=softmaxes.operands,
    matches=MATCHES,
    near_misses=NEAR_MISSES,
    broadcasts=False,
)
