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


declare(
    "softmax_finite_kl_div", reference, [Parameter("bool", "entropy", "True", keyword_only=True)]
)
