"""How a divergence ``X`` of two softmaxes becomes one of a linear layer's output and a teacher's.

``fused::linear_X`` is public: checks, autocast and type promotion, then the ops of
:mod:`compile_losses.ops.linear.leaf_ops`. It equals ``fused::X`` of ``linear(input, linear_weight,
linear_bias)``, the student's logits, and of the teacher's: ``target`` itself, or
``linear(target, target_weight, target_bias)``. With a ``softcap`` the student's logits z become
``softcap * tanh(z / softcap)``, and with a ``target_softcap`` the teacher's do, before they are
divided by the temperature. Logits that are not given are never held: they are
computed a chunk of rows at a time. The rows of DTensors may be sharded, or for Kullback-Leibler's
divergence the classes of both sides.

Input is [hidden], [rows, hidden] or with any other leading dimensions, linear_weight [classes,
hidden], linear_bias [classes]; target has input's leading dimensions and then the classes, or with
target_weight, [classes, target's hidden], as many features as that. Student and teacher may differ
in dtype. Reductions are those of ``X``, as if the logits were there; with 0 (none) the loss of each
row, of input's leading shape.

If a loss is reduced, the gradients of input, linear_weight and linear_bias are computed with it, in
three matrix products in all and one for the teacher's logits, and only those that are needed. With
reduction none that is so if only input needs a gradient
(:mod:`compile_losses.ops.linear.unit_gradients`); otherwise, and in float16, whose unit gradients
underflow, the backward computes both rows of logits again. The teacher has no gradient.

``dtype`` is that of the loss; the result is that of casting the logits to it. When it is given
autocast changes nothing; otherwise arguments are cast as autocast casts those of ``linear``.

Raises:
    RuntimeError: shapes, dtypes or devices that don't go together; a temperature or a soft-cap that
        is not positive; a teacher that requires a gradient where gradients are recorded; plain
        tensors among DTensors; classes of the teacher that are sharded otherwise than the
        student's, and sharded classes of Jensen-Shannon's divergence or of logits with a soft-cap.
    ValueError: unknown reduction.
    NotImplementedError: tensors that are not floating point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library
from compile_losses.distributed import mesh_of
from compile_losses.ops import checks
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.elementwise import Parameter
from compile_losses.ops.linear.arguments import as_rows, check_linear
from compile_losses.ops.linear.leaf_ops import declare_leaves
from compile_losses.ops.linear.reference import autocast_layer, autocast_off, under_autocast
from compile_losses.ops.linear.row_chunks import Problem
from compile_losses.ops.linear.row_divergences import (
    NONE,
    SUM,
    Pair,
    RowDivergences,
    TeacherLogits,
)
from compile_losses.ops.linear.row_function import RowFunction
from compile_losses.ops.row_statistics import capped
from compile_losses.ops.softmax_divergence import check_temperature
from compile_losses.ops.transforms import needs_torch
from compile_losses.torch_internals.ops import schema_of

_STUDENT = ("input", "linear_weight", "linear_bias")
_TEACHER = ("target", "target_weight", "target_bias")


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a leaf op, whose input is [rows, hidden], or of the public op.

    Attributes:
        reduction: 0 (none), or 2 (sum), which divisor divides.
        own: the loss's own parameter, besides the temperature.
    """

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None
    target_weight: Tensor | None
    target_bias: Tensor | None
    reduction: int
    own: Any
    temperature: float
    softcap: float | None
    target_softcap: float | None
    divisor: int
    dtype: torch.dtype

    @property
    def accumulation(self) -> torch.dtype:
        """The dtype of sums."""
        double = torch.float64 in (self.input.dtype, self.target.dtype)
        return torch.float64 if double else torch.float32

    def check(self, name: str) -> None:
        student = (self.input, self.linear_weight, self.linear_bias)
        check_layers(name, student, (self.target, self.target_weight, self.target_bias))
        check_temperature(name, self.temperature)
        checks.check_softcap(name, self.softcap)
        checks.check_softcap(name, self.target_softcap, "target_softcap")


Layer: TypeAlias = tuple[Tensor, Tensor, Tensor | None]


def _in_order(student: Any, teacher: Any) -> tuple[Any, ...]:
    """Input, weight and bias of both, in the order of the leaf ops' arguments."""
    (input, linear_weight, linear_bias), (target, *others) = student, teacher
    return input, linear_weight, target, linear_bias, *others


