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

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library
from compile_losses.bodies.class_targets import CrossEntropy
from compile_losses.distributed import mesh_of, replicated_by_loss_parallel
from compile_losses.eager import plain, records_gradient
from compile_losses.ops import checks, cross_entropy_probabilities
from compile_losses.ops.row_loss import Signature, declare_row_loss, declare_value
from compile_losses.ops.transforms import needs_torch
from compile_losses.ops.with_grad import declare_with_grad

NAME = "cross_entropy"
SIGNATURE = Signature(
    NAME,
    "Tensor target, Tensor? weight",
    "int reduction, SymInt ignore_index, float label_smoothing",
    last=", float? softcap=None",
    saved=("stats", "total_weight"),
)

BODIES = CrossEntropy()

public = library.define(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
    "SymInt ignore_index=-100, float label_smoothing=0.0, *, ScalarType? dtype=None) -> Tensor"
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
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None = None,
) -> None:
    if input.dim() == 0:
        raise RuntimeError(f"{NAME}: expected input to have at least 1 dimension, got 0")
    checks.check_class_indices(NAME, input, target, weight, reduction)
    checks.check_label_smoothing(NAME, label_smoothing)
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
        loss, _, _ = OPS.direct_forward.differentiable(
            input, target, None, reduction, ignore_index, label_smoothing, input.dtype, None
        )
        return loss
    classes = (input, 0 if input.dim() == 1 else 1)
    target, weight = replicated_by_loss_parallel(classes, target, weight)
    mesh = mesh_of("cross_entropy", input=input, target=target, weight=weight)
    if target.is_floating_point() and checks.same_shape(target.shape, input.shape):
        return cross_entropy_probabilities.loss(
            mesh, input, target, weight, reduction, ignore_index, label_smoothing, dtype
        )
    target = checks.class_indices(input, target)
    check(input, target, weight, reduction, ignore_index, label_smoothing)
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
    loss, _, _ = OPS.direct_forward(
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
    check(input, target, weight, reduction, ignore_index, label_smoothing, softcap)
    each = reduction == checks.REDUCTIONS["none"]
    loss = input.new_empty(target.shape if each else (), dtype=dtype)
    accumulation = checks.accumulation_type(input.dtype)
    stats = input.new_empty((target.numel(), 2), dtype=accumulation)
    return loss, stats, input.new_empty((), dtype=accumulation)


#: The forward also returns stats [rows, 2], each row's largest logit and the logarithm of the sum
#: of its exponentials relative to it, and total_weight [], the mean's divisor. With a softcap it is
#: the loss of ``softcap * tanh(input / softcap)``, and so are the statistics.
OPS = declare_row_loss(SIGNATURE, reference, check, forward_fake, BODIES)
direct_value = declare_value(SIGNATURE, forward_fake, BODIES.value)
forward = OPS.forward
with_grad, with_grad_ = declare_with_grad(NAME, SIGNATURE.after_input, forward_fake, BODIES)
