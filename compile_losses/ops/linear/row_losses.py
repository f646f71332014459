"""Cross entropy, soft-cap and z-loss of a chunk of logits, and the gradient of these logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compile_losses.ops import cross_entropy, vocabulary_parallel
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.divisors import divisors, mean_of
from compile_losses.ops.linear.row_function import RowFunction

NONE, MEAN, SUM = (REDUCTIONS[name] for name in ("none", "mean", "sum"))


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
        self.all_targets = target
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.softcap, self.z_loss, self.dtype, self.result = softcap, z_loss, dtype, result
        nothing = target.new_zeros((), dtype=dtype)
        self.sums, self.square_sums = [nothing], [nothing]
        self.row_function = grad_output if isinstance(grad_output, RowFunction) else None
        self.each = [nothing.new_empty(0, dtype=result)]
        self.factor: Tensor | None = None
        self.z_factor: Tensor | None = None
        if reduction != NONE:
            one = nothing.new_ones(())
            if isinstance(grad_output, Tensor):
                one = grad_output.to(dtype).reshape(())
            self.factor = self.z_factor = one
        if reduction == MEAN:
            self.total_weight, self.count = divisors(target, weight, ignore_index, dtype)
            self.factor, self.z_factor = one / self.total_weight, one / self.count

    def keep(self, rows: Tensor) -> None:
        """Leaves out all rows but these, int64 [kept]. The others are in no sum."""
        self.target = self.all_targets[rows]
        if self.row_function is not None:
            self.row_function = self.row_function.keep(rows)

    def left_out(self, classes: int) -> list[Tensor]:
        """The losses of rows that are left out: 0 if they are ignored, else those of equal logits,
        with which what is made of them is as finite as with any."""
        ignored = self.all_targets == self.ignore_index
        return [torch.where(ignored, 0.0, math.log(classes))]

    @property
    def by_row(self) -> bool:
        return self.reduction == NONE

    def beside(self, *, gradient: bool) -> float:
        """How many tensors of the logits' size are held besides them."""
        return 0

    def add(self, rows: slice, logits: Tensor) -> Tensor:
        """Computes the losses of some rows; returns their statistics."""
        losses, stats, _ = cross_entropy.forward(
            logits, self.target[rows], self.weight, NONE, self.ignore_index, self.label_smoothing,
            self.dtype, self.softcap,
        )  # fmt: skip
        if self.by_row:
            if self.z_loss != 0:
                losses = losses + self.z_loss * self.squares(rows, stats)
            self.each.append(losses.to(self.result))
            return stats
        self.sums.append(losses.sum())
        if self.z_loss != 0:
            self.square_sums.append(self.squares(rows, stats).sum())
        return stats

    def write_gradient(self, rows: slice, logits: Tensor) -> None:
        """Computes the losses, and the gradient of the logits before the soft-cap, over them."""
        if not self.by_row and self.z_loss == 0:
            loss = cross_entropy.with_grad_(
                logits, self.target[rows], self.weight, SUM, self.ignore_index,
                self.label_smoothing, self.dtype, self.softcap, self.factor,
            )  # fmt: skip
            self.sums.append(loss)
            return
        stats = self.add(rows, logits)
        factor, z_factor = self.factor, self.z_factor
        if self.by_row:
            assert self.row_function is not None
            (factor,) = self.row_function(rows, self.each[-1:])
            z_factor = factor
        assert factor is not None
        assert z_factor is not None
        vocabulary_parallel.gradient_(
            factor, logits, self.target[rows], self.weight, stats, 0, logits.shape[1],
            NONE if self.by_row else SUM, self.ignore_index, self.label_smoothing, self.softcap,
            self.grad_squares(z_factor),
        )  # fmt: skip

    def grad_squares(self, of_losses: Tensor) -> Tensor | None:
        """The gradient of the squares, from that of the rows' losses; None without a z-loss."""
        return self.z_loss * of_losses.to(self.dtype) if self.z_loss != 0 else None

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

    def squares(self, rows: slice, stats: Tensor) -> Tensor:
        """The square of each row's logsumexp, 0 for ignored rows."""
        return torch.where(self.target[rows] != self.ignore_index, stats.sum(1).square(), 0)
