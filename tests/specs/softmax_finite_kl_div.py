"""Kullback-Leibler divergence, or cross entropy, of two softmaxes without infinite logits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from compile_losses.ops.checks import reduction_name
from tests.specs import softmaxes
from tests.specs.spec import Sample, Spec


def torch_loss(input, target, reduction=3, entropy=True, temperature=1.0, dim=-1):
    """The loss as MiniLLM writes it, but for gradients, which 0 * inf makes nan there."""
    mask = torch.isinf(input) | torch.isinf(target) if entropy else torch.isinf(input)
    log_p, log_q = (F.log_softmax(x / temperature, dim) for x in (input, target))
    q, log_p = log_q.exp().masked_fill(mask, 0), log_p.masked_fill(mask, 0)
    each = q * log_q.masked_fill(mask, 0) - q * log_p if entropy else -q * log_p
    name = reduction_name(reduction)
    if name == "none":
        return each.sum(dim)
    if name == "mean":
        return each.mean()
    return each.sum() if name == "sum" else each.sum() / input.size(0)


def _divergence(entropy):
    def divergence(log_p, log_q, dim):
        p, q = np.exp(log_p), np.exp(log_q)
        left_out = np.isinf(log_p) | np.isinf(log_q) if entropy else np.isinf(log_p)
        distance = np.where(left_out, 0, (log_q if entropy else 0) - log_p)
        counted = np.where(left_out, 0, q)
        each = counted * distance
        loss, mass = (terms.sum(dim, keepdims=True) for terms in (each, counted))
        own = np.where(left_out, 0, distance + entropy)
        return each, (p * mass - counted, q * (own - loss - entropy * mass))

    return divergence


def exact_loss(input, target, reduction=3, entropy=True, temperature=1.0, dim=-1):
    return softmaxes.exact(_divergence(entropy), input, target, reduction, temperature, dim)


def samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    for entropy in (True, False):
        yield from softmaxes.samples(device, dtype, entropy=entropy)
        generator = torch.Generator(device="cpu").manual_seed(1)
        x, t = (torch.randn(20, 37, generator=generator).to(device, dtype) for _ in range(2))
        some = torch.rand(20, 37, generator=generator).to(device) < 0.3
        others = torch.rand(20, 37, generator=generator).to(device) < 0.3
        tall = some.repeat(1, 50)
        for reduction in (0, 1, 2, 3):

            def sample(name, x, t, entropy=entropy, reduction=reduction, **more):
                options = {"reduction": reduction, "entropy": entropy, **more}
                return Sample(f"{name}, entropy {entropy}", (x, t), options, (0, 1))

            without = x.masked_fill(some, -torch.inf), t.masked_fill(others, -torch.inf)
            yield sample("-inf in input", without[0], t)
            yield sample("-inf in target", x, without[1])
            yield sample("-inf in both", *without, temperature=2.0)
            yield sample("-inf in columns", *(y.t().contiguous().t() for y in without))
            yield sample("-inf in dim 0", *without, dim=0)
            # Where input is -inf target has almost all of its mass.
            yield sample("outliers left out", without[0], t + 20 * some)
            yield sample("nothing in common", t.masked_fill(~some, -torch.inf), without[0])
            yield sample("nearly equal", x, x + 0.01 * t)
            wide = x.repeat(1, 50).masked_fill(tall, -torch.inf)
            yield sample("many tiles", wide, t.repeat(1, 50))


MATCHES = []
NEAR_MISSES = []

SPEC = Spec(
    name="softmax_finite_kl_div",
    torch_loss=torch_loss,
    exact_loss=exact_loss,
    samples=samples,
    operands=softmaxes.operands,
    matches=MATCHES,
    near_misses=NEAR_MISSES,
    broadcasts=False,
)
