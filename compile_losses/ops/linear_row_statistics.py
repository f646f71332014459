"""Statistics of the rows of a linear layer's output, without ever holding that output.

What losses of tokens and their metrics read of a row of logits are a few numbers
(:mod:`compile_losses.ops.row_statistics`): the negative log-likelihood of a class, the logsumexp,
the entropy, the sum, the maximum and where that is. Log-probabilities, PPO's and GRPO's losses with
an entropy, cross entropies with a z-loss, token accuracy and so on are made of them by row. So are
sums of a cross entropy and the divergence from a teacher's row, the seventh number, and losses of
several classes of each row, such as the distillation of a teacher's likeliest classes. These ops
compute all of ``linear(input, linear_weight, linear_bias)``, a chunk of rows at a time:

- ``fused::linear_row_statistics_forward``: the statistics, [rows] each: nll, logsumexp, entropy,
  total, divergence, log_squares, variance, rank, maximum and argmax; after the divergence the
  log-probabilities of picks, [rows, K], and after the rank top_values and top_indices, [rows,
  top_k].
- ``fused::linear_row_statistics_backward``: the gradients, from the logits computed again.
- ``fused::linear_row_statistics_rows_with_grad``: both; the row_function makes the gradients of the
  first six of all statistics and of what is known
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
softmax(logits), and with ``variance`` there is ``logits.var(-1, correction=0)``, both without a
gradient. Neither have the rank of the class ``ranked``, int64 [rows], which is the number of larger
logits (of those that are as large, too, with ``ties``), and the ``top_k`` largest logits with their
classes (:mod:`compile_losses.ops.row_numbers`). Statistics that nobody asks for are empty: the
divergence without one, the log-probabilities without picks, log_squares without squares, the
variance without variance, the rank without ranked, and the largest logits with a top_k of 0.

Raises:
    RuntimeError: shapes, dtypes or devices that don't go together; a softcap or a temperature that
        is not positive; a beta that is not between 0 and 1; a teacher without a divergence, or a
        divergence without a teacher; a teacher's bias or soft-cap without its weight; a top_k that
        is not from 0 to the number of classes.
    ValueError: an unknown divergence.
    IndexError: on the CPU, a target outside [0, classes) that is not ignore_index, or a pick or a
        ranked class outside [0, classes). On CUDA the kernel stops with a device-side assertion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses.ops import (
    checks,
    row_numbers,
    row_picks,
    row_statistics,
    softmax_finite_kl_div,
    softmax_js_div,
    softmax_kl_div,
)
from compile_losses.ops.checks import accumulation_type, describe
from compile_losses.ops.linear.arguments import check_linear
from compile_losses.ops.linear.divergence import check_layers
from compile_losses.ops.linear.leaf_ops import declare_leaves
from compile_losses.ops.linear.row_chunks import Problem, Several
from compile_losses.ops.linear.row_divergences import NONE, Pair, TeacherLogits
from compile_losses.ops.linear.row_function import RowFunction
from compile_losses.ops.linear.row_statistics import (
    COUNT,
    DIVERGENCE,
    LOG_PROBS,
    LOG_SQUARES,
    NLL,
    PLACES_OF_CLASSES,
    RANK,
    TOP_INDICES,
    TOP_VALUES,
    VARIANCE,
    RowStatistics,
)
from compile_losses.ops.softmax_divergence import check_temperature
from compile_losses.ops.softmax_js_div import check as check_beta

NAME = "linear_row_statistics"
ARGUMENTS = (
    "Tensor input, Tensor linear_weight, Tensor? target, Tensor? linear_bias, Tensor? picks, "
    "Tensor? teacher, Tensor? teacher_weight, Tensor? teacher_bias, Tensor? ranked, "
    "SymInt ignore_index, float? softcap, str? divergence, float beta, float temperature, "
    "float? teacher_softcap, bool squares, bool variance, int top_k, bool ties, float scale"
)
#: The names of the gradients of the statistics that have one.
_GRADIENTS = (
    *("grad_nll", "grad_logsumexp", "grad_entropy", "grad_total", "grad_divergence"),
    "grad_log_probs",
)
#: The names of the arguments of a teacher.
TEACHER = ("teacher", "teacher_weight", "teacher_bias")
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
    ranked: Any = None,
    squares: bool = False,
    variance: bool = False,
    top_k: int = 0,
    ties: bool = False,
    scale: float = 1.0,
) -> tuple[Any, ...]:
    """Those of the ops in their order, without a teacher unless one is given."""
    tensors = (input, linear_weight, target, linear_bias, picks, *teacher, ranked)
    options = (ignore_index, softcap, divergence, beta, temperature, teacher_softcap)
    return *tensors, *options, squares, variance, top_k, ties, scale


@dataclass(frozen=True)
class Arguments:
    """Those of the leaf ops, in the order of their schemas."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor | None
    linear_bias: Tensor | None
    picks: Tensor | None
    teacher: Tensor | None
    teacher_weight: Tensor | None
    teacher_bias: Tensor | None
    ranked: Tensor | None
    ignore_index: int
    softcap: float | None
    divergence: str | None
    beta: float
    temperature: float
    teacher_softcap: float | None
    squares: bool
    variance: bool
    top_k: int
    ties: bool
    scale: float

    def check(self) -> None:
        input, linear_weight, linear_bias = self.input, self.linear_weight, self.linear_bias
        checks.check_floating(NAME, input=input, linear_weight=linear_weight)
        checks.check_same_device(
            NAME,
            input,
            linear_weight=linear_weight,
            target=self.target,
            linear_bias=linear_bias,
            picks=self.picks,
            ranked=self.ranked,
        )
        layer = ("input", "linear_weight", "linear_bias")
        check_linear(NAME, layer, input, linear_weight, linear_bias)
        if input.dim() != 2 or linear_weight.dim() != 2:
            raise RuntimeError(
                f"{NAME}: expected input of shape [rows, hidden] and linear_weight of shape "
                f"[classes, hidden], got {list(input.shape)} and {list(linear_weight.shape)}"
            )
        target, rows = self.target, input.shape[:1]
        if target is not None and (
            target.dtype != torch.int64 or not checks.same_shape(target.shape, rows)
        ):
            raise RuntimeError(
                f"{NAME}: expected target to be int64 of shape {list(rows)}, got {describe(target)}"
            )
        if self.picks is not None:
            row_picks.check(NAME, self.picks, input.shape[0])
        row_numbers.check(NAME, self.ranked, self.top_k, input, linear_weight.shape[0])
        checks.check_softcap(NAME, self.softcap)
        self._check_teacher()

    def _check_teacher(self) -> None:
        teacher, divergence = self.teacher, self.divergence
        if (teacher is None) != (divergence is None):
            raise RuntimeError(
                f"{NAME}: expected a teacher and a divergence or neither, "
                f"got {teacher if teacher is None else describe(teacher)} and {divergence}"
            )
        if teacher is None:
            return
        if divergence not in DIVERGENCES:
            expected = ", ".join(DIVERGENCES)
            raise ValueError(
                f"{NAME}: expected divergence to be one of {expected}, got {divergence}"
            )
        checks.check_softcap(NAME, self.teacher_softcap, "teacher_softcap")
        if self.teacher_softcap is not None and self.teacher_weight is None:
            raise RuntimeError(f"{NAME}: expected teacher_softcap only with teacher_weight")
        check_temperature(NAME, self.temperature)
        if divergence == "cross_entropy" and self.temperature != 1:
            raise RuntimeError(
                f"{NAME}: expected a temperature of 1 with cross_entropy, got {self.temperature}"
            )
        if divergence == "js":
            check_beta(NAME, self.beta)
        layer = (self.input, self.linear_weight, self.linear_bias)
        check_layers(NAME, layer, (teacher, self.teacher_weight, self.teacher_bias), TEACHER)

    @property
    def pair(self) -> Pair | None:
        """The op that computes the divergence, with its options."""
        return pair_of(self.divergence, self.beta, self.temperature)

    @property
    def missing(self) -> list[int]:
        """Places of the statistics that nobody asked for, which are empty."""
        asked = {
            NLL: self.target,
            DIVERGENCE: self.teacher,
            LOG_PROBS: self.picks,
            LOG_SQUARES: self.squares or None,
            VARIANCE: self.variance or None,
            RANK: self.ranked,
            TOP_VALUES: self.top_k or None,
            TOP_INDICES: self.top_k or None,
        }
        return [place for place, argument in asked.items() if argument is None]


