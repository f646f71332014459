"""The body of sums of exponentials by rows and by columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compile_losses.bodies.blocks import blocks
from compile_losses.bodies.rows import largest_of
from compile_losses.ops.checks import accumulation_type


def sums(results: Sequence[Tensor], input: Tensor, factor: Tensor | None) -> None:
    row_largest, row_sum, column_largest, column_sum = results
    dtype = accumulation_type(input.dtype)
    column_largest.fill_(-torch.inf)
    column_sum.zero_()
    for block in blocks(input.shape[:1], input.device, input.shape[1]):
        values = block(input).to(dtype)
        if factor is not None:
            values = values * factor.reshape(()).to(dtype)
        largest = largest_of(values)
        block(row_largest).copy_(largest.squeeze(-1))
        block(row_sum).copy_((values - largest).exp_().sum(-1))
        most = torch.maximum(column_largest, largest_of(values.t()).squeeze(-1))
        so_far = column_sum * torch.where(column_largest == most, 1, (column_largest - most).exp())
        column_sum.copy_(so_far + (values - _origin(most)).exp_().sum(0))
        column_largest.copy_(most)
    if input.shape[0] > 0:
        column_sum.masked_fill_(column_largest.isinf(), torch.nan)


def _origin(largest: Tensor) -> Tensor:
    """What exponentials are relative to, never infinite: what is -inf so far may not stay so."""
    return largest.masked_fill(largest.isinf(), 0)
