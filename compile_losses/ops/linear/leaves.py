"""The leaf ops of linear cross entropy: schemas, fakes and autograd formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.linear import row_chunks
from compile_losses.ops.linear.arguments import check
from compile_losses.ops.linear.reference import autocast_off, reference
from compile_losses.ops.scale import scale, scale_
from compile_losses.ops.transforms import double_backward
from compile_losses.torch_internals.eager import (
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    retains_graph,
)

ARGUMENTS = (
    "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, "
    "int reduction, SymInt ignore_index, float label_smoothing, float? softcap, float z_loss, "
    "ScalarType dtype"
)
NEEDS = "bool needs_grad_input, bool needs_grad_linear_weight, bool needs_grad_linear_bias"
ARGUMENT_COUNT = 11
#: How many of them are tensors; the rest are options.
TENSORS = 5

#: The leaves take input [rows, hidden] and target [rows]. Gradients that are not needed are empty.
forward = library.define(f"linear_cross_entropy_forward({ARGUMENTS}) -> Tensor")
backward = library.define(
    f"linear_cross_entropy_backward(Tensor grad_output, {ARGUMENTS}, {NEEDS}) "
    "-> (Tensor, Tensor, Tensor)"
)
#: The loss, and the gradients for this grad_output (one number; 1 by default). Differentiable: it
#: is what autograd differentiates, in eager mode and in AOTAutograd's graphs.
with_grad = library.define(
    f"linear_cross_entropy_with_grad({ARGUMENTS}, {NEEDS}, Tensor? grad_output=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
#: The same for reduction none, which the passes put into graphs: grad_output is [rows], or the
#: row_function makes it of each row's loss and of what is known
#: (:mod:`compile_losses.ops.linear.row_function`). Not differentiable.
rows_with_grad = library.define(
    f"linear_cross_entropy_rows_with_grad({ARGUMENTS}, {NEEDS}, Tensor? grad_output, "
    "str row_function, Tensor[] known) -> (Tensor, Tensor, Tensor, Tensor)"
)

library.implement(forward, row_chunks.forward, "CompositeExplicitAutograd")
library.implement(backward, row_chunks.backward, "CompositeExplicitAutograd")
library.implement(with_grad, row_chunks.with_grad, "CompositeExplicitAutograd")
library.implement(rows_with_grad, row_chunks.rows_with_grad, "CompositeExplicitAutograd")


def forward_fake(*arguments: Any) -> Tensor:
    check(*arguments, leaf=True)
    input, _, target, *_, dtype = arguments
    each = arguments[TENSORS] == REDUCTIONS["none"]
    return input.new_empty(target.shape if each else (), dtype=dtype)


def gradients_fake(arguments: tuple[Any, ...], needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
    input, linear_weight, _, linear_bias, *_ = arguments
    return tuple(
        input.new_empty(tensor.shape if needed else 0)
        for tensor, needed in zip((input, linear_weight, linear_bias), needs, strict=True)
    )


def backward_fake(grad_output: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    forward_fake(*rest[:-3])
    return gradients_fake(rest[:-3], rest[-3:])


def with_grad_fake(*rest: Any) -> tuple[Tensor, ...]:
    arguments, needs = rest[:ARGUMENT_COUNT], rest[ARGUMENT_COUNT : ARGUMENT_COUNT + 3]
    return forward_fake(*arguments), *gradients_fake(arguments, needs)


library.register_fake(forward, forward_fake)
library.register_fake(backward, backward_fake)
library.register_fake(with_grad, with_grad_fake)
library.register_fake(rows_with_grad, with_grad_fake)
library.register_not_differentiable(rows_with_grad)


def _save(ctx: Any, arguments: tuple[Any, ...], *more: Tensor) -> None:
    ctx.set_materialize_grads(False)  # for outputs without one they would be as large as weights
    ctx.options = arguments[TENSORS:]
    ctx.save_for_backward(*arguments[:TENSORS], *more)


def _in_place_of_arguments(gradients: Any, needs: Any) -> tuple[Tensor | None, ...]:
    """Gradients of input, linear_weight and linear_bias, in the order of ARGUMENTS."""
    input, linear_weight, linear_bias = (
        gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)
    )
    return input, linear_weight, None, linear_bias, None, *(None for _ in range(6))


def setup_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _save(ctx, inputs)


def forward_vjp(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * ARGUMENT_COUNT
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    gradients = backward(grad_output, *ctx.saved_tensors, *ctx.options, *needs)
    return _in_place_of_arguments(gradients, needs)


library.register_autograd(forward, forward_vjp, setup_forward)


def setup_with_grad(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arguments, needs_input, needs_weight, needs_bias, grad_output = inputs
    if grad_output is not None:
        raise RuntimeError(
            "fused::linear_cross_entropy_with_grad is differentiable for a grad_output of 1 alone"
        )
    ctx.needs = (needs_input, needs_weight, needs_bias)
    _, *gradients = output
    ctx.mark_non_differentiable(*gradients)
    _save(ctx, tuple(arguments), *gradients)


def with_grad_vjp(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * (ARGUMENT_COUNT + 4)
    # Unpacking compares versions: the inputs must not have changed since the gradients were made.
    *tensors, grad_input, grad_weight, grad_bias = ctx.saved_tensors
    gradients: Any = (grad_input, grad_weight, grad_bias)
    if torch.is_grad_enabled():  # create_graph
        gradients = backward(grad_output, *tensors, *ctx.options, *ctx.needs)
    elif _are_ours_to_overwrite(gradients, grad_output):
        for gradient, needed in zip(gradients, ctx.needs, strict=True):
            if needed:
                scale_(gradient, grad_output)
    else:
        gradients = [
            scale(gradient, grad_output) if needed else gradient
            for gradient, needed in zip(gradients, ctx.needs, strict=True)
        ]
    return *_in_place_of_arguments(gradients, ctx.needs), None, None, None, None


def _are_ours_to_overwrite(gradients: tuple[Tensor, ...], grad_output: Tensor) -> bool:
    """Whether this backward is the last to read the saved gradients, which nobody else has.

    Without retain_graph autograd frees them when it returns, and refuses another backward. Tensors
    that are being traced keep to functional ops, from which the graph passes choose.
    """
    if any(type(tensor) is not Tensor for tensor in (*gradients, grad_output)):
        return False
    if is_functorch_wrapped_tensor(grad_output) or is_legacy_batchedtensor(grad_output):
        return False
    if torch.compiler.is_compiling():
        return False
    return not retains_graph()


library.register_autograd(with_grad, with_grad_vjp, setup_with_grad)


def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_output, *arguments, needs_input, needs_weight, needs_bias = inputs
    ctx.needs = (needs_input, needs_weight, needs_bias)
    ctx.mark_non_differentiable(
        *(gradient for gradient, needed in zip(output, ctx.needs, strict=True) if not needed)
    )
    _save(ctx, tuple(arguments), grad_output)


def backward_vjp(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    if all(cotangent is None for cotangent in cotangents):
        return (None,) * (ARGUMENT_COUNT + 4)
    input, linear_weight, target, linear_bias, weight, grad_output = ctx.saved_tensors
    needs = ctx.needs
    inputs = [input, linear_weight] + ([] if linear_bias is None else [linear_bias])

    def loss(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None = None) -> Tensor:
        return reference(input, linear_weight, target, linear_bias, weight, *ctx.options)

    wanted = [c if needed else None for c, needed in zip(cotangents, needs, strict=True)]
    with autocast_off(input):
        products = double_backward(loss, grad_output, inputs, wanted[: len(inputs)])
    of_grad_output, *of_inputs = (*products, None) if linear_bias is None else products
    return of_grad_output, *_in_place_of_arguments(of_inputs, (True,) * 3), None, None, None


library.register_autograd(backward, backward_vjp, setup_backward)
