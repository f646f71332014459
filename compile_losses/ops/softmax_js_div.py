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

declare("softmax_js_div", reference, [BETA], check=check)
