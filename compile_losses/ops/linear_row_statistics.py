"""Statistics of the rows of a linear layer's output, without ever holding that output.

What losses of tokens and their metrics read of a row of logits are a few numbers
(:mod:`compile_losses.ops.row_statistics`): the negative log-likelihood of a class, the logsumexp,
the entropy, the sum, the maximum and where that is. Log-probabilities, PPO's and GRPO's losses with
an entropy, cross entropies with a z-loss, token accuracy and so on are made of them by row. So are
sums of a cross entropy and the divergence from a teacher's row, the seventh number, and losses of
several classes of each row, such as the distillation of a teacher's likeliest classes. These ops
compute all of ``linear(input, linear_weight, linear_bias)``, a chunk of rows at a time:

- ``fused::linear_row_statistics_forward``: the statistics, [rows] each: nll, logsumexp, entropy,
  total, divergence, log_squares, maximum and argmax; after the divergence the log-probabilities of
  picks, [rows, K].
- ``fused::linear_row_statistics_backward``: the gradients, from the logits computed again.
- ``fused::linear_row_statistics_rows_with_grad``: both; the row_function makes the gradients of the
  first six of all nine statistics and of what is known
  (``compile_losses.ops.linear.row_function``). Differentiable in eager mode, where the gradient of
  nll is 1 and only input needs one (``compile_losses.ops.linear.unit_gradients``).

Input is [rows, hidden], linear_weight [classes, hidden], linear_bias [classes], in one floating
dtype; target, int64 [rows], may be None where no class is picked, and so may picks, int64 [rows,
K], K classes of each row in any order, equal ones too (:mod:`compile_losses.ops.row_picks`).
Statistics are float32, and float64 for float64. A row whose target is ignore_index has a negative
log-likelihood of 0. All logits are multiplied by the scale in the product, before they are rounded
to their dtype. With a softcap the logits become ``softcap * tanh(logits / softcap)``, not
rounded to their own dtype.

With a divergence there is a teacher: logits of [rows, classes], or with teacher_weight, [classes,
teacher's hidden], and teacher_bias the input of a linear layer, of which a chunk of logits is
computed at a time, with a soft-cap of its own. For p = softmax(logits / temperature) and q that of
the teacher's it is, by row:

- ``kl``: KL(q || p).
- ``reverse_kl``: KL(p || q).
- ``cross_entropy``: that of p with the probabilities q, KL(q || p) and the entropy of q; of a
  temperature of 1 alone.
- ``js``: ``beta KL(q || m) + (1 - beta) KL(p || m)``, m = ``(1 - beta) p + beta q``.
- ``finite_kl``, ``finite_reverse_kl``, ``finite_cross_entropy``: the first three without the terms
  of infinite logits (:mod:`compile_losses.ops.softmax_finite_kl_div`), of any temperature.

The teacher has no gradient. With ``squares`` there is ``log_squares``, ``log(sum(p ** 2))`` of p =
softmax(logits), without a gradient. Statistics that nobody asks for are empty: the divergence
without one, the log-probabilities without picks, log_squares without squares.

Raises:
    RuntimeError: shapes, dtypes or devices that don't go together; a softcap or a temperature that
        is not positive; a beta that is not between 0 and 1; a teacher without a divergence, or a
        divergence without a teacher; a teacher's bias or soft-cap without its weight.
    ValueError: an unknown divergence.
    IndexError: on the CPU, a target outside [0, classes) that is not ignore_index, or a pick
        outside [0, classes). On CUDA the kernel stops with a device-side assertion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library
from compile_losses.ops import (
    checks,
    row_picks,
    row_statistics,
    softmax_finite_kl_div,
    softmax_js_div,
    softmax_kl_div,
)
from compile_losses.ops.checks import accumulation_type, describe
from compile_losses.ops.linear.arguments import check_linear
from compile_losses.ops.linear.divergence import check_layers
from compile_losses.ops.linear.leaf_ops import NEEDS, are_ours_to_overwrite, gradients_fake
from compile_losses.ops.linear.reference import autocast_off
from compile_losses.ops.linear.row_chunks import Problem, results, results_with_gradients
from compile_losses.ops.linear.row_divergences import NONE, Pair, TeacherLogits
from compile_losses.ops.linear.row_function import RowFunction, known_gradients
from compile_losses.ops.linear.row_statistics import (
    COUNT,
    DIFFERENTIABLE,
    DIVERGENCE,
    LOG_PROBS,
    LOG_SQUARES,
    NLL,
    RowStatistics,
)
from compile_losses.ops.linear.unit_gradients import (
    NO_MORE,
    check_unit,
    has_unit_gradients,
    scaled_by_row,
    unit_function,
)
from compile_losses.ops.softmax_divergence import check_temperature
from compile_losses.ops.softmax_js_div import check as check_beta
from compile_losses.ops.transforms import double_backward

NAME = "linear_row_statistics"
ARGUMENTS = (
    "Tensor input, Tensor linear_weight, Tensor? target, Tensor? linear_bias, Tensor? picks, "
    "Tensor? teacher, Tensor? teacher_weight, Tensor? teacher_bias, SymInt ignore_index, "
    "float? softcap, str? divergence, float beta, float temperature, float? teacher_softcap, "
    "bool squares, float scale"
)
_COUNT, _TENSORS = ARGUMENTS.count(",") + 1, ARGUMENTS.count("Tensor")
_GRADIENTS = (
    "Tensor? grad_nll, Tensor? grad_logsumexp, Tensor? grad_entropy, Tensor? grad_total, "
    "Tensor? grad_divergence, Tensor? grad_log_probs"
)
#: The names of the arguments of a teacher.
TEACHER = ("teacher", "teacher_weight", "teacher_bias")
#: Which of the arguments have gradients, and which are the picks.
_LAYER, _PICKS = (0, 1, 3), 4

#: The ops that compute a divergence, whether their first row is the teacher's, and their own
#: options but beta.
DIVERGENCES: dict[str, tuple[str, bool, tuple[Any, ...]]] = {
    "kl": ("softmax_kl_div", False, ()),
    "cross_entropy": ("softmax_kl_div", False, ()),
    "reverse_kl": ("softmax_kl_div", True, ()),
    "js": ("softmax_js_div", False, ()),
    "finite_kl": ("softmax_finite_kl_div", False, (True,)),
    "finite_cross_entropy": ("softmax_finite_kl_div", False, (False,)),
    "finite_reverse_kl": ("softmax_finite_kl_div", True, (True,)),
}
_STATISTICS = ", ".join(["Tensor"] * COUNT)

forward = library.define(f"{NAME}_forward({ARGUMENTS}) -> ({_STATISTICS})")
backward = library.define(
    f"{NAME}_backward({_GRADIENTS}, {ARGUMENTS}, {NEEDS}) -> (Tensor, Tensor, Tensor)"
)
rows_with_grad = library.define(
    f"{NAME}_rows_with_grad({ARGUMENTS}, {NEEDS}, str row_function, Tensor[] known) "
    f"-> ({_STATISTICS}, Tensor, Tensor, Tensor)"
)


def in_order(
    input: Any,
    linear_weight: Any,
    target: Any,
    linear_bias: Any,
    ignore_index: Any,
    softcap: Any,
    teacher: tuple[Any, Any, Any] = (None, None, None),
    divergence: str | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_softcap: float | None = None,
    *,
    picks: Any = None,
    squares: bool = False,
    scale: float = 1.0,
) -> tuple[Any, ...]:
    """Those of the ops in their order, without a teacher unless one is given."""
    tensors = (input, linear_weight, target, linear_bias, picks, *teacher)
    options = (ignore_index, softcap, divergence, beta, temperature, teacher_softcap)
    return *tensors, *options, squares, scale


def check(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    linear_bias: Tensor | None,
    picks: Tensor | None,
    teacher: Tensor | None,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    divergence: str | None,
    beta: float,
    temperature: float,
    teacher_softcap: float | None,
    *_: Any,
) -> None:
    checks.check_floating(NAME, input=input, linear_weight=linear_weight)
    checks.check_same_device(
        NAME,
        input,
        linear_weight=linear_weight,
        target=target,
        linear_bias=linear_bias,
        picks=picks,
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
    if picks is not None:
        row_picks.check(NAME, picks, input.shape[0])
    checks.check_softcap(NAME, softcap)
    if (teacher is None) != (divergence is None):
        raise RuntimeError(
            f"{NAME}: expected a teacher and a divergence or neither, "
            f"got {teacher if teacher is None else describe(teacher)} and {divergence}"
        )
    if teacher is None:
        return
    if divergence not in DIVERGENCES:
        expected = ", ".join(DIVERGENCES)
        raise ValueError(f"{NAME}: expected divergence to be one of {expected}, got {divergence}")
    checks.check_softcap(NAME, teacher_softcap, "teacher_softcap")
    if teacher_softcap is not None and teacher_weight is None:
        raise RuntimeError(f"{NAME}: expected teacher_softcap only with teacher_weight")
    check_temperature(NAME, temperature)
    if divergence == "cross_entropy" and temperature != 1:
        raise RuntimeError(
            f"{NAME}: expected a temperature of 1 with cross_entropy, got {temperature}"
        )
    if divergence == "js":
        check_beta(NAME, beta)
    of_teacher = (teacher, teacher_weight, teacher_bias)
    check_layers(NAME, (input, linear_weight, linear_bias), of_teacher, TEACHER)


def pair_of(divergence: str | None, beta: float, temperature: float) -> Pair | None:
    """The op that computes a divergence, with its options."""
    if divergence is None:
        return None
    name, reverse, own = DIVERGENCES[divergence]
    return Pair(name, reverse, (*own, *[beta] * (divergence == "js"), temperature))


def _problem(arguments: tuple[Any, ...], row_function: RowFunction | None = None) -> Problem:
    check(*arguments)
    input, linear_weight, target, linear_bias, picks, *of_teacher = arguments[:_TENSORS]
    ignore_index, softcap, *divergence, teacher_softcap, squares, scale = arguments[_TENSORS:]
    if picks is not None:
        row_picks.check_bounds(NAME, picks, linear_weight.shape[0])
    teacher = None
    if of_teacher[0] is not None:
        logits, weight, bias = of_teacher
        teacher = TeacherLogits(logits, weight, bias, teacher_softcap)
    losses = RowStatistics(
        input,
        target,
        picks,
        ignore_index,
        softcap,
        pair_of(*divergence),
        divergence[0] == "cross_entropy",
        teacher,
        accumulation_type(input.dtype),
        row_function,
        squares=squares,
        scale=scale,
    )
    return Problem(input, linear_weight, linear_bias, losses, scale=scale)


def _missing(arguments: tuple[Any, ...]) -> list[int]:
    """Places of the statistics that nobody asked for, which are empty."""
    _, _, target, _, picks, teacher, *_, squares, _ = arguments
    asked = {NLL: target, DIVERGENCE: teacher, LOG_PROBS: picks, LOG_SQUARES: squares or None}
    return [place for place, argument in asked.items() if argument is None]


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    with autocast_off(arguments[0]):
        return results(_problem(arguments))


def _backward(*rest: Any) -> tuple[Tensor, ...]:
    gradients, arguments, needs = [*rest[:DIFFERENTIABLE]], rest[DIFFERENTIABLE:-3], rest[-3:]
    for place in _missing(arguments):  # its gradient is None, or empty
        if place < DIFFERENTIABLE:
            gradients[place] = None
    arguments = (*arguments[:-2], False, arguments[-1])  # nobody reads the squares again
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
    input, picks, missing = arguments[0], arguments[_PICKS], _missing(arguments)

    def statistic(place: int) -> Tensor:
        dtype = torch.int64 if place == COUNT - 1 else accumulation_type(input.dtype)
        shape = picks.shape if place == LOG_PROBS and picks is not None else input.shape[:1]
        return input.new_empty(0 if place in missing else shape, dtype=dtype)

    return tuple(map(statistic, range(COUNT)))


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


_UNIT = unit_function(COUNT, DIFFERENTIABLE)


def statistics(*arguments: Any) -> tuple[Tensor, ...]:
    """The statistics of eager calls, with the gradient of nll if that can be computed with them."""
    input, linear_weight, target, linear_bias, picks, teacher, *_ = arguments
    if (
        _others_had_gradients
        or target is None
        or not (picks is None and teacher is None)
        or not has_unit_gradients(input, linear_weight, linear_bias)
    ):
        return tuple(forward(*arguments))
    found = rows_with_grad(*arguments, True, False, False, _UNIT, [])
    return tuple(found[:COUNT])


#: Whether a gradient ever came to another statistic than nll of :func:`statistics`, such as to an
#: entropy that is a part of the loss. Then a gradient of nll alone would be computed in vain.
_others_had_gradients = False


def reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    linear_bias: Tensor | None,
    picks: Tensor | None,
    teacher: Tensor | None,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    divergence: str | None,
    beta: float,
    temperature: float,
    teacher_softcap: float | None,
    squares: bool,
    scale: float,
) -> tuple[Tensor | None, ...]:
    """The differentiable statistics in torch's own ops, over all logits."""
    logits = F.linear(input, linear_weight, linear_bias) * scale
    found = row_statistics.reference(logits, target, ignore_index, softcap)
    log_probs = None
    if picks is not None:
        log_probs = F.log_softmax(row_statistics.capped(logits, softcap), -1).gather(-1, picks)
    pair = pair_of(divergence, beta, temperature)
    if pair is None or teacher is None:
        return *found, None, log_probs
    if teacher_weight is not None:
        teacher = F.linear(teacher, teacher_weight, teacher_bias)
    dtype = accumulation_type(logits.dtype)
    caps = zip((logits, teacher), (softcap, teacher_softcap), strict=True)
    student, teacher = (row_statistics.capped(rows.to(dtype), cap) for rows, cap in caps)
    rows = pair.ordered(student, teacher)
    each = _REFERENCES[pair.name](*rows, NONE, *pair.options, -1)
    if divergence == "cross_entropy":
        each = each + row_statistics.entropy_of(teacher)
    return *found, each, log_probs


