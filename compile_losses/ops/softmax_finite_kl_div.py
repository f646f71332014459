"""Kullback-Leibler divergence, or cross entropy, of two softmaxes without the terms of infinite
logits, for distillation with masked classes (Gu et al., MiniLLM, 2024; torchtune).

``torch.ops.fused.softmax_finite_kl_div(input, target, reduction=3, *, entropy=True,
temperature=1.0, dim=-1, dtype=None)`` is the sum of ``q (log q - log p)`` along ``dim``, for p =
softmax(input / temperature) and q = softmax(target / temperature), over the classes whose logits
are not infinite in either row. Without ``entropy`` it is the sum of ``-q log p`` over the classes
whose input logit is not infinite: the cross entropy with q, from which the entropy of q is not
subtracted. It is not multiplied by T^2. Swapping the arguments gives the reverse divergence.

Classes that are left out still count in both softmaxes. Their term is 0 even where one probability
is 0 and the other one is not, for which ``softmax_kl_div`` is infinite. Where torch's formula has
the product of 0 and an infinite logarithm in a gradient, which makes the gradients of the row nan,
the op's gradients are those without these products. If a row has no softmax (it holds a nan or
+inf, or only -inf) the terms of the other classes and all gradients of both rows are nan. The loss
of a row whose classes are all left out is 0. Arguments, reductions and errors are in
``softmax_divergence``.
"""

import torch
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
    input: Tensor, target: Tensor, reduction: int, entropy: bool, temperature: float, dim: int
) -> Tensor:
    left_out = input.isinf()
    if entropy:
        left_out = left_out | target.isinf()
    log_p, log_q = log_softmaxes(input, target, temperature, dim)
    # Infinite factors are replaced before they are multiplied: in a gradient 0 times one is nan.
    distance = -log_p.masked_fill(input == -torch.inf, 0.0)
    if entropy:
        distance = distance + log_q.masked_fill(target == -torch.inf, 0.0)
    return reduce((log_q.exp() * distance).masked_fill(left_out, 0.0), reduction, dim)


class FiniteKlDiv(Formulas):
    """Without kernels: the formulas of csrc/losses/softmax_finite_kl_div.h."""

    def __init__(self, dtype: torch.dtype, entropy: bool, temperature: float) -> None:
        self.entropy, self.inverse = float(entropy), positive(1 / temperature, dtype)

    def statistics(self, x: Tensor, t: Tensor, weight: Tensor | None) -> Statistics:
        largest, each = exponentials(x, self.inverse)
        most, of_target = exponentials(t, self.inverse)
        summed, mass = wide_sum(each).to(x.dtype), wide_sum(of_target).to(x.dtype)
        q, log_q, counts = self._classes(x, t, (largest, summed, most, mass))
        q.masked_fill_(~counts, 0)
        terms = self._distance(x, log_q, largest).mul_(q).masked_fill_(~counts, 0)
        return largest, summed, most, mass, wide_sum(q), wide_sum(terms)

    def value(self, statistics: Statistics) -> Tensor:
        *_, counted, terms = statistics
        # Without mass that counts, the logarithm is no part of the loss: it may be infinite.
        return torch.where(counted > 0, terms + counted * self._log_sums(statistics), terms)

    def of_input(
        self, x: Tensor, t: Tensor, statistics: Statistics, scale: Tensor, weight: Tensor | None
    ) -> Tensor:
        largest, summed, _, _, counted, _ = statistics
        q, _, counts = self._classes(x, t, statistics[:4])
        p = (x - largest).mul_(self.inverse).exp_()
        p.mul_(counted / summed + _nothing(statistics))
        return p.sub_(q.masked_fill_(~counts, 0)).mul_(scale * self.inverse)

    def of_target(
        self, x: Tensor, t: Tensor, statistics: Statistics, scale: Tensor, weight: Tensor | None
    ) -> Tensor:
        counted, value = statistics[4], self.value(statistics)
        q, log_q, counts = self._classes(x, t, statistics[:4])
        inside = (self._log_sums(statistics) - value) + self.entropy * (1 - counted)
        outside = -value - self.entropy * counted
        distance = self._distance(x, log_q, statistics[0]).add_(inside)
        return torch.where(counts, distance, outside).mul_(q).mul_(scale * self.inverse)

    def _classes(self, x: Tensor, t: Tensor, sums: Statistics) -> tuple[Tensor, Tensor, Tensor]:
        """q, its logarithm but for that of the sum, and which classes count."""
        _, _, most, mass = sums
        log_q = finite_relative(t, most, self.inverse)
        left_out = x.isinf()
        if self.entropy:
            left_out |= t.isinf()
        return log_q.exp().mul_(1 / mass + _nothing(sums)), log_q, ~left_out

    def _distance(self, x: Tensor, log_q: Tensor, largest: Tensor) -> Tensor:
        return (self.entropy * log_q).sub_((x - largest).mul_(self.inverse))

    def _log_sums(self, statistics: Statistics) -> Tensor:
        summed, mass = statistics[1], statistics[3]
        return (summed / mass if self.entropy else summed).log()


def _nothing(sums: Statistics) -> Tensor:
    """0, and nan for a row of which one has no softmax."""
    _, summed, _, mass, *_ = sums
    return torch.where((summed > 0) & (mass > 0), 0.0, torch.nan).to(mass.dtype)


declare(
    "softmax_finite_kl_div",
    reference,
    FiniteKlDiv,
    [Parameter("bool", "entropy", "True", keyword_only=True)],
)
