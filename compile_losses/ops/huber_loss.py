"""Huber loss (Huber, Robust Estimation of a Location Parameter, 1964).

``torch.ops.fused.huber_loss(input, target, reduction=1, delta=1.0, *, weight=None, dtype=None)``
equals ``torch.nn.functional.huber_loss``: 0.5 d^2 where |d| <= delta, delta (|d| - 0.5 delta)
elsewhere, for d = input - target; a delta that is not positive raises RuntimeError. ``weight``
multiplies the loss of each element, to whose shape it broadcasts; as in torch the mean still
divides by the number of elements. Gradients flow to it, too.
"""

import torch.nn.functional as F
from torch import Tensor

from compile_losses.ops.checks import reduction_name
from compile_losses.ops.elementwise import Parameter, declare
from compile_losses.ops.weights import Weights, weighted


@weighted
def reference(input: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    return F.huber_loss(input, target, reduction=reduction_name(reduction), delta=delta)


def check(delta: float) -> None:
    if not delta > 0:  # nan is refused, too
        raise RuntimeError(f"huber_loss: expected delta to be positive, got {delta}")


declare(
    "huber_loss",
    reference,
    [Parameter("float", "delta", "1.0")],
    weights=Weights(("weight",), differentiable=True),
    check=check,
    like_input=True,
)
