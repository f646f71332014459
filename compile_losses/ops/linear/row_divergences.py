"""The divergence of a chunk of logits from a teacher's, and the gradient of these logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.linear.matrix_products import rows_of, write_logits
from compile_losses.ops.linear.row_function import RowFunction

T = TypeVar("T")

NONE, SUM = (REDUCTIONS[name] for name in ("none", "sum"))


class TeacherLogits:
    """A teacher's logits: given, or the output of a linear layer, some rows at a time.

    Args:
        target: [rows, classes], or with a weight the layer's input, [rows, hidden].
        weight: [classes, hidden].
        softcap: if given, the logits z become ``softcap * tanh(z / softcap)``.
    """

    def __init__(
        self,
        target: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        softcap: float | None = None,
    ) -> None:
        self.target, self.weight, self.bias, self.softcap = target, weight, bias, softcap
        self.kept: Tensor | None = None
        self.buffer: Tensor | None = None

    def keep(self, rows: Tensor) -> None:
        """Leaves out all rows but these, int64 [kept]. Given logits of these are copied."""
        self.kept = rows

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return self.target.dtype if self.weight is None else self.weight.dtype

    @property
    def computed(self) -> bool:
        """Whether the logits are not given as they are, so that some rows of them are held."""
        return self.weight is not None or self.softcap is not None or self.kept is not None

    def __call__(self, rows: slice) -> Tensor:
        target = rows_of(self.target, rows, self.kept)
        if self.weight is None and self.softcap is None:
            return target
        if self.buffer is None:  # nowhere are there more rows than in the first part
            classes = target.shape[1] if self.weight is None else len(self.weight)
            self.buffer = target.new_empty((len(target), classes))
        logits = self.buffer[: len(target)]
        if self.weight is None:
            logits.copy_(target)
        else:
            write_logits(target, self.weight, self.bias, logits)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if rows.stop == len(self.target if self.kept is None else self.kept):  # the last ones
            self.buffer = None
        return logits


@dataclass(frozen=True)
class Pair:
    """How a divergence of two softmaxes is computed: by ``fused::X_forward`` and its other ops.

    Attributes:
        name: X.
        reverse: whether the student's logits are the op's target, not its input.
        options: those of the ops between the reduction and dim.
    """

    name: str
    reverse: bool
    options: tuple[Any, ...]

    def op(self, part: str) -> Callable[..., Any]:
        op: Callable[..., Any] = getattr(torch.ops.fused, f"{self.name}_{part}").default
        return op

    def ordered(self, student: T, teacher: T) -> tuple[T, T]:
        """As the op takes them."""
        return (teacher, student) if self.reverse else (student, teacher)

    def forward(
        self, student: Tensor, teacher: Tensor, reduction: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the statistics that the backward reads."""
        pair = self.ordered(student, teacher)
        loss, statistics = self.op("forward")(*pair, reduction, *self.options, -1, dtype)
        return loss, statistics

    def gradient(
        self, factor: Tensor, student: Tensor, teacher: Tensor, statistics: Tensor
    ) -> Tensor:
        """The gradient of the student's logits, for that of each row's loss, in its own memory."""
        pair, needs = self.ordered(student, teacher), (not self.reverse, self.reverse)
        gradients: tuple[Tensor, Tensor] = self.op("backward")(
            factor, *pair, statistics, NONE, *self.options, -1, *needs
        )
        return gradients[self.reverse]

    def write_gradient(
        self, factor: Tensor, student: Tensor, teacher: Tensor, statistics: Tensor
    ) -> None:
        """The same, over the student's logits."""
        if student.dtype != teacher.dtype:
            student.copy_(self.gradient(factor, student, teacher, statistics))
            return
        nothing, stats = (None,) * 4, statistics.new_zeros((len(student), 3))
        self.gradient_of_statistics_(
            nothing, factor, student, teacher, stats, statistics, None, -1, None
        )

    def gradient_of_statistics_(
        self,
        of_statistics: Sequence[Tensor | None],
        factor: Tensor,
        student: Tensor,
        teacher: Tensor,
        stats: Tensor,
        statistics: Tensor,
        target: Tensor | None,
        ignore_index: int,
        softcap: float | None,
    ) -> None:
        """The gradient of each row's loss and of other statistics, over the student's logits.

        Args:
            of_statistics: the gradients of the first four of ``row_statistics``.
            factor: the gradient of the loss of each row.
            student, teacher: logits of one dtype; the student's are those before the soft-cap.
            stats: of ``row_statistics``.
            statistics: of the loss, of the logits after the soft-cap.
        """
        self.op("row_statistics_backward_")(
            *of_statistics, student, target, stats, ignore_index, softcap, factor, teacher,
            statistics, self.reverse, *self.options,
        )  # fmt: skip

    def with_gradient_(
        self, student: Tensor, teacher: Tensor, dtype: torch.dtype, factor: Tensor
    ) -> Tensor:
        """The sum of the losses; the gradient of the student's logits lies over these."""
        if self.reverse:
            loss, statistics = self.forward(student, teacher, SUM, dtype)
            self.write_gradient(factor.expand(len(student)), student, teacher, statistics)
            return loss
        return self.op("with_grad_")(student, teacher, SUM, *self.options, -1, dtype, factor)


