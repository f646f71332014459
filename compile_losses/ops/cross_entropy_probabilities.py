"""Cross entropy of logits with class probabilities: what ``torch.ops.fused.cross_entropy`` is for a
floating target of input's shape.

The mean is over the rows, whatever the class weights. Logits and probabilities are read once in the
forward (an online softmax, the largest logit subtracted) and once in the backward. Gradients flow
to input, target and weight, which may differ in dtype.

Raises:
    RuntimeError: ignore_index is not negative, or what torch refuses for class indices as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses.bodies.blocks import sum_type, wide_sum
from compile_losses.bodies.row_pairs import (
    MEAN,
    Formulas,
    RowPair,
    RowPairs,
    Statistics,
    exponentials,
)
from compile_losses.bodies.rows import class_dim, finite_or_zero
from compile_losses.ops import checks
from compile_losses.ops.row_loss import Signature, declare_row_loss
from compile_losses.ops.row_pair import statistics
from compile_losses.ops.transforms import needs_torch
from compile_losses.ops.with_grad import declare_with_grad

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "cross_entropy_probabilities"
SIGNATURE = Signature(NAME, "Tensor target, Tensor? weight", "int reduction, float label_smoothing")


def reference(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float
) -> Tensor:
    return F.cross_entropy(
        input,
        target,
        weight,
        reduction=checks.reduction_name(reduction),
        label_smoothing=label_smoothing,
    )


def check(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    label_smoothing: float,
    ignore_index: int = -100,
) -> None:
    name = "cross_entropy"
    checks.check_reduction(name, reduction)
    checks.check_floating(name, input=input, target=target)
    checks.check_same_device(name, input, target=target, weight=weight)
    if not checks.same_shape(target.shape, input.shape):
        raise RuntimeError(
            f"{name}: expected target of class probabilities to have input's shape "
            f"{list(input.shape)}, got {list(target.shape)}"
        )
    if input.dim() == 0:
        raise IndexError(f"{name}: expected input to have at least 1 dimension, got 0")
    if ignore_index >= 0:
        raise RuntimeError(
            f"{name}: expected ignore_index to be negative with class probabilities as target, "
            f"got {ignore_index}"
        )
    if weight is not None:
        checks.check_floating(name, weight=weight)
        checks.check_class_weight(name, weight, input.shape[min(1, input.dim() - 1)])
    checks.check_label_smoothing(name, label_smoothing)


def loss(
    mesh: DeviceMesh | None,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype | None,
) -> Tensor:
    """What the public op does with class probabilities."""
    check(input, target, weight, reduction, label_smoothing, ignore_index)
    others = (target,) if weight is None else (target, weight)
    result = checks.loss_dtype(dtype, input, *others)
    input, target = checks.widened(input, dtype), checks.widened(target, dtype)
    label_smoothing = max(0.0, label_smoothing)  # in this order nan is 0, as in torch
    if mesh is not None:
        return _of_dtensors(mesh, input, target, weight, reduction, label_smoothing, result)
    if needs_torch(input, *others):
        weight = None if weight is None else weight.to(result)
        return reference(input.to(result), target.to(result), weight, reduction, label_smoothing)
    value, _ = OPS.direct_forward(input, target, weight, reduction, label_smoothing, result)
    return value


def _of_dtensors(
    mesh: DeviceMesh,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    label_smoothing: float,
    dtype: torch.dtype,
) -> Tensor:
    from compile_losses.distributed.elementwise import elementwise

    class_dim = min(1, input.dim() - 1)
    if weight is not None:  # in a shape that broadcasts
        weight = weight.view([-1, *(1 for _ in input.shape[class_dim + 1 :])])

    def loss(input: Tensor, target: Tensor, weight: Any, reduction: int, dtype: Any) -> Tensor:
        weight = None if weight is None else weight.flatten()
        return OPS.forward(input, target, weight, reduction, label_smoothing, dtype)[0]

    rows = input.numel() // max(1, input.shape[class_dim])
    return elementwise(
        "cross_entropy",
        mesh,
        loss,
        {"input": input, "target": target, "weight": weight},
        input.shape,
        reduction,
        dtype,
        rows if reduction == checks.REDUCTIONS["mean"] else None,
        classes=class_dim,
    )


def forward_fake(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    label_smoothing: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    check(input, target, weight, reduction, label_smoothing)
    rows = [*input.shape[: min(1, input.dim() - 1)], *input.shape[2:]]
    each = reduction == checks.REDUCTIONS["none"]
    return input.new_empty(rows if each else (), dtype=dtype), statistics(input, target, rows)


class Probabilities(Formulas):
    """Without kernels: the formulas of csrc/losses/cross_entropy_probabilities.h."""

    def __init__(self, label_smoothing: float, classes: int) -> None:
        smoothing = label_smoothing if label_smoothing > 0 else 0.0  # 0 for nan, as in torch
        self.kept, self.uniform = 1 - smoothing, smoothing / max(1, classes)

    def statistics(self, x: Tensor, t: Tensor, weight: Tensor | None) -> Statistics:
        largest, each = exponentials(x, 1.0)
        mass = self.kept * t.to(sum_type(t.device)) + self.uniform
        if weight is not None:
            mass = mass * weight
        origin, summed = finite_or_zero(largest), wide_sum(each)
        masses = wide_sum(mass)
        loss = wide_sum(mass.mul_(origin - x)) + masses * summed.log()
        # The loss in two parts, since terms of both signs may cancel.
        rounded = loss.to(x.dtype)
        rest = torch.where(rounded.isfinite(), loss - rounded, 0)
        return largest, summed, torch.full_like(largest, -torch.inf), masses, rest, rounded

    def value(self, statistics: Statistics) -> Tensor:
        *_, rest, rounded = statistics
        return rounded + rest

    def of_input(
        self, x: Tensor, t: Tensor, statistics: Statistics, scale: Tensor, weight: Tensor | None
    ) -> Tensor:
        largest, summed, _, mass, *_ = statistics
        own = scale * self.kept * t + scale * self.uniform
        if weight is not None:
            own = own * weight
        return (x - largest).exp_().mul_(scale * mass / summed).sub_(own)

    def of_target(
        self, x: Tensor, t: Tensor, statistics: Statistics, scale: Tensor, weight: Tensor | None
    ) -> Tensor:
        factor = scale * self.kept
        distance = _distance(x, statistics)
        return distance.mul_(factor if weight is None else factor * weight)

    def of_weight(self, x: Tensor, t: Tensor, statistics: Statistics, scale: Tensor) -> Tensor:
        return _distance(x, statistics).mul_(self.kept * t + self.uniform).mul_(scale)


def _distance(x: Tensor, statistics: Statistics) -> Tensor:
    """The negative logarithms of the softmax."""
    largest, summed, *_ = statistics
    return (largest - x).add_(summed.log())


def prepare(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float
) -> RowPair:
    check(input, target, weight, reduction, label_smoothing)
    dim = class_dim(input)
    classes = input.shape[dim]
    rows = input.numel() // classes if classes else 0
    divisor = rows if reduction == MEAN else 1
    formulas = Probabilities(label_smoothing, classes)
    return RowPair(NAME, formulas, input, target, dim, reduction, divisor, weight)


#: ``row_pair`` says what stats is.
BODIES = RowPairs(NAME, prepare, tensors=3)
OPS = declare_row_loss(
    SIGNATURE, reference, check, forward_fake, BODIES, of_target=True, of_weight=True
)
declare_with_grad(NAME, SIGNATURE.after_input, forward_fake, BODIES)
