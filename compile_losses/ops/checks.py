"""What the ops refuse, and in whose words: torch's class of exception, the argument and its
value."""

from __future__ import annotations

import torch
from torch import Tensor

#: Values of the ``reduction`` argument, as in ``torch.nn.functional``'s own enumeration.
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2, "batchmean": 3}

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def reduction_name(reduction: int) -> str:
    return next(name for name, value in REDUCTIONS.items() if value == reduction)


def check_reduction(op: str, reduction: int, *, batchmean: bool = False) -> None:
    last = REDUCTIONS["batchmean" if batchmean else "sum"]
    if not 0 <= reduction <= last:
        expected = ", ".join(f"{value} ({reduction_name(value)})" for value in range(last + 1))
        raise ValueError(f"{op}: expected reduction to be one of {expected}, got {reduction!r}")


def check_floating(op: str, **arguments: Tensor) -> None:
    for name, tensor in arguments.items():
        if tensor.dtype not in FLOATING:
            raise NotImplementedError(
                f"{op}: expected {name} to be float64, float32, bfloat16 or float16, "
                f"got {describe(tensor)}"
            )


def check_same_device(op: str, input: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != input.device:
            raise RuntimeError(
                f"{op}: expected {name} to be on input's device {input.device}, "
                f"got {describe(tensor)}"
            )


def check_grad_output(op: str, input: Tensor, grad_output: Tensor | None) -> None:
    """For the gradient that comes with a loss: one number on input's device, or None for 1."""
    if grad_output is None:
        return
    check_floating(op, grad_output=grad_output)
    check_same_device(op, input, grad_output=grad_output)
    if grad_output.numel() != 1:
        raise RuntimeError(
            f"{op}: expected grad_output to hold one number, got {describe(grad_output)}"
        )


def broadcast_shape(op: str, input: Tensor, target: Tensor) -> torch.Size:
    if input.shape == target.shape:
        return input.shape
    try:
        return torch.broadcast_shapes(input.shape, target.shape)
    except RuntimeError as error:
        raise RuntimeError(
            f"{op}: expected target to have a shape that broadcasts with input's "
            f"{list(input.shape)}, got {list(target.shape)}"
        ) from error


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _autocasts(device_type: str) -> bool:
    available = torch.amp.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def loss_dtype(dtype: torch.dtype | None, input: Tensor, *others: Tensor) -> torch.dtype:
    """The dtype of a loss: ``dtype`` if given; else the promoted one, or float32 under autocast."""
    if dtype is not None:
        if dtype not in FLOATING:
            raise RuntimeError(
                f"expected dtype to be float64, float32, bfloat16 or float16, got {dtype}"
            )
        return dtype
    promoted = input.dtype
    for other in others:
        if other.dtype != promoted:
            promoted = torch.promote_types(promoted, other.dtype)
    if not torch._C._is_any_autocast_enabled() or promoted == torch.float64:
        return promoted
    device = input.device.type
    return torch.float32 if _autocasts(device) else promoted
