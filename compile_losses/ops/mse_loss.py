"""Mean squared error.

``torch.ops.fused.mse_loss(input, target, reduction=1, *, dtype=None)`` equals
``torch.nn.functional.mse_loss``: input and target of any broadcastable shapes, strides and floating
dtypes; reduction 0 (none), 1 (mean) or 2 (sum). ``dtype`` is the loss's: the result is that of
input and target cast to it first, without a copy of either.
"""

import torch.nn.functional as F
from torch import Tensor

from compile_losses.ops.checks import reduction_name
from compile_losses.ops.elementwise import declare


def reference(input: Tensor, target: Tensor, reduction: int) -> Tensor:
    return F.mse_loss(input, target, reduction=reduction_name(reduction))


declare("mse_loss", reference)
