"""Smooth L1 loss (Girshick, Fast R-CNN, 2015).

``torch.ops.fused.smooth_l1_loss(input, target, reduction=1, beta=1.0, *, weight=None,
dtype=None)`` equals ``torch.nn.functional.smooth_l1_loss``: 0.5 d^2 / beta where |d| < beta,
|d| - 0.5 beta elsewhere, for d = input - target; beta 0 gives the L1 loss and a negative one raises
RuntimeError. The difference is never stored: backward computes it again. ``weight``, which torch's
function does not have, is that of ``fused.l1_loss``.
"""

import torch.nn.functional as F
from torch import Tensor

from compile_losses.ops.checks import reduction_name
from compile_losses.ops.elementwise import Parameter, declare
from compile_losses.ops.weights import Weights, weighted


@weighted
def reference(input: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    return F.smooth_l1_loss(input, target, reduction=reduction_name(reduction), beta=beta)


def check(beta: float) -> None:
    if not beta >= 0:  # nan is refused, too
        raise RuntimeError(f"smooth_l1_loss: expected beta to be 0 or more, got {beta}")


declare(
    "smooth_l1_loss",
    reference,
    [Parameter("float", "beta", "1.0")],
    weights=Weights(("weight",), differentiable=True, normalize=True),
    check=check,
)
