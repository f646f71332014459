"""Kullback-Leibler divergence of two softmaxes, for distillation (Hinton, Vinyals, Dean,
Distilling the Knowledge in a Neural Network, 2015).

``torch.ops.fused.softmax_kl_div(input, target, reduction=3, *, temperature=1.0, dim=-1,
dtype=None)`` is KL(softmax(target / temperature) || softmax(input / temperature)) along ``dim``: it
equals ``F.kl_div(F.log_softmax(input / T, dim), F.softmax(target / T, dim))``, not multiplied by
T^2. Swapping the arguments gives the reverse divergence. Both rows are read once in the forward and
once in the backward. Arguments, reductions and errors are in ``softmax_divergence``.
"""

import torch
from torch import Tensor

from compile_losses.bodies.blocks import wide_sum
from compile_losses.bodies.row_pairs import Formulas, Statistics, exponentials, positive
from compile_losses.bodies.rows import finite_or_zero
from compile_losses.ops.softmax_divergence import declare, log_softmaxes, reduce


def reference(
    input: Tensor, target: Tensor, reduction: int, temperature: float, dim: int
) -> Tensor:
    log_p, log_q = log_softmaxes(input, target, temperature, dim)
    # A logit of -inf: probability 0 adds 0, and its gradient is 0.
    finite = log_q.masked_fill(target == -torch.inf, 0.0)
    return reduce(log_q.exp() * (finite - log_p), reduction, dim)


class KlDiv(Formulas):
    """Without kernels: the formulas of csrc/losses/softmax_kl_div.h."""

    def __init__(self, dtype: torch.dtype, temperature: float) -> None:
        self.inverse = positive(1 / temperature, dtype)
        self.lowest = torch.finfo(dtype).min

    def statistics(self, x: Tensor, t: Tensor, weight: Tensor | None) -> Statistics:
        largest, each = exponentials(x, self.inverse)
        summed = wide_sum(each)
        most, place = t.max(-1, keepdim=True)
        # The student's logit beside the teacher's largest: where one class has almost all of the
        # mass its term is 0, and nothing cancels.
        pivot = finite_or_zero(x.gather(-1, place))
        relative = t - finite_or_zero(most)
        probabilities = (relative * self.inverse).exp_()
        mass = wide_sum(probabilities)
        distance = relative.clamp_(min=self.lowest).sub_(x - pivot)
        cross = wide_sum(probabilities.mul_(distance)) / mass
        return largest, summed, most, mass, pivot, cross

    def value(self, statistics: Statistics) -> Tensor:
        largest, summed, _, mass, pivot, cross = statistics
        return (cross + (largest - pivot)) * self.inverse + (summed / mass).log()

    def of_input(
        self, x: Tensor, t: Tensor, statistics: Statistics, scale: Tensor, weight: Tensor | None
    ) -> Tensor:
        largest, summed, most, mass, *_ = statistics
        factor = scale * self.inverse
        q = (t - most).mul_(self.inverse).exp_().mul_(factor / mass)
        return (x - largest).mul_(self.inverse).exp_().mul_(factor / summed).sub_(q)

    def of_target(
        self, x: Tensor, t: Tensor, statistics: Statistics, scale: Tensor, weight: Tensor | None
    ) -> Tensor:
        _, _, most, mass, pivot, cross = statistics
        relative = t - most
        q = (relative * self.inverse).exp_().mul_(scale * self.inverse / mass * self.inverse)
        distance = relative.clamp_(min=self.lowest).sub_(x - pivot)
        return distance.sub_(cross).mul_(q)


declare("softmax_kl_div", reference, KlDiv)
