"""Mean squared error.

``torch.ops.fused.mse_loss(input, target, reduction=1, *, weight=None, dtype=None)`` equals
``torch.nn.functional.mse_loss``: input and target of any broadcastable shapes, strides and floating
dtypes; reduction 0 (none), 1 (mean) or 2 (sum). ``weight`` multiplies the loss of each element, to
whose shape it broadcasts; the mean then divides by its sum over all elements, and gradients flow to
it, too. ``dtype`` is the loss's: the result is that of input, target and weight cast to it first,
without a copy of any.
"""

import torch.nn.functional as F
from torch import Tensor

from compile_losses.ops.checks import reduction_name
from compile_losses.ops.elementwise import declare
from compile_losses.ops.weights import Weights, weighted


@weighted
def reference(input: Tensor, target: Tensor, reduction: int) -> Tensor:
    return F.mse_loss(input, target, reduction=reduction_name(reduction))


declare("mse_loss", reference, weights=Weights(("weight",), differentiable=True, normalize=True))
