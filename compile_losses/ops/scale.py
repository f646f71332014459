"""What is left of a backward pass when the gradient was computed with the loss.

``torch.ops.fused.scale_(grad, factor)`` multiplies a gradient in place by a number that lies
on its device, and returns without touching it when the number is 1, as after ``loss.backward()``
(unless its elements have gaps between them).
``torch.ops.fused.scale(grad, factor)`` returns a new tensor: in a graph it marks where the
gradient of the loss is scaled, for the passes that choose how.
``torch.ops.fused.scale_saved(grad, factor)`` is for a gradient that autograd saved: in a backward
that frees it, it scales ``grad`` in place and returns a tensor that takes its memory over, which
leaves ``grad`` empty; in one that retains it for another backward (``retain_graph=True``), and
outside of any, it returns a new tensor and leaves ``grad`` as it is.
"""

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.bodies.blocks import blocks
from compile_losses.ops.checks import accumulation_type
from compile_losses.torch_internals.eager import retains_graph

scale = library.define("scale(Tensor grad, Tensor factor) -> Tensor")
scale_ = library.define("scale_(Tensor(a!) grad, Tensor factor) -> ()")
scale_saved = library.define("scale_saved(Tensor(a!) grad, Tensor factor) -> Tensor")


def scale_saved_kernel(grad: Tensor, factor: Tensor) -> Tensor:
    if retains_graph():
        return scale(grad, factor)
    scale_(grad, factor)
    result = grad.detach()
    grad.set_()  # type: ignore[call-overload]  # the result must not share memory with an argument, by the op's schema
    return result


def scale_fake(grad: Tensor, factor: Tensor) -> None:
    if factor.numel() != 1:
        raise RuntimeError(
            f"scale_: expected factor to hold one number, got shape {list(factor.shape)}"
        )


def scale_body(_: None, grad: Tensor, factor: Tensor) -> None:
    if factor.device.type == "cpu" and factor.item() == 1:
        return
    dtype = accumulation_type(grad.dtype)
    multiplier = factor.reshape(()).to(dtype)
    if dtype == grad.dtype:
        grad.mul_(multiplier)
        return
    for block in blocks(grad.shape, grad.device):
        part = block(grad)
        part.copy_(part.to(dtype) * multiplier)


def _new(grad: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(grad)


library.compose(scale, lambda grad, factor: grad * factor.to(grad.dtype), _new)
library.compose(scale_saved, scale_saved_kernel, _new)
library.register_body(scale_, scale_fake, scale_body)
library.register_not_differentiable(scale_)
