"""The arguments of compile_losses.functional: their meaning, checks and torch's warnings."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from compile_losses.ops.checks import REDUCTIONS


def check_weight(input: Tensor, weight: Tensor) -> None:
    if weight.shape != input.shape:
        raise ValueError(
            f"expected weight to have input's shape {list(input.shape)}, got {list(weight.shape)}"
        )


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to which autocast takes a tensor, as an operand of a loss."""
    device = tensor.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return torch.float32
    return tensor.dtype


def reduction_of(
    reduction: str, size_average: bool | None = None, reduce: bool | None = None
) -> int:
    if size_average is not None or reduce is not None:
        averages = size_average is None or size_average
        reduction = ("mean" if averages else "sum") if reduce is None or reduce else "none"
        warn(f"size_average and reduce are deprecated: use reduction={reduction!r}", 4)
    elif reduction == "elementwise_mean":
        warn("reduction='elementwise_mean' is deprecated: use reduction='mean'", 4)
        reduction = "mean"
    for name in ("none", "mean", "sum"):
        if reduction == name:
            return REDUCTIONS[name]
    raise ValueError(f"expected reduction to be 'none', 'mean' or 'sum', got {reduction!r}")


def reduction_of_divergence(reduction: str) -> int:
    if reduction not in REDUCTIONS:
        raise ValueError(f"expected reduction to be one of {list(REDUCTIONS)}, got {reduction!r}")
    return REDUCTIONS[reduction]


def warn(message: str, stacklevel: int) -> None:
    """Warns the caller of the loss; in torch.compile while it traces the call."""
    if torch.compiler.is_dynamo_compiling():
        from compile_losses.torch_internals.dynamo import comptime  # eager code need not load it

        comptime(
            lambda frame: warnings.warn(
                frame.get_local("message").as_python_constant(), stacklevel=1
            )
        )
    else:
        warnings.warn(message, stacklevel=stacklevel)


def warn_if_broadcast(input: Tensor, target: Tensor) -> None:
    if input.shape == target.shape:
        return
    if torch.compiler.is_dynamo_compiling():
        from compile_losses.torch_internals.dynamo import comptime

        comptime(lambda frame: _warn_of_shapes(_shape(frame, "input"), _shape(frame, "target")))
    else:
        _warn_of_shapes(input.shape, target.shape)


def _shape(frame: Any, name: str) -> torch.Size:
    return frame.get_local(name).as_fake().shape


def _warn_of_shapes(input: torch.Size, target: torch.Size) -> None:
    warnings.warn(
        f"target of shape {list(target)} and input of shape {list(input)} are broadcast together, "
        "which is probably not what is meant: give them the same shape",
        stacklevel=4,  # the caller of the loss
    )


def are_classes(input: Tensor, target: Any) -> bool:
    """Whether target is a tensor of class indices that can fit input; torch refuses the others.

    Torch takes a target [1] with a single row of logits, but neither smooths nor differentiates it.
    """
    if not isinstance(target, Tensor) or target.is_floating_point():
        return False
    if target.dtype == torch.uint8 and input.dim() > 2:
        return False
    return target.dim() == max(input.dim() - 1, 0)


def is_integer(value: Any) -> bool:
    """Whether torch takes a value as an integer: one of 64 bits, and no bool."""
    if type(value) is bool or not isinstance(value, (int, torch.SymInt)):
        return False
    return torch.compiler.is_compiling() or -(2**63) <= value < 2**63


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