_REFERENCES: dict[str, Callable[..., Tensor]] = {
    "softmax_kl_div": softmax_kl_div.reference,
    "softmax_js_div": softmax_js_div.reference,
    "softmax_finite_kl_div": softmax_finite_kl_div.reference,
}


def _save(ctx: Any, arguments: tuple[Any, ...], *more: Tensor | None) -> None:
    # For outputs without a gradient one would be made as large as a weight.
    ctx.set_materialize_grads(False)
    ctx.options = arguments[_TENSORS:]
    ctx.save_for_backward(*arguments[:_TENSORS], *more)


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs)
    ctx.mark_non_differentiable(*output[DIFFERENTIABLE:])


def _forward_vjp(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    given = gradients[:DIFFERENTIABLE]
    if all(gradient is None for gradient in given):
        return (None,) * _COUNT
    needs = [ctx.needs_input_grad[i] for i in _LAYER]
    found = backward(*given, *ctx.saved_tensors, *ctx.options, *needs)
    return _in_place_of_arguments(found, needs)


def _in_place_of_arguments(gradients: Any, needs: Any) -> tuple[Tensor | None, ...]:
    found: list[Tensor | None] = [None] * _COUNT
    for place, gradient, needed in zip(_LAYER, gradients, needs, strict=True):
        found[place] = gradient if needed else None
    return tuple(found)


library.register_autograd(forward, _forward_vjp, _setup_forward)


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arguments, needs_input, needs_weight, needs_bias, text, _ = inputs
    check_unit(NAME, (needs_input, needs_weight, needs_bias), text, _UNIT)
    _save(ctx, tuple(arguments), output[COUNT])
    ctx.mark_non_differentiable(*output[DIFFERENTIABLE:])


def _rows_vjp(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    global _others_had_gradients
    of_nll, *others = gradients[:DIFFERENTIABLE]
    *tensors, unit = ctx.saved_tensors
    needs = (True, False, False)
    if any(gradient is not None for gradient in others):
        _others_had_gradients = True
    elif of_nll is None:
        return (*(None,) * _COUNT, *NO_MORE)
    elif not torch.is_grad_enabled():
        overwrites = are_ours_to_overwrite((unit,), of_nll)
        found = (scaled_by_row(unit, of_nll, overwrites=overwrites), None, None)
        return *_in_place_of_arguments(found, needs), *NO_MORE
    found = backward(of_nll, *others, *tensors, *ctx.options, *needs)
    return *_in_place_of_arguments(found, needs), *NO_MORE


library.register_autograd(rows_with_grad, _rows_vjp, _setup_rows)


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
    count = DIFFERENTIABLE + _COUNT + len(_LAYER)
    wanted = [c if needed else None for c, needed in zip(cotangents, ctx.needs, strict=True)]
    if all(cotangent is None for cotangent in wanted):
        return (None,) * count
    input, linear_weight, target, linear_bias, picks, *rest = ctx.saved_tensors
    of_teacher, gradients = rest[: len(TEACHER)], rest[len(TEACHER) :]
    given = [i for i, gradient in enumerate(gradients) if gradient is not None]
    layer = [input, linear_weight] + ([] if linear_bias is None else [linear_bias])

    def total(*tensors: Tensor) -> Tensor:
        factors, (input, weight, *bias) = tensors[: len(given)], tensors[len(given) :]
        of_layer = (input, weight, target, bias[0] if bias else None, picks)
        found = reference(*of_layer, *of_teacher, *ctx.options)
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
    needs = (None,) * len(_LAYER)
    return *of_gradients, *_in_place_of_arguments(of_layer, (True,) * len(_LAYER)), *needs


library.register_autograd(backward, _backward_vjp, _setup_backward)
