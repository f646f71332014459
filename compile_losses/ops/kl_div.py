"""Kullback-Leibler divergence.

``torch.ops.fused.kl_div(input, target, reduction=1, *, log_target=False, log_input=True,
dtype=None)`` equals ``torch.nn.functional.kl_div``: input holds log-probabilities, target
probabilities or, with ``log_target``, log-probabilities; reduction 3 is batchmean, the sum over
``input.size(0)``. With ``log_input=False`` input holds probabilities and the op takes their
logarithm on the way: it equals ``kl_div(input.log(), target)`` without a tensor of logarithms in
memory.
"""

import torch.nn.functional as F
from torch import Tensor

from compile_losses.ops.checks import reduction_name
from compile_losses.ops.elementwise import Parameter, declare


def reference(
    input: Tensor, target: Tensor, reduction: int, log_target: bool, log_input: bool
) -> Tensor:
    log_probabilities = input if log_input else input.log()
    name = reduction_name(reduction)
    if name == "mean":  # F.kl_div warns that its mean is not the mathematical one
        return F.kl_div(log_probabilities, target, reduction="none", log_target=log_target).mean()
    return F.kl_div(log_probabilities, target, reduction=name, log_target=log_target)


declare(
    "kl_div",
    reference,
    [
        Parameter("bool", "log_target", "False", keyword_only=True),
        Parameter("bool", "log_input", "True", keyword_only=True),
    ],
    batchmean=True,
    like_target=True,
    numbers_promote=False,
)
