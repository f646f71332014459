"""Linear cross entropy in torch's own ops, over all logits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses.ops import checks
from compile_losses.ops.linear.arguments import has_probabilities


def under_autocast(tensor: Tensor) -> bool:
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def autocast_off(tensor: Tensor) -> Any:
    """Turns autocast off: the ops cast their arguments themselves, and compute in these dtypes."""
    if not under_autocast(tensor):
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def autocast_layer(*tensors: Tensor | None) -> list[Tensor | None]:
    """The arguments of a linear layer, cast as autocast casts them."""
    device = next(t.device.type for t in tensors if t is not None)
    if any(t is not None and t.dtype == torch.float64 for t in tensors):
        return list(tensors)
    lower = torch.get_autocast_dtype(device)
    return [t if t is None else t.to(lower) for t in tensors]


def reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    dtype: torch.dtype,
) -> Tensor:
    """The loss as torch computes it; arguments as the leaf ops', and K-dimensional classes."""
    probabilities = has_probabilities(input, linear_weight, target)
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, linear_weight.flatten(0, -2), bias)
    leading = input.shape[:-1]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(dtype).reshape(*leading, *linear_weight.shape[:-1])
    each = target.shape[:-1] if probabilities else target.shape
    if len(leading) > 1:
        logits = logits.flatten(0, -2)
        target = target.flatten(0, -2 if probabilities else -1)
    if not probabilities:
        target = target.to(torch.int64)  # torch is not twice differentiable with uint8
    loss = F.cross_entropy(
        logits,
        target.to(dtype) if probabilities else target,
        None if weight is None else weight.to(dtype),
        ignore_index=ignore_index,
        reduction=checks.reduction_name(reduction),
        label_smoothing=label_smoothing,
    )
    if z_loss != 0:
        loss = loss + z_loss * _squared_logsumexp(
            logits, None if probabilities else target != ignore_index, reduction
        )
    if len(leading) > 1 and reduction == checks.REDUCTIONS["none"]:
        return loss.reshape(each)
    return loss


def _squared_logsumexp(logits: Tensor, kept: Tensor | None, reduction: int) -> Tensor:
    squares = torch.logsumexp(logits, 0 if logits.dim() == 1 else 1) ** 2
    if kept is not None:
        squares = torch.where(kept, squares, 0)
    if reduction == checks.REDUCTIONS["none"]:
        return squares
    if reduction == checks.REDUCTIONS["sum"]:
        return squares.sum()
    return squares.mean() if kept is None else squares.sum() / kept.sum()
