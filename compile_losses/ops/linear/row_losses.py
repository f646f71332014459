"""Cross entropy, soft-cap and z-loss of a chunk of logits, and the gradient of these logits."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_losses.ops import cross_entropy, vocabulary_parallel
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.divisors import divisors, mean_of
from compile_losses.ops.linear.row_function import RowFunction

NONE, MEAN, SUM = (REDUCTIONS[name] for name in ("none", "mean", "sum"))


def squares_gradient(
    factor: Tensor | float,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    classes: int,
    ignore_index: int,
    softcap: float | None,
) -> Tensor:
    """The gradient of factor * logsumexp^2 of each row: 2 factor logsumexp * softmax.

    That is cross entropy's gradient in a shard of the classes that holds no target.

    Args:
        classes: a bound that all targets are below.
    """
    return vocabulary_parallel.gradient(
        2 * factor * stats.sum(1), logits, target, None, stats, classes,
        classes + logits.shape[1], NONE, ignore_index, 0.0, softcap,
    )  # fmt: skip


def gradient_from_statistics(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    grad_output: Tensor,
    grad_squares: Tensor | None,
    first_class: int,
    classes: int,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
) -> Tensor:
    """The gradient of logits of some of the classes, before the soft-cap; overwrites them.

    Args:
        weight, stats: of all classes.
        grad_squares: of each row's squared logsumexp, one number or one for each row.
    """
    of_squares = None
    if grad_squares is not None:
        of_squares = squares_gradient(
            grad_squares, logits, target, stats, classes, ignore_index, softcap
        )
    vocabulary_parallel.gradient_(
        grad_output, logits, target, weight, stats, first_class, classes, reduction, ignore_index,
        label_smoothing, softcap,
    )  # fmt: skip
    if of_squares is not None:
        logits += of_squares
    return logits


class RowLosses:
    """The loss of each row of logits, as its target and the options say.

    With reduction mean or sum the gradient is for the number grad_output, or for 1. With reduction
    none, grad_output is a function; without it there is no gradient.
    """

    def __init__(
        self,
        target: Tensor,  # int64 [rows]
        weight: Tensor | None,
        reduction: int,
        ignore_index: int,
        label_smoothing: float,
        softcap: float | None,
        z_loss: float,
        dtype: torch.dtype,  # that sums are made in
        result: torch.dtype,  # of the loss
        grad_output: Tensor | RowFunction | None,
    ) -> None:
        self.target, self.weight, self.reduction = target, weight, reduction
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.softcap, self.z_loss, self.dtype, self.result = softcap, z_loss, dtype, result
        nothing = target.new_zeros((), dtype=dtype)
        self.sums, self.square_sums = [nothing], [nothing]
        self.row_function = grad_output if isinstance(grad_output, RowFunction) else None
        self.each = [nothing.new_empty(0, dtype=result)]
        self.factor = self.z_factor = None
        if isinstance(grad_output, Tensor):
            self.factor = self.z_factor = grad_output.to(dtype).reshape(())
        if reduction == MEAN:
            self.total_weight, self.count = divisors(target, weight, ignore_index, dtype)
            one = self.count.new_ones(()) if self.factor is None else self.factor
            self.factor, self.z_factor = one / self.total_weight, one / self.count

    def keep(self, rows: Tensor) -> None:
        """Leaves out all rows but these, int64 [kept]. The others are ignored, and in no sum."""
        self.target = self.target[rows]
        if self.row_function is not None:
            self.row_function = self.row_function.keep(rows)

    @property
    def by_row(self) -> bool:
        return self.reduction == NONE

    def beside(self, *, gradient: bool) -> float:
        """How many tensors of the logits' size are held besides them."""
        return (self.z_loss != 0) * gradient

    def block_buffers(self) -> int:
        """How many tensors of the size of a block of classes the gradient takes besides it."""
        return int(self.z_loss != 0)

    def add(self, rows: slice, logits: Tensor) -> None:
        """Computes the losses of some rows."""
        losses, stats, _ = self._each(rows, logits)
        if self.by_row:
            if self.z_loss != 0:
                losses = losses + self.z_loss * self.squares(rows, stats)
            self.each.append(losses.to(self.result))
            return
        self.sums.append(losses.sum())
        if self.z_loss != 0:
            self.square_sums.append(self.squares(rows, stats).sum())

    def write_gradient(self, rows: slice, logits: Tensor) -> None:
        """The same, and the gradient of the logits before the soft-cap, over them."""
        if self.by_row:
            self._write_gradient_by_row(rows, logits)
            return
        of_squares = None
        if self.z_loss != 0:
            _, stats, _ = self._each(rows, logits)
            self.square_sums.append(self.squares(rows, stats).sum())
            factor: Tensor | float = self.z_loss
            if self.z_factor is not None:
                factor = self.z_loss * self.z_factor.to(self.dtype)
            of_squares = squares_gradient(
                factor, logits, self.target[rows], stats, logits.shape[1], self.ignore_index,
                self.softcap,
            )  # fmt: skip
        loss = cross_entropy.with_grad_(
            logits, self.target[rows], self.weight, SUM, self.ignore_index, self.label_smoothing,
            self.dtype, self.softcap, self.factor,
        )  # fmt: skip
        self.sums.append(loss)
        if of_squares is not None:
            logits += of_squares

    def _write_gradient_by_row(self, rows: slice, logits: Tensor) -> None:
        losses, stats, _ = self._each(rows, logits)
        if self.z_loss != 0:
            losses = losses + self.z_loss * self.squares(rows, stats)
        losses = losses.to(self.result)
        self.each.append(losses)
        assert self.row_function is not None
        (factor,) = self.row_function(rows, [losses])
        assert factor is not None
        of_squares = self.z_loss * factor.to(self.dtype) if self.z_loss != 0 else None
        gradient_from_statistics(
            logits, self.target[rows], self.weight, stats, factor, of_squares, 0, logits.shape[1],
            NONE, self.ignore_index, self.label_smoothing, self.softcap,
        )  # fmt: skip

    def results(self) -> tuple[Tensor]:
        """The loss of each row so far, or of all."""
        if self.by_row:
            return (torch.cat(self.each),)
        return (self._reduced().to(self.result),)

    def _reduced(self) -> Tensor:
        total = torch.stack(self.sums).sum(dtype=torch.float64)
        if self.reduction == MEAN:
            smoothed = self.weight is not None and self.label_smoothing > 0
            total = mean_of(total, self.total_weight, smoothed=smoothed)
        if self.z_loss == 0:
            return total
        squares = self.z_loss * torch.stack(self.square_sums).sum(dtype=torch.float64)
        return total + (squares / self.count if self.reduction == MEAN else squares)

    def _each(self, rows: slice, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cross entropy of each row, its statistics, and the total weight."""
        return cross_entropy.forward(
            logits, self.target[rows], self.weight, NONE, self.ignore_index, self.label_smoothing,
            self.dtype, self.softcap,
        )  # fmt: skip

    def squares(self, rows: slice, stats: Tensor) -> Tensor:
        """The square of each row's logsumexp, 0 for ignored rows."""
        return torch.where(self.target[rows] != self.ignore_index, stats.sum(1).square(), 0)
