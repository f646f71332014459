"""Cross entropy of logits with class indices or class probabilities.

``torch.ops.fused.cross_entropy(input, target, weight=None, reduction=1, ignore_index=-100,
label_smoothing=0.0, *, dtype=None)`` equals ``torch.nn.functional.cross_entropy``: input [C],
[N, C] or [N, C, d1, ...]; target class indices, int64 or uint8 of the same shape less the classes,
or class probabilities, floating and of input's shape (see ``cross_entropy_probabilities``); weight
[C]. The logits are read once in the forward (an online softmax, the largest logit
subtracted) and once in the backward, where the classes of a row lie side by side;
log-probabilities are never stored. ``dtype`` is the loss's:
the result is that of input cast to it first, without a copy.

Raises:
    ValueError: input's and target's batch sizes differ; unknown reduction.
    IndexError: on the CPU, a target outside [0, C) that is not ignore_index. On CUDA the kernel
        stops with a device-side assertion.
    RuntimeError: other shapes and dtypes that torch refuses.
    NotImplementedError: logits that are not floating point.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library
from compile_losses.distributed import mesh_of
from compile_losses.eager import plain, records_gradient
from compile_losses.ops import checks, cross_entropy_probabilities
from compile_losses.ops.transforms import double_backward, needs_torch
from compile_losses.ops.with_grad import declare_with_grad

NAME = "cross_entropy"
OPTIONS = "int reduction, SymInt ignore_index, float label_smoothing"
ARGUMENTS = f"Tensor target, Tensor? weight, {OPTIONS}, ScalarType dtype, float? softcap=None"

public = library.define(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
    "SymInt ignore_index=-100, float label_smoothing=0.0, *, ScalarType? dtype=None) -> Tensor"
)
#: Returns the loss; stats [rows, 2]: each row's largest logit and the logarithm of its summed
#: exponentials relative to it; and total_weight [], what the mean divides by. With a softcap it is
#: the loss of ``softcap * tanh(input / softcap)``, and so are the statistics.
forward = library.define(
    f"cross_entropy_forward(Tensor input, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)
#: The loss alone, in input's dtype, for eager calls that record no gradient: to return three
#: tensors takes as long as the loss of a few rows.
value = library.define(
    "cross_entropy_value(Tensor input, Tensor target, int reduction, SymInt ignore_index, "
    "float label_smoothing) -> Tensor"
)
backward = library.define(
    "cross_entropy_backward(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
    f"Tensor stats, Tensor total_weight, {OPTIONS}, float? softcap=None) -> Tensor"
)


def reference(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None = None,
) -> Tensor:
    if target.dtype == torch.uint8:  # whose gradient torch neither traces nor differentiates
        target = target.to(torch.int64)
    if softcap is not None:
        input = softcap * torch.tanh(input / softcap)
    return F.cross_entropy(
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=checks.reduction_name(reduction),
        label_smoothing=label_smoothing,
    )


def check(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    label_smoothing: float,
    softcap: float | None = None,
) -> None:
    checks.check_reduction(NAME, reduction)
    checks.check_floating(NAME, input=input)
    checks.check_same_device(NAME, input, target=target, weight=weight)
    if input.dim() == 0:
        raise RuntimeError(f"{NAME}: expected input to have at least 1 dimension, got 0")
    checks.check_class_indices(NAME, input, target, weight)
    if label_smoothing > 1:
        raise RuntimeError(
            f"{NAME}: expected label_smoothing to be at most 1, got {label_smoothing}"
        )
    checks.check_softcap(NAME, softcap)


def public_kernel(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if (
        weight is None
        and dtype is None
        and 0 <= label_smoothing <= 1
        and plain(input, target)
        and checks.fits_classes(input, target)
    ):
        checks.check_reduction(NAME, reduction)
        if not records_gradient(input, target):
            return direct_value(input, target, reduction, ignore_index, label_smoothing)
        loss, _, _ = direct_forward.differentiable(
            input, target, None, reduction, ignore_index, label_smoothing, input.dtype, None
        )
        return loss
    mesh = mesh_of("cross_entropy", input=input, target=target, weight=weight)
    if target.is_floating_point() and checks.same_shape(target.shape, input.shape):
        return cross_entropy_probabilities.loss(
            mesh, input, target, weight, reduction, ignore_index, label_smoothing, dtype
        )
    target = checks.class_indices(input, target)
    check(input, target, weight, reduction, label_smoothing)
    input = checks.widened(input, dtype)
    result = checks.loss_dtype(dtype, input)
    checks.check_weight_dtype(NAME, input, weight, result, dtype)
    label_smoothing = max(0.0, label_smoothing)  # in this order nan is 0, as in torch
    if mesh is not None:
        from compile_losses.distributed import rows

        options = (reduction, ignore_index, label_smoothing, result)
        return rows.cross_entropy(public_kernel, mesh, input, target, weight, *options)
    if needs_torch(input, weight):
        weight = None if weight is None else weight.to(result)
        return reference(input.to(result), target, weight, reduction, ignore_index, label_smoothing)
    loss, _, _ = direct_forward(
        input, target, weight, reduction, ignore_index, label_smoothing, result, None
    )
    return loss


library.implement_public(public, public_kernel)


def forward_fake(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check(input, target, weight, reduction, label_smoothing, softcap)
    each = reduction == checks.REDUCTIONS["none"]
    loss = input.new_empty(target.shape if each else (), dtype=dtype)
    accumulation = checks.accumulation_type(input.dtype)
    stats = input.new_empty((target.numel(), 2), dtype=accumulation)
    return loss, stats, input.new_empty((), dtype=accumulation)


library.register_fake(forward, forward_fake)


def value_fake(
    input: Tensor, target: Tensor, reduction: int, ignore_index: int, label_smoothing: float
) -> Tensor:
    options = (reduction, ignore_index, label_smoothing)
    return forward_fake(input, target, None, *options, input.dtype)[0]


library.register_fake(value, value_fake)
direct_value = library.register_not_differentiable(value)


def backward_fake(
    grad_output: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    total_weight: Tensor,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None = None,
) -> Tensor:
    check(input, target, weight, reduction, label_smoothing, softcap)
    return torch.empty_like(input)


library.register_fake(backward, backward_fake)


with_grad, with_grad_ = declare_with_grad(NAME, ARGUMENTS, forward_fake)


def setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    input, target, weight, *options, _, softcap = inputs
    ctx.options = (*options, softcap)
    _, stats, total_weight = output
    ctx.mark_non_differentiable(stats, total_weight)
    ctx.save_for_backward(input, target, weight, stats, total_weight)


def forward_vjp(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    input, target, weight, stats, total_weight = ctx.saved_tensors
    gradient = direct_backward(
        grad_output, input, target, weight, stats, total_weight, *ctx.options
    )
    return (gradient, *(None for _ in range(7)))


direct_forward = library.register_autograd(forward, forward_vjp, setup_forward)


def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad_output, input, target, weight, _, _, *ctx.options = inputs
    ctx.save_for_backward(grad_output, input, target, weight)


def backward_vjp(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    grad_output, input, target, weight = ctx.saved_tensors
    dtype = grad_output.dtype
    products = double_backward(
        lambda x: reference(
            x.to(dtype), target, None if weight is None else weight.to(dtype), *ctx.options
        ),
        grad_output,
        (input,),
        (cotangent,),
    )
    return (*products, *(None for _ in range(4 + len(ctx.options))))


direct_backward = library.register_autograd(backward, backward_vjp, setup_backward)