def pair_of(divergence: str | None, beta: float, temperature: float) -> Pair | None:
    """The op that computes a divergence, with its options."""
    if divergence is None:
        return None
    name, reverse, own = DIVERGENCES[divergence]
    return Pair(name, reverse, (*own, *[beta] * (divergence == "js"), temperature))


def _problem(arguments: tuple[Any, ...], row_function: RowFunction | None = None) -> Problem:
    given = Arguments(*arguments)
    given.check()
    for picked in (given.picks, given.ranked):
        if picked is not None:
            row_picks.check_bounds(NAME, picked, given.linear_weight.shape[0])
    teacher = None
    if given.teacher is not None:
        layer = (given.teacher, given.teacher_weight, given.teacher_bias)
        teacher = TeacherLogits(*layer, given.teacher_softcap)
    losses = RowStatistics(
        given.input,
        given.target,
        given.picks,
        given.ignore_index,
        given.softcap,
        given.pair,
        given.divergence == "cross_entropy",
        teacher,
        accumulation_type(given.input.dtype),
        row_function,
        squares=given.squares,
        variance=given.variance,
        ranked=given.ranked,
        top_k=given.top_k,
        ties=given.ties,
        scale=given.scale,
    )
    layer = (given.input, given.linear_weight, given.linear_bias)
    return Problem(*layer, losses, scale=given.scale)


