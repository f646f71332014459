"""The body of the binary cross entropies of all numbers of a matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses.bodies.blocks import blocks, total
from compile_losses.ops.checks import accumulation_type


def pairs(
    result: Tensor, input: Tensor, target: Tensor, bias: Tensor | None, factor: Tensor
) -> None:
    dtype = accumulation_type(input.dtype)
    columns = torch.arange(input.shape[1], device=input.device)
    sums = []
    for block in blocks(input.shape[:1], input.device, input.shape[1]):
        x, own = block(input).to(dtype), block(target)
        if bias is not None:
            x = x + bias
        if own.dim() == 1:
            own = own.unsqueeze(1) == columns
        negative = torch.where(own, -x, x)
        sums.append(losses(negative).sum())
        gradient = negative.sigmoid_().mul_(factor.reshape(()))
        block(input).copy_(torch.where(own, -gradient, gradient))
    result.copy_(total(sums, input))


def losses(negative: Tensor) -> Tensor:
    """The binary cross entropies of the logits of negative pairs, float32 or float64."""
    if negative.dtype == torch.float32:
        return F.softplus(negative)
    return -F.logsigmoid(-negative)  # above 20 softplus returns its argument, too coarse here