def tensors_beside(
    student: torch.dtype,
    teacher: torch.dtype,
    *,
    computed: bool,
    by_row: bool,
    reverse: bool,
    gradient: bool,
    softcap: bool = False,
    picks: bool = False,
) -> float:
    """How many tensors of the size of the student's logits a divergence holds besides these.

    Args:
        student, teacher: the dtypes of the logits.
        computed: whether the teacher's logits are computed, too.
        softcap: whether the student's logits before and after a soft-cap are held at a time.
        picks: whether several classes of a row are picked beside the divergence.
    """
    of_teacher = teacher.itemsize / student.itemsize if computed else 0
    apart = (by_row or reverse) and (student != teacher or picks)
    return of_teacher + softcap + (gradient and apart)


class RowDivergences:
    """The divergence of each row of a student's logits from its teacher's.

    With a softcap the student's logits z become ``softcap * tanh(z / softcap)``. A reduced loss is
    the sum of the rows, divided by divisor. Its gradient is for the number grad_output, or for 1.
    By row, grad_output is a function; without it there is no gradient.
    """

    def __init__(
        self,
        pair: Pair,
        teacher: TeacherLogits,
        reduction: int,
        divisor: int,
        logits: torch.dtype,
        dtype: torch.dtype,  # that sums are made in
        result: torch.dtype,  # of the loss
        grad_output: Tensor | RowFunction | None,
        softcap: float | None = None,
    ) -> None:
        self.pair, self.teacher, self.divisor, self.softcap = pair, teacher, divisor, softcap
        self.by_row, self.logits, self.dtype, self.result = reduction == NONE, logits, dtype, result
        nothing = teacher.target.new_zeros((), dtype=dtype)
        self.sums = [nothing]
        self.each = [nothing.new_empty(0, dtype=result)]
        self.row_function = grad_output if isinstance(grad_output, RowFunction) else None
        one = nothing.new_ones(())
        if isinstance(grad_output, Tensor):
            one = grad_output.to(dtype).reshape(())
        self.factor = one / divisor

    def keep(self, rows: Tensor) -> None:
        """Leaves out all rows but these, int64 [kept]."""
        self.teacher.keep(rows)
        if self.row_function is not None:
            self.row_function = self.row_function.keep(rows)

    def left_out(self, classes: int) -> list[float]:
        """The losses of rows that are left out: no edge of what is made of them, as 0 may be."""
        return [1.0]

    def beside(self, *, gradient: bool) -> float:
        """How many tensors of the logits' size are held besides them."""
        return tensors_beside(
            self.logits,
            self.teacher.dtype,
            computed=self.teacher.computed,
            by_row=self.by_row,
            reverse=self.pair.reverse,
            gradient=gradient,
            softcap=gradient and self.softcap is not None,  # the tanh
        )

    def add(self, rows: slice, logits: Tensor) -> None:
        """Computes the losses of some rows."""
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        losses, _ = self.pair.forward(logits, self.teacher(rows), NONE, self.dtype)
        if self.by_row:
            self.each.append(losses.to(self.result))
        else:
            self.sums.append(losses.sum())

    def write_gradient(self, rows: slice, logits: Tensor) -> None:
        """The same, and the gradient of the logits before the soft-cap, over them."""
        if self.softcap is None:
            self._write_gradient(rows, logits)
            return
        tanh = logits.div_(self.softcap).tanh_()
        of_capped = tanh * self.softcap
        self._write_gradient(rows, of_capped)
        torch.ops.aten.tanh_backward.grad_input(of_capped, tanh, grad_input=logits)

    def _write_gradient(self, rows: slice, logits: Tensor) -> None:
        """The losses, and the gradient of logits after the soft-cap, over them."""
        teacher = self.teacher(rows)
        if not self.by_row:
            self.sums.append(self.pair.with_gradient_(logits, teacher, self.dtype, self.factor))
            return
        losses, statistics = self.pair.forward(logits, teacher, NONE, self.dtype)
        losses = losses.to(self.result)
        self.each.append(losses)
        assert self.row_function is not None
        (factor,) = self.row_function(rows, [losses])
        assert factor is not None
        self.pair.write_gradient(factor, logits, teacher, statistics)

    def results(self) -> tuple[Tensor]:
        """The loss of each row so far, or of all."""
        if self.by_row:
            return (torch.cat(self.each),)
        total = torch.stack(self.sums).sum(dtype=torch.float64) / self.divisor
        return (total.to(self.result),)
