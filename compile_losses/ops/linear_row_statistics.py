"""Statistics of the rows of a linear layer's output, without ever holding that output.

What losses of tokens and their metrics read of a row of logits are a few numbers
(:mod:`compile_losses.ops.row_statistics`): the negative log-likelihood of a class, the logsumexp,
the entropy, the sum, the maximum and where that is. Log-probabilities, PPO's and GRPO's losses with
an entropy, cross entropies with a z-loss, token accuracy and so on are made of them by row. These
ops compute all of ``linear(input, linear_weight, linear_bias)``, a chunk of rows at a time:

- ``fused::linear_row_statistics_forward``: the statistics, [rows] each.
- ``fused::linear_row_statistics_backward``: the gradients, from the logits computed again.
- ``fused::linear_row_statistics_rows_with_grad``: both; the row_function makes the gradients of the
  first four of all six statistics and of what is known
  (``compile_losses.ops.linear.row_function``). Not differentiable.

Input is [rows, hidden], linear_weight [classes, hidden], linear_bias [classes], in one floating
dtype; target, int64 [rows], may be None where no class is picked. Statistics are float32, and
float64 for float64. A row whose target is ignore_index has a negative log-likelihood of 0. With a
softcap the logits become ``softcap * tanh(logits / softcap)``, not rounded to their own dtype.

Raises:
    RuntimeError: shapes, dtypes or devices that don't go together; a softcap that is not positive.
    IndexError: on the CPU, a target outside [0, classes) that is not ignore_index. On CUDA the
        kernel stops with a device-side assertion.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library
from compile_losses.ops import checks, row_statistics
from compile_losses.ops.checks import accumulation_type, describe
from compile_losses.ops.linear.arguments import check_linear
from compile_losses.ops.linear.leaves import NEEDS, gradients_fake
from compile_losses.ops.linear.reference import autocast_off
from compile_losses.ops.linear.row_chunks import Problem, results, results_with_gradients
from compile_losses.ops.linear.row_function import RowFunction, known_gradients
from compile_losses.ops.linear.row_statistics import COUNT, DIFFERENTIABLE, RowStatistics
from compile_losses.ops.transforms import double_backward

NAME = "linear_row_statistics"
ARGUMENTS = (
    "Tensor input, Tensor linear_weight, Tensor? target, Tensor? linear_bias, "
    "SymInt ignore_index, float? softcap"
)
_GRADIENTS = "Tensor? grad_nll, Tensor? grad_logsumexp, Tensor? grad_entropy, Tensor? grad_total"
_STATISTICS = ", ".join(["Tensor"] * COUNT)

forward = library.define(f"{NAME}_forward({ARGUMENTS}) -> ({_STATISTICS})")
backward = library.define(
    f"{NAME}_backward({_GRADIENTS}, {ARGUMENTS}, {NEEDS}) -> (Tensor, Tensor, Tensor)"
)
rows_with_grad = library.define(
    f"{NAME}_rows_with_grad({ARGUMENTS}, {NEEDS}, str row_function, Tensor[] known) "
    f"-> ({_STATISTICS}, Tensor, Tensor, Tensor)"
)


def check(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    linear_bias: Tensor | None,
    ignore_index: int,
    softcap: float | None,
) -> None:
    checks.check_floating(NAME, input=input, linear_weight=linear_weight)
    checks.check_same_device(
        NAME, input, linear_weight=linear_weight, target=target, linear_bias=linear_bias
    )
    check_linear(NAME, ("input", "linear_weight", "linear_bias"), input, linear_weight, linear_bias)
    if input.dim() != 2 or linear_weight.dim() != 2:
        raise RuntimeError(
            f"{NAME}: expected input of shape [rows, hidden] and linear_weight of shape "
            f"[classes, hidden], got {list(input.shape)} and {list(linear_weight.shape)}"
        )
    if target is not None and (
        target.dtype != torch.int64 or not checks.same_shape(target.shape, input.shape[:1])
    ):
        raise RuntimeError(
            f"{NAME}: expected target to be int64 of shape {list(input.shape[:1])}, "
            f"got {describe(target)}"
        )
    checks.check_softcap(NAME, softcap)


def _problem(arguments: tuple[Any, ...], row_function: RowFunction | None = None) -> Problem:
    check(*arguments)
    input, linear_weight, target, linear_bias, ignore_index, softcap = arguments
    dtype = accumulation_type(input.dtype)
    losses = RowStatistics(input, target, ignore_index, softcap, dtype, row_function)
    return Problem(input, linear_weight, linear_bias, losses)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    with autocast_off(arguments[0]):
        return results(_problem(arguments))


def _backward(*rest: Any) -> tuple[Tensor, ...]:
    gradients, arguments, needs = [*rest[:DIFFERENTIABLE]], rest[DIFFERENTIABLE:-3], rest[-3:]
    if arguments[2] is None:  # the gradient of a class that nobody picks is None, or empty
        gradients[0] = None
    with autocast_off(arguments[0]):
        problem = _problem(arguments, known_gradients(gradients, COUNT))
        return results_with_gradients(problem, needs)[COUNT:]


def _rows_with_grad(*rest: Any) -> tuple[Tensor, ...]:
    *arguments, row_function, known = rest
    needs: Any = tuple(arguments[-3:])
    with autocast_off(arguments[0]):
        problem = _problem(tuple(arguments[:-3]), RowFunction(row_function, tuple(known)))
        return results_with_gradients(problem, needs)


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    check(*arguments)
    input, _, target, *_ = arguments

    def statistic(dtype: torch.dtype, *, there: bool = True) -> Tensor:
        return input.new_empty(input.shape[:1] if there else 0, dtype=dtype)

    dtype = accumulation_type(input.dtype)
    nll, *others = (statistic(dtype, there=i > 0 or target is not None) for i in range(COUNT - 1))
    return nll, *others, statistic(torch.int64)


def _backward_fake(*rest: Any) -> tuple[Tensor, ...]:
    arguments = rest[DIFFERENTIABLE:-3]
    _forward_fake(*arguments)
    return gradients_fake(arguments, rest[-3:])


def _rows_with_grad_fake(*rest: Any) -> tuple[Tensor, ...]:
    arguments, needs = rest[:-5], rest[-5:-2]
    return *_forward_fake(*arguments), *gradients_fake(arguments, needs)


for _op, _kernel, _fake in (
    (forward, _forward, _forward_fake),
    (backward, _backward, _backward_fake),
    (rows_with_grad, _rows_with_grad, _rows_with_grad_fake),
):
    library.implement(_op, _kernel, "CompositeExplicitAutograd")
    library.register_fake(_op, _fake)
library.register_not_differentiable(rows_with_grad)


def reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    linear_bias: Tensor | None,
    ignore_index: int,
    softcap: float | None,
) -> tuple[Tensor | None, ...]:
    """The differentiable statistics in torch's own ops, over all logits."""
    logits = F.linear(input, linear_weight, linear_bias)
    return row_statistics.reference(logits, target, ignore_index, softcap)


