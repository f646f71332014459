"""What the ops refuse, and in whose words: torch's class of exception, the argument and its
value."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_losses.torch_internals.eager import is_any_autocast_enabled

#: Values of the ``reduction`` argument, as in ``torch.nn.functional``'s own enumeration.
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2, "batchmean": 3}

#: Stands for no class index: of hand-written losses none is ignored.
NOTHING_IGNORED = -(2**62)

NARROW = (torch.bfloat16, torch.float16)
FLOATING = (torch.float64, torch.float32, *NARROW)


def describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def same_shape(left: torch.Size, right: torch.Size) -> bool:
    """Whether shapes are equal. Python compares tuples of different lengths from the left, which
    asks of symbolic sizes that broadcast what torch never asks: each answer is a guard."""
    return len(left) == len(right) and left == right


def batch_of(input: Tensor) -> int:
    """What the reduction batchmean divides by: of the input as given, not as broadcast."""
    return input.shape[0] if input.dim() > 0 else 1


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


def check_embeddings(op: str, input: Tensor, other: Tensor) -> None:
    if input.dim() != 2 or other.dim() != 2 or input.shape[1] != other.shape[1]:
        raise RuntimeError(
            f"{op}: expected input of shape [rows, hidden] and other of shape [columns, hidden], "
            f"got {list(input.shape)} and {list(other.shape)}"
        )


def check_same_device(op: str, input: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != input.device:
            raise RuntimeError(
                f"{op}: expected {name} to be on input's device {input.device}, "
                f"got {describe(tensor)}"
            )


def check_softcap(op: str, softcap: float | None, name: str = "softcap") -> None:
    if softcap is not None and not softcap > 0:
        raise RuntimeError(f"{op}: expected {name} to be positive, got {softcap}")


def check_label_smoothing(op: str, label_smoothing: float) -> None:
    if label_smoothing > 1:
        raise RuntimeError(f"{op}: expected label_smoothing to be at most 1, got {label_smoothing}")


def check_with_gradient(op: str, reduction: int) -> None:
    """For a loss that is computed with its gradient."""
    if reduction == REDUCTIONS["none"]:
        raise RuntimeError(f"{op}: a loss with its gradient needs a reduction")


def check_grad_output(op: str, input: Tensor, grad_output: Tensor | None) -> None:
    """For the gradient that comes with a loss: one number, or None for 1."""
    if grad_output is None:
        return
    check_floating(op, grad_output=grad_output)
    if grad_output.numel() != 1:
        raise RuntimeError(
            f"{op}: expected grad_output to hold one number, got {describe(grad_output)}"
        )


def class_indices(input: Tensor, target: Tensor) -> Tensor:
    """A target of class indices; torch takes one of shape [1] for an input of shape [C] as well."""
    return target.squeeze(0) if input.dim() == 1 and target.shape == (1,) else target


def check_class_indices(
    op: str, input: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> None:
    """Target [], [N] or [N, d1, ...] for input [C], [N, C] or [N, C, d1, ...]; weight [C]."""
    check_reduction(op, reduction)
    check_floating(op, input=input)
    check_same_device(op, input, target=target, weight=weight)
    class_dim = 0 if input.dim() == 1 else 1
    if class_dim == 1 and (target.dim() == 0 or input.shape[0] != target.shape[0]):
        raise ValueError(
            f"{op}: expected target to have input's batch size {input.shape[0]}, "
            f"got shape {list(target.shape)}"
        )
    if target.dtype not in (torch.int64, torch.uint8):
        raise NotImplementedError(
            f"{op}: expected target of class indices to be int64 or uint8, got {describe(target)}"
        )
    if target.dtype == torch.uint8 and input.dim() > 2:
        raise RuntimeError(
            f"{op}: expected target to be int64 for input with more than 2 dimensions, "
            f"got {describe(target)}"
        )
    expected = [*input.shape[:class_dim], *input.shape[class_dim + 1 :]]
    if list(target.shape) != expected:
        raise RuntimeError(
            f"{op}: expected target of shape {expected} for input of shape "
            f"{list(input.shape)}, got {list(target.shape)}"
        )
    if weight is not None:
        check_floating(op, weight=weight)
        check_class_weight(op, weight, input.shape[class_dim])
        check_no_gradient(op, weight)


def check_no_gradient(op: str, weight: Tensor) -> None:
    if weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}: expected weight not to require grad with class indices as target"
        )


def fits_classes(input: Tensor, target: Tensor) -> bool:
    """Whether input and class indices without a weight are what the kernels take as they are."""
    shape = input.shape
    return (
        input.dtype in FLOATING
        and target.dtype == torch.int64
        and len(shape) > 1
        and target.shape == (shape[:1] if len(shape) == 2 else shape[:1] + shape[2:])
    )


def check_class_weight(op: str, weight: Tensor, classes: int) -> None:
    if weight.dim() != 1 or weight.shape[0] != classes:
        raise RuntimeError(f"{op}: expected weight of shape {[classes]}, got {list(weight.shape)}")


def check_weight_dtype(
    op: str,
    input: Tensor,
    weight: Tensor | None,
    result: torch.dtype,
    dtype: torch.dtype | None,
) -> None:
    """With class indices torch does not promote; under autocast it casts both."""
    autocast = dtype is None and result != input.dtype
    if weight is not None and weight.dtype != result and not autocast:
        raise RuntimeError(
            f"{op}: expected weight to have the loss's dtype {result}, got {weight.dtype}"
        )


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def broadcast_shape(op: str, input: Tensor, target: Tensor) -> torch.Size:
    if same_shape(input.shape, target.shape):
        return input.shape
    try:
        return torch.broadcast_shapes(input.shape, target.shape)
    except RuntimeError as error:
        raise RuntimeError(
            f"{op}: expected target to have a shape that broadcasts with input's "
            f"{list(input.shape)}, got {list(target.shape)}"
        ) from error


def promotes(tensor: Tensor, shape: torch.Size) -> bool:
    """Whether torch, in an op whose result has this shape, asks a tensor of a floating dtype what
    the result's is: of tensors and numbers, which have no dimensions, the tensors decide."""
    return tensor.dim() > 0 or not shape


def promoted_dtype(first: Tensor, *others: Tensor) -> torch.dtype:
    dtype = first.dtype
    for other in others:
        if other.dtype != dtype:
            dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def _autocasts(device_type: str) -> bool:
    available = torch.amp.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def widened(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """An argument of rows of logits in float64 where the loss is asked for in that.

    The kernels of rows compute in float32 what is not in float64.
    """
    return tensor.to(dtype) if dtype == torch.float64 else tensor


def loss_dtype(dtype: torch.dtype | None, input: Tensor, *others: Tensor) -> torch.dtype:
    """The dtype of a loss: ``dtype`` if given; else the promoted one, or float32 under autocast."""
    if dtype is not None:
        if dtype not in FLOATING:
            raise RuntimeError(
                f"expected dtype to be float64, float32, bfloat16 or float16, got {dtype}"
            )
        return dtype
    promoted = promoted_dtype(input, *others)
    if not is_any_autocast_enabled() or promoted == torch.float64:
        return promoted
    device = input.device.type
    return torch.float32 if _autocasts(device) else promoted
