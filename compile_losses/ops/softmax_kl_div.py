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

from compile_losses.ops.softmax_divergence import declare, log_softmaxes, reduce


def reference(
    input: Tensor, target: Tensor, reduction: int, temperature: float, dim: int
) -> Tensor:
    log_p, log_q = log_softmaxes(input, target, temperature, dim)
    # A logit of -inf: probability 0 adds 0, and its gradient is 0.
    finite = log_q.masked_fill(target == -torch.inf, 0.0)
    return reduce(log_q.exp() * (finite - log_p), reduction, dim)


declare("softmax_kl_div", reference)
