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

from compile_losses import library
from compile_losses.ops import checks
from compile_losses.ops.row_pair import statistics
from compile_losses.ops.transforms import double_backward, needs_torch
from compile_losses.ops.with_grad import declare_with_grad

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "cross_entropy_probabilities"
OPTIONS = "int reduction, float label_smoothing"
ARGUMENTS = f"Tensor target, Tensor? weight, {OPTIONS}, ScalarType dtype"

#: Returns the loss and stats, see ``row_pair``.
forward = library.define(f"{NAME}_forward(Tensor input, {ARGUMENTS}) -> (Tensor, Tensor)")
#: The gradients of input and target, each empty where it is not needed.
backward = library.define(
    f"{NAME}_backward(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
    f"Tensor stats, {OPTIONS}, bool needs_grad_input, bool needs_grad_target) -> (Tensor, Tensor)"
)
weight_backward = library.define(
    f"{NAME}_weight_backward(Tensor grad_output, Tensor input, Tensor target, Tensor weight, "
    f"Tensor stats, {OPTIONS}) -> Tensor"
)


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
    if label_smoothing > 1:
        raise RuntimeError(
            f"{name}: expected label_smoothing to be at most 1, got {label_smoothing}"
        )


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
    value, _ = direct_forward(input, target, weight, reduction, label_smoothing, result)
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
        return forward(input, target, weight, reduction, label_smoothing, dtype)[0]

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


library.register_fake(forward, forward_fake)


def backward_fake(
    grad_output: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    reduction: int,
    label_smoothing: float,
    needs_grad_input: bool,
    needs_grad_target: bool,
) -> tuple[Tensor, Tensor]:
    check(input, target, weight, reduction, label_smoothing)
    return (
        torch.empty_like(input) if needs_grad_input else input.new_empty(0),
        torch.empty_like(target) if needs_grad_target else target.new_empty(0),
    )


library.register_fake(backward, backward_fake)


def weight_backward_fake(
    grad_output: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    stats: Tensor,
    reduction: int,
    label_smoothing: float,
) -> Tensor:
    check(input, target, weight, reduction, label_smoothing)
    return weight.new_empty(weight.shape)


library.register_fake(weight_backward, weight_backward_fake)


with_grad, with_grad_ = declare_with_grad(NAME, ARGUMENTS, forward_fake)


def setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, target, weight, *ctx.options, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(input, target, weight, output[1])


def forward_vjp(ctx: Any, grad_output: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    input, target, weight, stats = ctx.saved_tensors
    needs_input, needs_target, needs_weight = ctx.needs_input_grad[:3]
    grad_input, grad_target, grad_weight = None, None, None
    if needs_input or needs_target:
        grad_input, grad_target = direct_backward(
            grad_output, input, target, weight, stats, *ctx.options, needs_input, needs_target
        )
    if needs_weight:
        grad_weight = weight_backward(grad_output, input, target, weight, stats, *ctx.options)
    return (
        grad_input if needs_input else None,
        grad_target if needs_target else None,
        grad_weight,
        *(None for _ in ctx.options),
        None,
    )


direct_forward = library.register_autograd(forward, forward_vjp, setup_forward)


def _double_backward(
    ctx: Any, cotangents: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> list[Tensor | None]:
    """The products with respect to grad_output, input, target and weight."""
    grad_output, input, target, weight = ctx.saved_tensors
    dtype = grad_output.dtype

    def torchs(x: Tensor, q: Tensor, w: Tensor | None = None) -> Tensor:
        weight = None if w is None else w.to(dtype)
        return reference(x.to(dtype), q.to(dtype), weight, *ctx.options)

    inputs = (input, target) if weight is None else (input, target, weight)
    products = double_backward(torchs, grad_output, inputs, cotangents[: len(inputs)])
    return [*products, None][:4]


def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    grad_output, input, target, weight, _, *ctx.options, needs_input, needs_target = inputs
    ctx.needs = (needs_input, needs_target)
    ctx.save_for_backward(grad_output, input, target, weight)


def backward_vjp(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    needed = [c if needs else None for c, needs in zip(cotangents, ctx.needs, strict=True)]
    products = _double_backward(ctx, (*needed, None))  # type: ignore[arg-type]
    return (*products, None, *(None for _ in ctx.options), None, None)


direct_backward = library.register_autograd(backward, backward_vjp, setup_backward)


def setup_weight_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad_output, input, target, weight, _, *ctx.options = inputs
    ctx.save_for_backward(grad_output, input, target, weight)


def weight_backward_vjp(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    products = _double_backward(ctx, (None, None, cotangent))
    return (*products, None, *(None for _ in ctx.options))


library.register_autograd(weight_backward, weight_backward_vjp, setup_weight_backward)
