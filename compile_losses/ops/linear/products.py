"""The matrix products of linear cross entropy, a chunk of rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from compile_losses.ops.linear.chunk_size import sums_in_float32

#: Products that are added to a sum in float32 are made in blocks of about this size.
BLOCK_BYTES = 64 * 2**20

#: Which rows, their input and their logits, which may be overwritten.
Chunk: TypeAlias = tuple[slice, Tensor, Tensor]


def chunks_of_logits(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    chunk: int,
    kept: Tensor | None = None,
) -> Iterator[Chunk]:
    """Of the rows kept; their logits lie in one buffer for all."""
    count = len(input) if kept is None else len(kept)
    buffer = input.new_empty((min(chunk, count), len(linear_weight)))
    for first in range(0, count, chunk):
        rows = slice(first, min(first + chunk, count))
        part = input[rows] if kept is None else input.index_select(0, kept[rows])
        logits = buffer[: len(part)]
        if linear_bias is None:
            torch.mm(part, linear_weight.t(), out=logits)
        else:
            torch.addmm(linear_bias, part, linear_weight.t(), out=logits)
        yield rows, part, logits


class WeightGradient:
    """The sum over chunks of gradient.t() @ input, in float32 where it would be rounded often."""

    def __init__(self, linear_weight: Tensor, rows: int, chunk: int) -> None:
        self.total = linear_weight.new_empty(linear_weight.shape)
        self.wide: Tensor | None = None
        if rows == 0:
            self.total.zero_()
        elif sums_in_float32(rows, chunk, linear_weight.dtype):
            classes, hidden = linear_weight.shape
            self.wide = self.total.new_zeros((classes, hidden), dtype=torch.float32)
            block = max(1, BLOCK_BYTES // max(1, hidden * linear_weight.dtype.itemsize))
            self.block = self.total.new_empty((min(classes, block), hidden))

    def add(self, rows: slice, gradient: Tensor, input: Tensor) -> None:
        if self.wide is not None:
            for first in range(0, len(self.total), len(self.block)):
                columns = gradient[:, first : first + len(self.block)]
                block = self.block[: columns.shape[1]]
                torch.mm(columns.t(), input, out=block)
                self.wide[first : first + len(block)] += block
        elif rows.start == 0:
            torch.mm(gradient.t(), input, out=self.total)
        else:
            self.total.addmm_(gradient.t(), input)

    def result(self) -> Tensor:
        return self.total if self.wide is None else self.total.copy_(self.wide)


def gradients_of(
    chunks: Iterable[Chunk],
    linear_weight: Tensor,
    rows: int,
    chunk: int,
    needs: tuple[bool, bool, bool],
    dtype: torch.dtype,
    gradient: Callable[[slice, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, linear_weight and linear_bias; empty where they are not needed.

    Args:
        rows, chunk: how many rows there are in all chunks, and in each but the last.
        dtype: of the bias's sum.
        gradient: that of a chunk's logits.
    """
    needs_input, needs_weight, needs_bias = needs
    classes, hidden = linear_weight.shape
    grad_input = linear_weight.new_empty((rows, hidden) if needs_input else 0)
    grad_weight = WeightGradient(linear_weight, rows, chunk) if needs_weight else None
    grad_bias = linear_weight.new_zeros(classes if needs_bias else 0, dtype=dtype)
    for part, inputs, logits in chunks:
        of_logits = gradient(part, logits)
        if needs_input:
            torch.mm(of_logits, linear_weight, out=grad_input[part])
        if grad_weight is not None:
            grad_weight.add(part, of_logits, inputs)
        if needs_bias:
            grad_bias += of_logits.sum(0)
        del of_logits  # before the next chunk's is made
    return (
        grad_input,
        linear_weight.new_empty(0) if grad_weight is None else grad_weight.result(),
        grad_bias.to(linear_weight.dtype),
    )