def check_layers(
    name: str,
    student: Layer,
    teacher: tuple[Tensor, Tensor | None, Tensor | None],
    names: tuple[str, str, str] = _TEACHER,
) -> None:
    """Checks that two layers, or a layer and logits, make rows of the same classes.

    Args:
        student: input, weight and bias.
        teacher: logits, None and None, or input, weight and bias.
        names: of the teacher's arguments.

    Raises:
        RuntimeError: shapes, dtypes or devices that don't go together.
        NotImplementedError: tensors that are not dense, or not floating point.
    """
    given = zip(_STUDENT + names, student + teacher, strict=True)
    named = {key: tensor for key, tensor in given if tensor is not None}
    for key, tensor in named.items():
        if tensor.layout != torch.strided:
            raise NotImplementedError(
                f"{name}: expected {key} to be dense, got {checks.describe(tensor)}"
            )
    checks.check_floating(name, **named)
    checks.check_same_device(name, **named)
    check_linear(name, _STUDENT, *student)
    target, target_weight, target_bias = teacher
    _, of_weight, of_bias = names
    if target_weight is not None:
        check_linear(name, names, target, target_weight, target_bias)
    elif target_bias is not None:
        raise RuntimeError(f"{name}: expected {of_bias} only with {of_weight}")
    for key in ("linear_weight", of_weight):
        if key in named and named[key].dim() != 2:
            raise RuntimeError(
                f"{name}: expected {key} of shape [classes, hidden], got {list(named[key].shape)}"
            )
    input, linear_weight, _ = student
    expected = torch.Size((*input.shape[:-1], linear_weight.shape[0]))
    of_teacher = target.shape
    if target_weight is not None:
        of_teacher = torch.Size((*target.shape[:-1], target_weight.shape[0]))
    if not checks.same_shape(of_teacher, expected):
        raise RuntimeError(
            f"{name}: expected the teacher's logits to have the shape of the student's "
            f"{list(expected)}, got {list(of_teacher)}"
        )