def _for_gradients(
    gradients: tuple[Tensor | None, ...], arguments: tuple[Any, ...]
) -> tuple[list[Tensor | None], tuple[Any, ...]]:
    """Without gradients of empty statistics, which are None or empty, and without what has no
    gradient and nobody reads again."""
    given = Arguments(*arguments)
    read = [None if place in given.missing else each for place, each in enumerate(gradients)]
    needed = replace(given, ranked=None, squares=False, variance=False, top_k=0)
    return read, tuple(getattr(needed, each.name) for each in fields(needed))


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    given = Arguments(*arguments)
    input, picks = given.input, given.picks

    def statistic(place: int) -> Tensor:
        dtype = torch.int64 if place in PLACES_OF_CLASSES else accumulation_type(input.dtype)
        shape = [*input.shape[:1]]
        if place == LOG_PROBS and picks is not None:
            shape = [*picks.shape]
        elif place in (TOP_VALUES, TOP_INDICES):
            shape.append(given.top_k)
        return input.new_empty(0 if place in given.missing else shape, dtype=dtype)

    return tuple(map(statistic, range(COUNT)))


def reference(*arguments: Any) -> tuple[Tensor | None, ...]:
    """The differentiable statistics in torch's own ops, over all logits; takes the leaf ops'
    arguments."""
    given = Arguments(*arguments)
    logits = F.linear(given.input, given.linear_weight, given.linear_bias) * given.scale
    found = row_statistics.reference(logits, given.target, given.ignore_index, given.softcap)
    log_probs = None
    if given.picks is not None:
        capped = row_statistics.capped(logits, given.softcap)
        log_probs = F.log_softmax(capped, -1).gather(-1, given.picks)
    pair, teacher = given.pair, given.teacher
    if pair is None or teacher is None:
        return *found, None, log_probs
    if given.teacher_weight is not None:
        teacher = F.linear(teacher, given.teacher_weight, given.teacher_bias)
    dtype = accumulation_type(logits.dtype)
    caps = zip((logits, teacher), (given.softcap, given.teacher_softcap), strict=True)
    student, teacher = (row_statistics.capped(rows.to(dtype), cap) for rows, cap in caps)
    rows = pair.ordered(student, teacher)
    each = _REFERENCES[pair.name](*rows, NONE, *pair.options, -1)
    if given.divergence == "cross_entropy":
        each = each + row_statistics.entropy_of(teacher)
    return *found, each, log_probs


_REFERENCES: dict[str, Callable[..., Tensor]] = {
    "softmax_kl_div": softmax_kl_div.reference,
    "softmax_js_div": softmax_js_div.reference,
    "softmax_finite_kl_div": softmax_finite_kl_div.reference,
}


leaves = declare_leaves(
    NAME,
    ARGUMENTS,
    problem=_problem,
    check=lambda *arguments: Arguments(*arguments).check(),
    reference=reference,
    several=Several(COUNT, _GRADIENTS, _fake, _for_gradients),
)
forward, backward, rows_with_grad = leaves.forward, leaves.backward, leaves.rows_with_grad


def statistics(*arguments: Any) -> tuple[Tensor, ...]:
    """The statistics of eager calls, with the gradient of nll if that can be computed with them."""
    given = Arguments(*arguments)
    alone = given.target is not None and given.picks is None and given.teacher is None
    found: tuple[Tensor, ...] = leaves.of_rows(arguments, has_first=alone)
    return found
