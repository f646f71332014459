"""Negative log likelihood of log-probabilities with class indices.

``torch.ops.fused.nll_loss(input, target, weight=None, reduction=1, ignore_index=-100, *,
dtype=None)`` equals ``torch.nn.functional.nll_loss``: input [C], [N, C] or [N, C, d1, ...], target
int64 or uint8 of the same shape less the classes, weight [C]. Rows are added up in float64, where
torch's float16 overflows. Of input only the entries of the targets are read; its gradient is dense,
as torch's.

Where a compiler traces the op below Dynamo, it is torch's own loss: Inductor generates it together
with the log-probabilities before it and their gradient after it, which a kernel of ours would make
it store.

Raises:
    ValueError: input's and target's batch sizes differ; input has no dimensions; unknown reduction.
    IndexError: on the CPU, a target outside [0, C) that is not ignore_index. On CUDA the kernel
        stops with a device-side assertion.
    RuntimeError: other shapes and dtypes that torch refuses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from compile_losses import library
from compile_losses.bodies.class_targets import NllLoss
from compile_losses.distributed import mesh_of
from compile_losses.eager import plain, records_gradient
from compile_losses.ops import checks
from compile_losses.ops.row_loss import Signature, declare_row_loss, declare_value
from compile_losses.ops.transforms import needs_torch

NAME = "nll_loss"
SIGNATURE = Signature(
    NAME,
    "Tensor target, Tensor? weight",
    "int reduction, SymInt ignore_index",
    saved=("total_weight",),
)

BODIES = NllLoss()

public = library.define(
    f"{NAME}(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
    "SymInt ignore_index=-100, *, ScalarType? dtype=None) -> Tensor"
)


def reference(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Tensor:
    return F.nll_loss(
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=checks.reduction_name(reduction),
    )


def check(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> None:
    if input.dim() == 0:
        raise ValueError(f"{NAME}: expected input to have at least 1 dimension, got 0")
    checks.check_class_indices(NAME, input, target, weight, reduction)


def public_kernel(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if (
        weight is None
        and dtype is None
        and plain(input, target)
        and checks.fits_classes(input, target)
    ):
        checks.check_reduction(NAME, reduction)
        if not records_gradient(input, target):
            return direct_value(input, target, reduction, ignore_index)
        loss, _ = OPS.direct_forward.differentiable(
            input, target, None, reduction, ignore_index, input.dtype
        )
        return loss
    mesh = mesh_of(NAME, input=input, target=target, weight=weight)
    target = checks.class_indices(input, target)
    check(input, target, weight, reduction, ignore_index)
    input = checks.widened(input, dtype)
    result = checks.loss_dtype(dtype, input)
    checks.check_weight_dtype(NAME, input, weight, result, dtype)
    if mesh is not None:
        from compile_losses.distributed import rows

        options = (reduction, ignore_index, result)
        return rows.nll_loss(public_kernel, mesh, input, target, weight, *options)
    if get_proxy_mode() is not None or needs_torch(input, weight):
        wide = checks.accumulation_type(result)
        weight = None if weight is None else weight.to(wide)
        # Torch's decomposition for compilers takes no uint8, and its gradient no other layout.
        classes, logs = target.to(torch.int64), input.to(wide).contiguous()
        return reference(logs, classes, weight, reduction, ignore_index).to(result)
    loss, _ = OPS.direct_forward(input, target, weight, reduction, ignore_index, result)
    return loss


library.implement_public(public, public_kernel)


def forward_fake(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    check(input, target, weight, reduction, ignore_index)
    each = reduction == checks.REDUCTIONS["none"]
    loss = input.new_empty(target.shape if each else (), dtype=dtype)
    return loss, input.new_empty((), dtype=checks.accumulation_type(input.dtype))


def double_reference(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Tensor:
    """Torch's gradient refuses other layouts of input, and is not differentiable for uint8."""
    classes = target.to(torch.int64)
    return reference(input.contiguous(), classes, weight, reduction, ignore_index)


#: The forward also returns total_weight [], what the mean divides by.
OPS = declare_row_loss(SIGNATURE, double_reference, check, forward_fake, BODIES)
direct_value = declare_value(SIGNATURE, forward_fake, BODIES.value)
