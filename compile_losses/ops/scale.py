"""What is left of a backward pass when the gradient was computed with the loss.

``torch.ops.fused.scale_(grad, factor)`` multiplies a gradient in place by a number that lies
on its device, and returns without touching it when the number is 1, as after ``loss.backward()``
(unless its elements have gaps between them).
``torch.ops.fused.scale(grad, factor)`` returns a new tensor: in a graph it marks where the
gradient of the loss is scaled, for the passes that choose how.
"""

import torch
from torch import Tensor

from compile_losses import library

scale = library.define("scale(Tensor grad, Tensor factor) -> Tensor")
scale_ = library.define("scale_(Tensor(a!) grad, Tensor factor) -> ()")

library.implement(
    scale, lambda grad, factor: grad * factor.to(grad.dtype), "CompositeExplicitAutograd"
)


def scale_fake(grad: Tensor, factor: Tensor) -> None:
    if factor.numel() != 1:
        raise RuntimeError(
            f"scale_: expected factor to hold one number, got shape {list(factor.shape)}"
        )


library.register_fake(scale, lambda grad, factor: torch.empty_like(grad))
library.register_fake(scale_, scale_fake)
library.register_not_differentiable(scale)
library.register_not_differentiable(scale_)
