"""Generalised Jensen-Shannon divergence of two softmaxes, for distillation (Agarwal et al.,
On-Policy Distillation of Language Models, 2024, equation 1).

``torch.ops.fused.softmax_js_div(input, target, reduction=3, *, beta=0.5, temperature=1.0, dim=-1,
dtype=None)`` is ``beta KL(q || m) + (1 - beta) KL(p || m)`` along ``dim``, for p = softmax(input /
temperature), q = softmax(target / temperature) and the mixture m = (1 - beta) p + beta q, 0 < beta
< 1. It is not multiplied by T^2. Swapping the arguments is the same as 1 - beta in the place of
beta. A class that is impossible in both rows, two logits of -inf, adds 0. Arguments, reductions and
errors are in ``softmax_divergence``.

Raises:
    RuntimeError: beta is not between 0 and 1.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses.bodies.blocks import wide_sum
from compile_losses.bodies.row_pairs import (
    Formulas,
    Statistics,
    exponentials,
    finite_relative,
    positive,
)
from compile_losses.ops.elementwise import Parameter
from compile_losses.ops.softmax_divergence import declare, log_softmaxes, reduce


def reference(
    input: Tensor, target: Tensor, reduction: int, beta: float, temperature: float, dim: int
) -> Tensor:
    """The logarithms of q / m and p / m are those of two probabilities that add up to 1, each over
    its weight in the mixture; their difference is all that has to be known."""
    log_p, log_q = log_softmaxes(input, target, temperature, dim)
    # A logit of -inf is as good as one far below any probability that is not 0. Where one is 0, its
    # logarithm has no part in the loss, nor may it overflow in a gradient.
    log_p, log_q = (log.masked_fill(log == -torch.inf, -1e4) for log in (log_p, log_q))
    log_input, log_target = math.log1p(-beta), math.log(beta)
    distance = log_q - log_p + (log_target - log_input)
    p, q = log_p.exp(), log_q.exp()
    of_target = q * (F.logsigmoid(distance) - log_target).masked_fill(q == 0, 0.0)
    of_input = p * (F.logsigmoid(-distance) - log_input).masked_fill(p == 0, 0.0)
    return reduce(beta * of_target + (1 - beta) * of_input, reduction, dim)


def check(name: str, beta: float) -> None:
    if not 0 < beta < 1:  # nan is refused, too
        raise RuntimeError(
            f"{name}: expected beta to be between 0 and 1, without these, got {beta}"
        )


BETA = Parameter("float", "beta", "0.5", keyword_only=True)


class JsDiv(Formulas):
    """Without kernels: the formulas of csrc/losses/softmax_js_div.h."""

    def __init__(self, dtype: torch.dtype, beta: float, temperature: float) -> None:
        self.beta, self.rest = positive(beta, dtype), positive(1 - beta, dtype)
        self.inverse = positive(1 / temperature, dtype)

    def statistics(self, x: Tensor, t: Tensor, weight: Tensor | None) -> Statistics:
        largest, each = exponentials(x, self.inverse)
        most, of_target = exponentials(t, self.inverse)
        summed, mass = wide_sum(each).to(x.dtype), wide_sum(of_target).to(x.dtype)
        p, q, log_input, log_target = self._classes(x, t, (largest, summed, most, mass))
        divergences = wide_sum(p.mul_(log_input)), wide_sum(q.mul_(log_target))
        return largest, summed, most, mass, *divergences

    def value(self, statistics: Statistics) -> Tensor:
        *_, of_input, of_target = statistics
        return self.rest * of_input + self.beta * of_target

    def of_input(
        self, x: Tensor, t: Tensor, statistics: Statistics, scale: Tensor, weight: Tensor | None
    ) -> Tensor:
        p, _, log_input, _ = self._classes(x, t, statistics[:4])
        return log_input.sub_(statistics[4]).mul_(p).mul_(scale * self.inverse * self.rest)

    def of_target(
        self, x: Tensor, t: Tensor, statistics: Statistics, scale: Tensor, weight: Tensor | None
    ) -> Tensor:
        _, q, _, log_target = self._classes(x, t, statistics[:4])
        return log_target.sub_(statistics[5]).mul_(q).mul_(scale * self.inverse * self.beta)

    def _classes(self, x: Tensor, t: Tensor, sums: Statistics) -> tuple[Tensor, ...]:
        """p, q, log(p / m) and log(q / m), from the larger of p and q: nothing overflows, and small
        logarithms keep their digits."""
        largest, summed, most, mass = sums
        both = (summed > 0) & (mass > 0)
        log_sums = torch.where(both, (summed / mass).log(), torch.nan)
        u = finite_relative(x, largest, self.inverse)
        v = finite_relative(t, most, self.inverse)
        distance = (v - u).add_(log_sums)
        of_target = distance > 0
        nothing = 0 * log_sums
        scale = torch.where(of_target, 1 / mass + nothing, 1 / summed + nothing)
        larger = torch.where(of_target, v, u).exp_().mul_(scale)
        log_ratio = distance.abs_().neg_()
        ratio = log_ratio.exp()
        smaller = larger * ratio
        beta, rest = x.new_full((), self.beta), x.new_full((), self.rest)
        own = torch.where(of_target, rest, beta)
        near = own * log_ratio.expm1()
        far = ratio.mul_(own).add_(torch.where(of_target, beta, rest)).log_()
        log_m = torch.where(near > -0.5, near.log1p(), far)
        log_p = torch.where(of_target, log_ratio, 0) - log_m
        log_q = torch.where(of_target, 0, log_ratio) - log_m
        p, q = torch.where(of_target, smaller, larger), torch.where(of_target, larger, smaller)
        return p, q, log_p, log_q


declare("softmax_js_div", reference, JsDiv, [BETA], check=check)
