"""Checks of the arguments of linear cross entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_losses.ops import checks
from compile_losses.ops.checks import describe

NAME = "linear_cross_entropy"


def has_probabilities(input: Tensor, linear_weight: Tensor, target: Tensor) -> bool:
    """Whether target holds a probability for each class: it has the logits' shape, as in torch."""
    return tuple(target.shape) == (*input.shape[:-1], *linear_weight.shape[:-1])


def as_rows(tensor: Tensor) -> Tensor:
    """[hidden] or [..., hidden] as [rows, hidden]."""
    # Not by reshape: -1 is no number if there are no features.
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def check(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int | None,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    dtype: torch.dtype,
    *,
    leaf: bool = False,
) -> None:
    """Raises torch's classes of exceptions.

    Args:
        leaf: whether the arguments are those of a leaf op.
    """
    checks.check_reduction(NAME, reduction)
    for tensor in (input, linear_weight, target, linear_bias, weight):
        if tensor is not None and tensor.layout != torch.strided:
            raise NotImplementedError(
                f"{NAME}: expected dense tensors, got {tensor.layout} {describe(tensor)}"
            )
    checks.check_floating(NAME, input=input, linear_weight=linear_weight)
    others = {"linear_weight": linear_weight, "target": target}
    checks.check_same_device(NAME, input, **others, linear_bias=linear_bias, weight=weight)
    _check_linear(input, linear_weight, linear_bias)
    if leaf and (input.dim() != 2 or linear_weight.dim() != 2):
        raise RuntimeError(
            f"{NAME}: expected input of shape [rows, hidden] and linear_weight of shape "
            f"[classes, hidden], got {list(input.shape)} and {list(linear_weight.shape)}"
        )
    _check_target(input, linear_weight, target, ignore_index, leaf)
    if weight is not None:
        checks.check_class_weight(NAME, weight, linear_weight.shape[0])
        _check_weight_of_classes(weight, dtype, has_probabilities(input, linear_weight, target))
    checks.check_label_smoothing(NAME, label_smoothing)
    checks.check_softcap(NAME, softcap)


def _check_weight_of_classes(weight: Tensor, dtype: torch.dtype, probabilities: bool) -> None:
    """Beside probabilities a weight takes part in type promotion, and is differentiable."""
    if weight.is_complex():
        raise RuntimeError(f"{NAME}: expected weight to be of real numbers, got {weight.dtype}")
    if probabilities:
        return
    if weight.dtype != dtype:
        raise RuntimeError(
            f"{NAME}: expected weight to have the loss's dtype {dtype}, got {weight.dtype}"
        )
    checks.check_no_gradient(NAME, weight)


def _check_linear(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> None:
    check_linear(NAME, ("input", "linear_weight", "linear_bias"), input, linear_weight, linear_bias)
    if linear_weight.dim() > 2 and input.dim() != 2:
        raise RuntimeError(
            f"{NAME}: K-dimensional loss defined by linear_weight shape "
            f"{tuple(linear_weight.shape)} requires batched input, (N, {input.shape[-1]}), got "
            f"{'unbatched ' if input.dim() == 1 else ''}input with shape {tuple(input.shape)}"
        )


def check_linear(
    op: str, names: tuple[str, str, str], input: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    """Checks the arguments of a linear layer, which have these names in an op."""
    of_input, of_weight, of_bias = names
    if input.dim() < 1:
        raise RuntimeError(f"{op}: expected {of_input} to have at least 1 dimension, got 0")
    if weight.dim() < 2:
        raise RuntimeError(
            f"{op}: expected {of_weight} with dimensionality at least 2, got {weight.dim()}"
        )
    if input.shape[-1] != weight.shape[-1]:
        raise RuntimeError(
            f"{op}: expected equal {of_input} and {of_weight} last dimensions (in_features), "
            f"got {input.shape[-1]} and {weight.shape[-1]}, respectively"
        )
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise RuntimeError(
            f"{op}: expected {of_bias} shape {tuple(weight.shape[:-1])}, got {tuple(bias.shape)}"
        )
    for name, tensor in ((of_weight, weight), (of_bias, bias)):
        if tensor is not None and tensor.dtype != input.dtype:
            raise RuntimeError(
                f"{op}: expected {name} to have {of_input}'s dtype {input.dtype}, "
                f"got {tensor.dtype}"
            )


def _check_target(
    input: Tensor, linear_weight: Tensor, target: Tensor, ignore_index: int | None, leaf: bool
) -> None:
    if has_probabilities(input, linear_weight, target) and not leaf:
        if ignore_index is not None:
            raise RuntimeError(
                f"{NAME}: ignore_index cannot be specified when target contains probabilities, "
                f"got {ignore_index}"
            )
        checks.check_floating(NAME, target=target)
        return
    expected = [*input.shape[:-1], *linear_weight.shape[1:-1]]
    message = (
        f"{NAME}: expected target of shape {expected} for input of shape {list(input.shape)} and "
        f"linear_weight of shape {list(linear_weight.shape)}, got {list(target.shape)}"
    )
    if input.dim() > 1 and (target.dim() == 0 or input.shape[0] != target.shape[0]):
        raise ValueError(message)
    if input.dim() == 1 and target.dim() == 1:  # of one number it is taken, see class_indices
        raise ValueError(message)
    if target.is_floating_point():
        raise RuntimeError(
            f"{NAME}: expected class indices as target, or probabilities in the logits' shape "
            f"{[*input.shape[:-1], *linear_weight.shape[:-1]]}, got {describe(target)}"
        )
    if target.dtype not in (torch.int64, torch.uint8):
        raise NotImplementedError(
            f"{NAME}: expected target to be int64 or uint8, got {describe(target)}"
        )
    if list(target.shape) != expected:
        raise RuntimeError(message)
    if target.dtype == torch.uint8 and linear_weight.dim() > 2:
        raise RuntimeError(
            f"{NAME}: expected target to be int64 for linear_weight with more than 2 dimensions, "
            f"got {describe(target)}"
        )
