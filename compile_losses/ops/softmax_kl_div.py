"""Kullback-Leibler divergence of two softmaxes, for distillation (Hinton, Vinyals, Dean,
Distilling the Knowledge in a Neural Network, 2015).

``torch.ops.fused.softmax_kl_div(input, target, reduction=3, *, temperature=1.0, dim=-1,
dtype=None)`` is KL(softmax(target / temperature) || softmax(input / temperature)) along ``dim``: it
equals ``F.kl_div(F.log_softmax(input / T, dim), F.softmax(target / T, dim))``, not multiplied by
T^2. Input and target are logits of one shape, of any strides and floating dtypes. Reductions are
``kl_div``'s: 3 (batchmean, the sum over ``input.size(0)``), 1 (mean: over all classes of all rows),
2 (sum); with 0 (none) the loss of each row, the shape without ``dim``.

Both arguments are differentiable, so that swapping them gives the reverse divergence. Both rows are
read once in the forward and once in the backward; probabilities are never stored, and one that
underflows to 0 has no nan in its gradient.

Raises:
    RuntimeError: input and target differ in shape or device; temperature is not positive.
    IndexError: dim is out of range.
    ValueError: unknown reduction.
    NotImplementedError: logits that are not floating point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library
from compile_losses.distributed import mesh_of
from compile_losses.eager import plain
from compile_losses.ops import checks
from compile_losses.ops.row_pair import statistics
from compile_losses.ops.transforms import double_backward, needs_torch
from compile_losses.ops.with_grad import declare_with_grad

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "softmax_kl_div"
OPTIONS = "int reduction, float temperature, int dim"
ARGUMENTS = f"Tensor target, {OPTIONS}, ScalarType dtype"

public = library.define(
    f"{NAME}(Tensor input, Tensor target, int reduction=3, *, float temperature=1.0, int dim=-1, "
    "ScalarType? dtype=None) -> Tensor"
)
#: Returns the loss and stats, see ``row_pair``.
forward = library.define(f"{NAME}_forward(Tensor input, {ARGUMENTS}) -> (Tensor, Tensor)")
#: The gradients of input and target, each empty where it is not needed.
backward = library.define(
    f"{NAME}_backward(Tensor grad_output, Tensor input, Tensor target, Tensor stats, {OPTIONS}, "
    "bool needs_grad_input, bool needs_grad_target) -> (Tensor, Tensor)"
)


def reference(
    input: Tensor, target: Tensor, reduction: int, temperature: float, dim: int
) -> Tensor:
    """In torch's ops, and in logarithms: with probabilities an underflow would make target's
    gradient nan."""
    log_p = F.log_softmax(input / temperature, dim)
    log_q = F.log_softmax(target / temperature, dim)
    # A logit of -inf: probability 0 adds 0, and its gradient is 0.
    impossible = target == -torch.inf
    finite = log_q.masked_fill(impossible, 0.0)
    each = log_q.exp() * (finite - log_p)
    name = checks.reduction_name(reduction)
    if name == "none":
        return each.sum(dim)
    if name == "mean":
        return each.mean()
    return each.sum() if name == "sum" else each.sum() / input.size(0)


def check(input: Tensor, target: Tensor, reduction: int, temperature: float, dim: int) -> None:
    checks.check_reduction(NAME, reduction, batchmean=True)
    checks.check_floating(NAME, input=input, target=target)
    checks.check_same_device(NAME, input, target=target)
    if target.shape != input.shape:
        raise RuntimeError(
            f"{NAME}: expected target to have input's shape {list(input.shape)}, "
            f"got {list(target.shape)}"
        )
    if not -input.dim() <= dim < input.dim():
        raise IndexError(
            f"{NAME}: expected dim to be a dimension of input of shape {list(input.shape)}, "
            f"got {dim}"
        )
    if not temperature > 0:  # nan is refused, too
        raise RuntimeError(f"{NAME}: expected temperature to be positive, got {temperature}")


def public_kernel(
    input: Tensor,
    target: Tensor,
    reduction: int = 3,
    *,
    temperature: float = 1.0,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if dtype is None and input.dtype == target.dtype and plain(input, target):
        check(input, target, reduction, temperature, dim)
        loss, _ = direct_forward.of_plain(input, target, reduction, temperature, dim, input.dtype)
        return loss
    mesh = mesh_of(NAME, input=input, target=target)
    check(input, target, reduction, temperature, dim)
    dtype = checks.loss_dtype(dtype, input, target)
    if mesh is not None:
        return _of_dtensors(mesh, input, target, reduction, temperature, dim % input.dim(), dtype)
    if needs_torch(input, target):
        return reference(input.to(dtype), target.to(dtype), reduction, temperature, dim)
    loss, _ = direct_forward(input, target, reduction, temperature, dim, dtype)
    return loss


def _of_dtensors(
    mesh: DeviceMesh,
    input: Tensor,
    target: Tensor,
    reduction: int,
    temperature: float,
    dim: int,
    dtype: torch.dtype,
) -> Tensor:
    from compile_losses.distributed.elementwise import elementwise

    def loss(input: Tensor, target: Tensor, reduction: int, dtype: torch.dtype) -> Tensor:
        return forward(input, target, reduction, temperature, dim, dtype)[0]

    divisors = {"mean": input.numel(), "batchmean": input.size(0)}
    return elementwise(
        NAME,
        mesh,
        loss,
        {"input": input, "target": target},
        input.shape,
        reduction,
        dtype,
        divisors.get(checks.reduction_name(reduction)),
        classes=dim,
    )


library.implement_public(public, public_kernel)


def forward_fake(
    input: Tensor,
    target: Tensor,
    reduction: int,
    temperature: float,
    dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    check(input, target, reduction, temperature, dim)
    rows = list(input.shape)
    del rows[dim]
    each = reduction == checks.REDUCTIONS["none"]
    return input.new_empty(rows if each else (), dtype=dtype), statistics(input, target, rows)


library.register_fake(forward, forward_fake)


def backward_fake(
    grad_output: Tensor,
    input: Tensor,
    target: Tensor,
    stats: Tensor,
    reduction: int,
    temperature: float,
    dim: int,
    needs_grad_input: bool,
    needs_grad_target: bool,
) -> tuple[Tensor, Tensor]:
    check(input, target, reduction, temperature, dim)
    return (
        torch.empty_like(input) if needs_grad_input else input.new_empty(0),
        torch.empty_like(target) if needs_grad_target else target.new_empty(0),
    )


library.register_fake(backward, backward_fake)


with_grad, with_grad_ = declare_with_grad(NAME, ARGUMENTS, forward_fake)


def setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, target, *ctx.options, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(input, target, output[1])


def forward_vjp(ctx: Any, grad_output: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    input, target, stats = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    grad_input, grad_target = direct_backward(
        grad_output, input, target, stats, *ctx.options, *needs
    )
    options = (None, None, None, None)
    return (grad_input if needs[0] else None, grad_target if needs[1] else None, *options)


direct_forward = library.register_autograd(forward, forward_vjp, setup_forward)


def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    grad_output, input, target, _, *ctx.options, needs_input, needs_target = inputs
    ctx.needs = (needs_input, needs_target)
    ctx.save_for_backward(grad_output, input, target)


def backward_vjp(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    grad_output, input, target = ctx.saved_tensors
    dtype = grad_output.dtype
    products = double_backward(
        lambda x, t: reference(x.to(dtype), t.to(dtype), *ctx.options),
        grad_output,
        (input, target),
        [c if needed else None for c, needed in zip(cotangents, ctx.needs, strict=True)],
    )
    return (*products, None, *(None for _ in ctx.options), None, None)


direct_backward = library.register_autograd(backward, backward_vjp, setup_backward)