def _save(ctx: Any, arguments: tuple[Any, ...], *more: Tensor | None) -> None:
    # For outputs without a gradient one would be made as large as a weight.
    ctx.set_materialize_grads(False)
    *tensors, ctx.ignore_index, ctx.softcap = arguments
    ctx.save_for_backward(*tensors, *more)


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs)
    ctx.mark_non_differentiable(*output[DIFFERENTIABLE:])


def _forward_vjp(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    given = gradients[:DIFFERENTIABLE]
    if all(gradient is None for gradient in given):
        return (None,) * 6
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    found = backward(*given, *ctx.saved_tensors, ctx.ignore_index, ctx.softcap, *needs)
    return _in_place_of_arguments(found, needs)


def _in_place_of_arguments(gradients: Any, needs: Any) -> tuple[Tensor | None, ...]:
    input, linear_weight, linear_bias = (
        gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)
    )
    return input, linear_weight, None, linear_bias, None, None


library.register_autograd(forward, _forward_vjp, _setup_forward)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    gradients, arguments, ctx.needs = (
        inputs[:DIFFERENTIABLE],
        inputs[DIFFERENTIABLE:-3],
        inputs[-3:],
    )
    unneeded = [g for g, needed in zip(output, ctx.needs, strict=True) if not needed]
    ctx.mark_non_differentiable(*unneeded)
    _save(ctx, arguments, *gradients)


def _backward_vjp(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """By torch's formulas, for the sum of the statistics times their gradients."""
    count = DIFFERENTIABLE + 9
    wanted = [c if needed else None for c, needed in zip(cotangents, ctx.needs, strict=True)]
    if all(cotangent is None for cotangent in wanted):
        return (None,) * count
    input, linear_weight, target, linear_bias, *gradients = ctx.saved_tensors
    given = [i for i, gradient in enumerate(gradients) if gradient is not None]
    layer = [input, linear_weight] + ([] if linear_bias is None else [linear_bias])

    def total(*tensors: Tensor) -> Tensor:
        factors, (input, weight, *bias) = tensors[: len(given)], tensors[len(given) :]
        found = reference(
            input, weight, target, bias[0] if bias else None, ctx.ignore_index, ctx.softcap
        )
        products = [
            (statistic * factor).sum()
            for statistic, factor in zip((found[i] for i in given), factors, strict=True)
            if statistic is not None
        ]
        return torch.stack(products).sum()

    factors = [gradients[i] for i in given]
    one = input.new_ones((), dtype=accumulation_type(input.dtype))
    with autocast_off(input):
        _, *products = double_backward(
            total, one, [*factors, *layer], [None] * len(given) + wanted[: len(layer)]
        )
    of_gradients: list[Tensor | None] = [None] * DIFFERENTIABLE
    for i, product in zip(given, products, strict=False):
        of_gradients[i] = product
    of_layer = [*products[len(given) :], *[None] * (linear_bias is None)]
    return *of_gradients, *_in_place_of_arguments(of_layer, (True,) * 3), None, None, None


library.register_autograd(backward, _backward_vjp, _setup_backward)
