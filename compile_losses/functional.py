"""``torch.nn.functional``'s losses, computed by the fused ops.

Each function has the signature, results, gradients, warnings and classes of exceptions of torch's
of the same name, for which it can be imported instead. Where torch rounds partial results to a
16-bit type, these do not.

A call goes on to torch's own function when an operand is not a dense tensor of a floating dtype on
a device with kernels, when a class or mode overrides torch's function, and, within the ops, inside
``torch.func`` and forward-mode differentiation, for which custom ops have no rules.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime

import compile_losses.ops  # noqa: F401  declares fused::*
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.overrides import has_kernels, overridden

__all__ = [
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "nll_loss",
    "smooth_l1_loss",
]

fused = torch.ops.fused
# As Any, because its stubs do not know every weight.
F: Any = torch.nn.functional


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Mean squared error, as :func:`torch.nn.functional.mse_loss`; weight has input's shape."""
    operands = (input, target, weight)
    if weight is not None or overridden(*operands) or not has_kernels(*operands):
        return F.mse_loss(input, target, size_average, reduce, reduction, weight)
    _warn_if_broadcast(input, target)
    return fused.mse_loss(input, target, _reduction_of(reduction, size_average, reduce))


def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Mean absolute error, as :func:`torch.nn.functional.l1_loss`; weight has input's shape."""
    return F.l1_loss(input, target, size_average, reduce, reduction, weight)


def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """Smooth L1 loss, as :func:`torch.nn.functional.smooth_l1_loss`."""
    operands = (input, target)
    if overridden(*operands) or not has_kernels(*operands) or not _is_number(beta):
        return F.smooth_l1_loss(input, target, size_average, reduce, reduction, beta)
    _warn_if_broadcast(input, target)
    return fused.smooth_l1_loss(input, target, _reduction_of(reduction, size_average, reduce), beta)


def huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Huber loss, as :func:`torch.nn.functional.huber_loss`; weight has input's shape."""
    operands = (input, target, weight)
    if (
        weight is not None
        or overridden(*operands)
        or not has_kernels(*operands)
        or not _is_number(delta)
    ):
        return F.huber_loss(input, target, reduction, delta, weight)
    _warn_if_broadcast(input, target)
    dtype = None if input.dtype == target.dtype else _autocast_dtype(input)
    return fused.huber_loss(input, target, _reduction_of(reduction), delta, dtype=dtype)


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """Kullback-Leibler divergence, as :func:`torch.nn.functional.kl_div`."""
    if overridden(input, target) or not has_kernels(input, target):
        return F.kl_div(input, target, size_average, reduce, reduction, log_target)
    legacy = size_average is not None or reduce is not None
    if reduction == "mean" and not legacy:
        _warn(MEAN_OF_KL_DIV, 5)
    if reduction == "batchmean" and not legacy:
        return fused.kl_div(input, target, REDUCTIONS["batchmean"], log_target=log_target)
    enum = _reduction_of(reduction, size_average, reduce)
    loss = fused.kl_div(input, target, enum, log_target=log_target)
    if reduction == "batchmean" and input.dim() > 0:
        loss = loss / input.size(0)
    return loss


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Negative log-likelihood, as :func:`torch.nn.functional.nll_loss`."""
    return F.nll_loss(input, target, weight, size_average, ignore_index, reduce, reduction)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of logits and class indices or probabilities, as
    :func:`torch.nn.functional.cross_entropy`."""
    if (
        overridden(input, target, weight)
        or not has_kernels(input)
        or not _are_classes(input, target)
        or not _is_integer(ignore_index)
        or not _is_number(label_smoothing)
    ):
        return F.cross_entropy(
            input,
            target,
            weight,
            size_average,
            ignore_index,
            reduce,
            reduction,
            label_smoothing,
        )
    enum = _reduction_of(reduction, size_average, reduce)
    return fused.cross_entropy(input, target, weight, enum, ignore_index, label_smoothing)


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Binary cross entropy of logits, as
    :func:`torch.nn.functional.binary_cross_entropy_with_logits`."""
    return F.binary_cross_entropy_with_logits(
        input, target, weight, size_average, reduce, reduction, pos_weight
    )


def _autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to which autocast takes a tensor, as an operand of a loss."""
    device = tensor.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return torch.float32
    return tensor.dtype


def _reduction_of(
    reduction: str, size_average: bool | None = None, reduce: bool | None = None
) -> int:
    if size_average is not None or reduce is not None:
        averages = size_average is None or size_average
        reduction = ("mean" if averages else "sum") if reduce is None or reduce else "none"
        _warn(f"size_average and reduce are deprecated: use reduction={reduction!r}", 6)
    elif reduction == "elementwise_mean":
        _warn("reduction='elementwise_mean' is deprecated: use reduction='mean'", 6)
        reduction = "mean"
    for name in ("none", "mean", "sum"):
        if reduction == name:
            return REDUCTIONS[name]
    raise ValueError(f"expected reduction to be 'none', 'mean' or 'sum', got {reduction!r}")


def _warn(message: str, stacklevel: int) -> None:
    """Warns the caller of the loss; in torch.compile while it traces the call."""
    comptime(
        lambda frame: warnings.warn(frame.get_local("message").as_python_constant(), stacklevel=1),
        lambda: warnings.warn(message, stacklevel=stacklevel),
    )


MEAN_OF_KL_DIV = (
    "reduction='mean' divides the total by the number of elements, which is not the divergence of "
    "a batch of distributions: reduction='batchmean' divides by the batch size"
)


def _warn_if_broadcast(input: Tensor, target: Tensor) -> None:
    if input.shape != target.shape:
        comptime(
            lambda frame: _warn_of_shapes(_shape(frame, "input"), _shape(frame, "target")),
            lambda: _warn_of_shapes(input.shape, target.shape),
        )


def _shape(frame: Any, name: str) -> torch.Size:
    return frame.get_local(name).as_fake().shape


def _warn_of_shapes(input: torch.Size, target: torch.Size) -> None:
    warnings.warn(
        f"target of shape {list(target)} and input of shape {list(input)} are broadcast together, "
        "which is probably not what is meant: give them the same shape",
        stacklevel=6,  # the caller of the loss
    )


def _are_classes(input: Tensor, target: Any) -> bool:
    """Whether target is a tensor of class indices, of as many dimensions as it should have.

    With one row of logits torch accepts a target [1], but neither smooths nor differentiates it.
    """
    if not isinstance(target, Tensor) or target.is_floating_point():
        return False
    return not (input.dim() == 1 and target.dim() == 1)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