def declare(
    divergence: str,
    reference: Callable[..., Tensor],
    parameter: Parameter,
    pair: Callable[[Any], tuple[bool, tuple[Any, ...]]],
    *,
    check: Callable[..., None] = lambda *_: None,
) -> None:
    """Declares the ops of ``linear_X``.

    Args:
        divergence: X.
        reference: of X, see :mod:`compile_losses.ops.softmax_divergence`.
        parameter: the loss's own parameter, by keyword, besides the temperature.
        pair: from the parameter's value to whether the student's logits are X's target and not its
            input, and to X's options before the temperature.
        check: raises for a bad value of the parameter; called with the name and the value.
    """
    name = f"linear_{divergence}"
    public = library.define(
        f"{name}(Tensor input, Tensor linear_weight, Tensor target, int reduction=3, *, "
        "Tensor? linear_bias=None, Tensor? target_weight=None, Tensor? target_bias=None, "
        f"{parameter.declaration_with_default}, float temperature=1.0, float? softcap=None, "
        "float? target_softcap=None, ScalarType? dtype=None) -> Tensor"
    )
    (default,) = (a.default_value for a in schema_of(public).arguments if a.name == parameter.name)

    def check_leaf(*arguments: Any) -> None:
        given = _Arguments(*arguments)
        given.check(name)
        if given.reduction not in (NONE, SUM):
            raise ValueError(
                f"{name}: expected reduction 0 (none) or 2 (sum), got {given.reduction}"
            )
        if given.input.dim() != 2:
            raise RuntimeError(
                f"{name}: expected input of shape [rows, hidden], got {list(given.input.shape)}"
            )
        check(name, given.own)

    def problem(
        arguments: tuple[Any, ...], grad_output: Tensor | RowFunction | None = None
    ) -> Problem:
        check_leaf(*arguments)
        given = _Arguments(*arguments)
        reverse, options = pair(given.own)
        losses = RowDivergences(
            Pair(divergence, reverse, (*options, given.temperature)),
            TeacherLogits(
                given.target, given.target_weight, given.target_bias, given.target_softcap
            ),
            given.reduction,
            given.divisor,
            given.input.dtype,
            given.accumulation,
            given.dtype,
            grad_output,
            given.softcap,
        )
        return Problem(given.input, given.linear_weight, given.linear_bias, losses)

    def in_torch(*arguments: Any) -> Tensor:
        """The loss in torch's own ops, over all logits."""
        given = _Arguments(*arguments)
        student = F.linear(given.input, given.linear_weight, given.linear_bias)
        teacher = given.target
        if given.target_weight is not None:
            teacher = F.linear(teacher, given.target_weight, given.target_bias)
        student, teacher = capped(student, given.softcap), capped(teacher, given.target_softcap)
        reverse, options = pair(given.own)
        dtype = given.dtype
        rows = (teacher, student) if reverse else (student, teacher)
        options = (NONE, *options, given.temperature, -1)
        each = reference(*(row.to(dtype) for row in rows), *options)
        return each if given.reduction == NONE else each.sum() / given.divisor

    leaves = declare_leaves(
        name,
        "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, "
        "Tensor? target_weight, Tensor? target_bias, int reduction, "
        f"{parameter.declaration}, float temperature, float? softcap, float? target_softcap, "
        "SymInt divisor, ScalarType dtype",
        problem=problem,
        check=check_leaf,
        reference=in_torch,
    )

    def public_kernel(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        reduction: int = 3,
        *,
        linear_bias: Tensor | None = None,
        target_weight: Tensor | None = None,
        target_bias: Tensor | None = None,
        temperature: float = 1.0,
        softcap: float | None = None,
        target_softcap: float | None = None,
        dtype: torch.dtype | None = None,
        **own: Any,
    ) -> Tensor:
        student: Any = (input, linear_weight, linear_bias)
        teacher: Any = (target, target_weight, target_bias)
        mesh = mesh_of(name, **dict(zip(_STUDENT + _TEACHER, student + teacher, strict=True)))
        checks.check_reduction(name, reduction, batchmean=True)
        result = checks.loss_dtype(dtype, input, target)
        if dtype is None and under_autocast(input):
            student = autocast_layer(*student)
            teacher = teacher if target_weight is None else autocast_layer(*teacher)
        value = own.get(parameter.name, default)
        each = NONE if reduction == NONE else SUM
        options: Any = (each, value, temperature, softcap, target_softcap)
        given: Any = (*_in_order(student, teacher), *options, 1, result)
        _Arguments(*given).check(name)
        check(name, value)
        if torch.is_grad_enabled():
            for key, tensor in zip(_TEACHER, teacher, strict=True):
                if tensor is not None and tensor.requires_grad:
                    raise RuntimeError(
                        f"{name}: expected {key} not to require grad: the teacher has no gradient"
                    )
        leading, classes = input.shape[:-1], linear_weight.shape[0]
        divisors = {
            REDUCTIONS["mean"]: math.prod(leading) * classes,
            REDUCTIONS["batchmean"]: leading[0] if leading else classes,
        }
        divisor = divisors.get(reduction, 1)
        if mesh is not None:
            from compile_losses.distributed.divergence import linear_divergence

            def whole(student: Any, teacher: Any, reduction: int, dtype: torch.dtype) -> Tensor:
                (input, linear_weight, linear_bias), (target, *layer) = student, teacher
                return public_kernel(
                    input, linear_weight, target, reduction, linear_bias=linear_bias,
                    target_weight=layer[0], target_bias=layer[1], temperature=temperature,
                    softcap=softcap, target_softcap=target_softcap, dtype=dtype, **own,
                )  # fmt: skip

            # The mixture of Jensen-Shannon's needs statistics of whole rows: a second read. The op
            # of a shard of the classes has no soft-caps.
            is_capped = softcap is not None or target_softcap is not None
            has_form = divergence == "softmax_kl_div" and not is_capped
            reverse = pair(value)[0] if has_form else None
            return linear_divergence(
                name, whole, reverse, mesh, student, teacher, each, temperature, divisor, result
            )
        options = (*options, divisor, result)
        if needs_torch(*student, *teacher):
            with autocast_off(input):
                return in_torch(*_in_order(student, teacher), *options)
        (rows, *layer), (of_teacher, *others) = student, teacher
        tensors = _in_order((as_rows(rows), *layer), (as_rows(of_teacher), *others))
        loss = leaves((*tensors, *options), by_row=each == NONE)
        return loss.reshape(leading) if each == NONE else loss

    library.implement_public(public, public_kernel)
