"""The leaf ops of a loss of a linear layer's output: schemas, fakes and autograd formulas.

``fused::X_forward``         the loss
``fused::X_backward``        the gradients, from the logits computed again
``fused::X_with_grad``       the loss, and the gradients for a grad_output of one number, or for 1.
                             Differentiable: it is what autograd differentiates, in eager mode and
                             in AOTAutograd's graphs
``fused::X_rows_with_grad``  the same for reduction none, which the passes put into graphs: the
                             row_function makes the grad_output of each row of its loss and of what
                             is known (:mod:`compile_losses.ops.linear.row_function`).
                             Differentiable in eager mode, where all are 1 and only input needs a
                             gradient (:mod:`compile_losses.ops.linear.unit_gradients`)

They take input [rows, hidden], linear_weight [classes, hidden] and, as their fourth argument,
linear_bias: these have gradients, and no other argument has. Gradients that are not needed are
empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.linear.reference import autocast_off
from compile_losses.ops.linear.row_chunks import Problem, RowChunks
from compile_losses.ops.linear.unit_gradients import (
    NO_MORE,
    check_unit,
    has_unit_gradients,
    scaled_by_row,
    unit_function,
)
from compile_losses.ops.scale import scale, scale_
from compile_losses.ops.transforms import double_backward
from compile_losses.torch_internals.eager import (
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    retains_graph,
)
from compile_losses.torch_internals.ops import OpOverload

NEEDS = "bool needs_grad_input, bool needs_grad_linear_weight, bool needs_grad_linear_bias"


@dataclass(frozen=True)
class Leaves:
    """The leaf ops that a public op calls, with positional arguments."""

    forward: OpOverload[..., Any]
    with_grad: OpOverload[..., Any]
    rows_with_grad: OpOverload[..., Any]

    def __call__(self, arguments: tuple[Any, ...], *, by_row: bool) -> Tensor:
        """The loss of these arguments, computed with its gradients if that can be.

        Args:
            by_row: whether the reduction is none.
        """
        input, linear_weight, _, linear_bias, *_ = arguments
        if by_row:
            if not has_unit_gradients(input, linear_weight, linear_bias):
                return self.forward(*arguments)
            loss, *_ = self.rows_with_grad(*arguments, True, False, False, unit_function(), [])
            return loss
        needs = [t is not None and t.requires_grad for t in (input, linear_weight, linear_bias)]
        if not (torch.is_grad_enabled() and any(needs)) or input.dtype == torch.float16:
            return self.forward(*arguments)
        loss, *_ = self.with_grad(*arguments, *needs)
        return loss


def declare_leaves(
    name: str,
    arguments: str,
    *,
    problem: Callable[..., Problem],
    check: Callable[..., None],
    reference: Callable[..., Tensor],
) -> Leaves:
    """Declares the leaf ops of the loss ``name``.

    Args:
        arguments: of all of them, as their schemas spell them: tensors, then the reduction and
            other options, the last of which is the loss's dtype.
        problem: their kernels' problem, from these arguments and a grad_output.
        check: raises for bad arguments.
        reference: the loss in torch's own ops, of these arguments.
    """
    count, tensors = arguments.count(",") + 1, arguments.count("Tensor")
    nothing = (None,) * count
    forward = library.define(f"{name}_forward({arguments}) -> Tensor")
    backward = library.define(
        f"{name}_backward(Tensor grad_output, {arguments}, {NEEDS}) -> (Tensor, Tensor, Tensor)"
    )
    with_grad = library.define(
        f"{name}_with_grad({arguments}, {NEEDS}, Tensor? grad_output=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    )
    rows_with_grad = library.define(
        f"{name}_rows_with_grad({arguments}, {NEEDS}, str row_function, Tensor[] known) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    )
    chunks = RowChunks(name, count, tensors, problem)
    library.implement(forward, chunks.forward, "CompositeExplicitAutograd")
    library.implement(backward, chunks.backward, "CompositeExplicitAutograd")
    library.implement(with_grad, chunks.with_grad, "CompositeExplicitAutograd")
    library.implement(rows_with_grad, chunks.rows_with_grad, "CompositeExplicitAutograd")

    def forward_fake(*arguments: Any) -> Tensor:
        check(*arguments)
        input, *_, dtype = arguments
        each = arguments[tensors] == REDUCTIONS["none"]
        return input.new_empty(input.shape[:1] if each else (), dtype=dtype)

    def backward_fake(grad_output: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        forward_fake(*rest[:count])
        return gradients_fake(rest[:count], rest[count:])

    def with_grad_fake(*rest: Any) -> tuple[Tensor, ...]:
        arguments, needs = rest[:count], rest[count : count + 3]
        return forward_fake(*arguments), *gradients_fake(arguments, needs)

    library.register_fake(forward, forward_fake)
    library.register_fake(backward, backward_fake)
    library.register_fake(with_grad, with_grad_fake)
    library.register_fake(rows_with_grad, with_grad_fake)

    def save(ctx: Any, arguments: tuple[Any, ...], *more: Tensor) -> None:
        # Otherwise an output without a gradient would get one of zeros, as large as a weight.
        ctx.set_materialize_grads(False)
        ctx.options = arguments[tensors:]
        ctx.save_for_backward(*arguments[:tensors], *more)

    def in_place_of_arguments(gradients: Any, needs: Any) -> tuple[Tensor | None, ...]:
        """Gradients of input, linear_weight and linear_bias, in the order of the arguments."""
        input, linear_weight, linear_bias = (
            gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)
        )
        return input, linear_weight, None, linear_bias, *nothing[4:]

    def setup_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        save(ctx, inputs)

    def forward_vjp(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return nothing
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
        gradients = backward(grad_output, *ctx.saved_tensors, *ctx.options, *needs)
        return in_place_of_arguments(gradients, needs)

    library.register_autograd(forward, forward_vjp, setup_forward)

    def setup_with_grad(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *arguments, needs_input, needs_weight, needs_bias, grad_output = inputs
        if grad_output is not None:
            raise RuntimeError(
                f"fused::{name}_with_grad is differentiable for a grad_output of 1 alone"
            )
        ctx.needs = (needs_input, needs_weight, needs_bias)
        _, *gradients = output
        ctx.mark_non_differentiable(*gradients)
        save(ctx, tuple(arguments), *gradients)

    def with_grad_vjp(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (*nothing, *(None,) * 4)
        # Unpacking compares versions: the inputs must not have changed since the gradients were
        # made.
        *tensors, grad_input, grad_weight, grad_bias = ctx.saved_tensors
        gradients: Any = (grad_input, grad_weight, grad_bias)
        if torch.is_grad_enabled():  # create_graph
            gradients = backward(grad_output, *tensors, *ctx.options, *ctx.needs)
        elif are_ours_to_overwrite(gradients, grad_output):
            for gradient, needed in zip(gradients, ctx.needs, strict=True):
                if needed:
                    scale_(gradient, grad_output)
        else:
            gradients = [
                scale(gradient, grad_output) if needed else gradient
                for gradient, needed in zip(gradients, ctx.needs, strict=True)
            ]
        return *in_place_of_arguments(gradients, ctx.needs), None, None, None, None

    library.register_autograd(with_grad, with_grad_vjp, setup_with_grad)

    def setup_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *arguments, needs_input, needs_weight, needs_bias, text, _ = inputs
        check_unit(name, (needs_input, needs_weight, needs_bias), text, unit_function())
        _, *gradients = output
        ctx.mark_non_differentiable(*gradients)
        save(ctx, tuple(arguments), gradients[0])

    def rows_vjp(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (*nothing, *NO_MORE)
        *tensors, unit = ctx.saved_tensors
        needs = (True, False, False)
        if torch.is_grad_enabled():  # create_graph
            gradients = backward(grad_output, *tensors, *ctx.options, *needs)
        else:
            overwrites = are_ours_to_overwrite((unit,), grad_output)
            gradients = (scaled_by_row(unit, grad_output, overwrites=overwrites), None, None)
        return *in_place_of_arguments(gradients, needs), *NO_MORE

    library.register_autograd(rows_with_grad, rows_vjp, setup_rows)

    def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad_output, *arguments, needs_input, needs_weight, needs_bias = inputs
        ctx.needs = (needs_input, needs_weight, needs_bias)
        ctx.mark_non_differentiable(
            *(gradient for gradient, needed in zip(output, ctx.needs, strict=True) if not needed)
        )
        save(ctx, tuple(arguments), grad_output)

    def backward_vjp(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(cotangent is None for cotangent in cotangents):
            return (*nothing, *(None,) * 4)
        input, linear_weight, target, linear_bias, *others, grad_output = ctx.saved_tensors
        inputs = [input, linear_weight] + ([] if linear_bias is None else [linear_bias])

        def loss(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None = None) -> Tensor:
            return reference(input, linear_weight, target, linear_bias, *others, *ctx.options)

        wanted = [c if needed else None for c, needed in zip(cotangents, ctx.needs, strict=True)]
        with autocast_off(input):
            products = double_backward(loss, grad_output, inputs, wanted[: len(inputs)])
        of_grad_output, *of_inputs = (*products, None) if linear_bias is None else products
        return of_grad_output, *in_place_of_arguments(of_inputs, (True,) * 3), None, None, None

    library.register_autograd(backward, backward_vjp, setup_backward)
    return Leaves(forward, with_grad, rows_with_grad)


def gradients_fake(arguments: tuple[Any, ...], needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
    input, linear_weight, _, linear_bias, *_ = arguments
    return tuple(
        input.new_empty(tensor.shape if needed else 0)
        for tensor, needed in zip((input, linear_weight, linear_bias), needs, strict=True)
    )


def are_ours_to_overwrite(gradients: tuple[Tensor, ...], grad_output: Tensor) -> bool:
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
