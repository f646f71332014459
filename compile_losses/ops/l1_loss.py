"""L1 loss.

``torch.ops.fused.l1_loss(input, target, reduction=1, *, weight=None, dtype=None)`` equals
``torch.nn.functional.l1_loss`` of floating-point tensors: |input - target|, whose gradient is 0
where they are equal. ``weight`` multiplies the loss of each element, to whose shape it broadcasts;
the mean then divides by its sum over all elements, and gradients flow to it, too.
"""

import torch.nn.functional as F
from torch import Tensor

from compile_losses.ops.checks import reduction_name
from compile_losses.ops.elementwise import declare
from compile_losses.ops.weights import Weights, weighted


@weighted
def reference(input: Tensor, target: Tensor, reduction: int) -> Tensor:
    return F.l1_loss(input, target, reduction=reduction_name(reduction))


declare("l1_loss", reference, weights=Weights(("weight",), differentiable=True, normalize=True))
