"""Statistics of the rows of a chunk of logits, and the gradient of these logits."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_losses.ops import row_statistics
from compile_losses.ops.linear.row_function import RowFunction

#: How many statistics there are, and how many of these, the first ones, have gradients.
COUNT, DIFFERENTIABLE = 6, 4


class RowStatistics:
    """What :mod:`compile_losses.ops.row_statistics` computes of each row of logits.

    The gradient is that for what the function makes of the statistics, a gradient for each of the
    first four or None; without a function there is no gradient.
    """

    by_row = True

    def __init__(
        self,
        like: Tensor,  # on the device
        target: Tensor | None,  # int64 [rows]
        ignore_index: int,
        softcap: float | None,
        dtype: torch.dtype,  # that sums are made in, and of the statistics
        row_function: RowFunction | None,
    ) -> None:
        self.target, self.ignore_index, self.softcap = target, ignore_index, softcap
        self.dtype, self.row_function = dtype, row_function
        nothing = [like.new_empty(0, dtype=dtype)] * (COUNT - 1)
        self.chunks: list[tuple[Tensor, ...]] = [(*nothing, like.new_empty(0, dtype=torch.int64))]

    def buffers(self, *, gradient: bool) -> int:
        """How many tensors of a chunk's size there are at a time, the logits included."""
        return 1

    def add(self, rows: slice, logits: Tensor) -> Tensor:
        """Computes the statistics of some rows; returns what their gradient is made of."""
        *found, stats = row_statistics.forward(logits, *self._options(rows))
        self.chunks.append(tuple(found))
        return stats

    def gradient(self, rows: slice, logits: Tensor) -> Tensor:
        """The same, and the gradient of the logits before the soft-cap, which lies over them."""
        stats = self.add(rows, logits)
        assert self.row_function is not None
        target, *options = self._options(rows)
        gradients = self.row_function(rows, self.chunks[-1])
        row_statistics.backward_(*gradients, logits, target, stats, *options)
        return logits

    def results(self) -> tuple[Tensor, ...]:
        """The statistics of all rows so far."""
        return tuple(torch.cat(parts) for parts in zip(*self.chunks, strict=True))

    def _options(self, rows: slice) -> tuple[Tensor | None, int, float | None]:
        target = None if self.target is None else self.target[rows]
        return target, self.ignore_index, self.softcap
