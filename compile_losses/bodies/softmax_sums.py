"""The bodies of sums of exponentials by rows and by columns, and of their gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compile_losses.bodies.blocks import blocks
from compile_losses.bodies.rows import largest_of
from compile_losses.ops.checks import accumulation_type


def sums(results: Sequence[Tensor], input: Tensor, factor: Tensor | None) -> None:
    row_largest, row_sum, column_largest, column_sum = results
    column_largest.fill_(-torch.inf)
    column_sum.zero_()
    _add(row_largest, row_sum, column_largest, column_sum, input, factor)
    if input.shape[0] > 0:
        column_sum.masked_fill_(column_largest.isinf(), torch.nan)


def _add(
    row_largest: Tensor,
    row_sum: Tensor,
    column_largest: Tensor,
    column_sum: Tensor,
    input: Tensor,
    factor: Tensor | None = None,
) -> None:
    """Writes the results of rows, and adds these to those of columns so far."""
    dtype = accumulation_type(input.dtype)
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


def _origin(largest: Tensor) -> Tensor:
    """What exponentials are relative to, never infinite: what is -inf so far may not stay so."""
    return largest.masked_fill(largest.isinf(), 0)


def add(
    _: None,
    input: Tensor,
    row_largest: Tensor,
    row_sum: Tensor,
    row_own: Tensor,
    row_target: Tensor,
    column_largest: Tensor,
    column_sum: Tensor,
    column_own: Tensor,
    column_target: Tensor,
    first_row: int,
    ignore_index: int,
) -> None:
    rows, columns = input.shape
    if rows == 0 or columns == 0:
        return
    own, largest, total, target = (
        each.narrow(0, first_row, rows) for each in (row_own, row_largest, row_sum, row_target)
    )
    _add(largest, total, column_largest, column_sum, input)
    # Gathering a target that does not exist stops the device.
    place = torch.where(target == ignore_index, 0, target)
    picked = input.gather(1, place.unsqueeze(1)).squeeze(1).to(own.dtype)
    own.copy_(torch.where(target == ignore_index, own, picked))
    all_rows = len(row_target)
    place = column_target - first_row
    here = (column_target != ignore_index) & (place >= 0) & (place < rows)
    exists = (column_target >= 0) & (column_target < all_rows) | (column_target == ignore_index)
    place = torch.where(here, place, torch.where(exists, 0, all_rows))
    picked = input.gather(0, place.unsqueeze(0)).squeeze(0)
    column_own.copy_(torch.where(here, picked.to(column_own.dtype), column_own))


def gradient(
    _: None,
    input: Tensor,
    row_largest: Tensor,
    row_sum: Tensor,
    row_factor: Tensor,
    row_target: Tensor,
    column_largest: Tensor,
    column_sum: Tensor,
    column_factor: Tensor,
    column_target: Tensor,
    first_row: int,
    label_smoothing: float,
) -> None:
    dtype = accumulation_type(input.dtype)
    rows, columns = input.shape
    all_rows = len(row_target)
    row_largest, row_sum, row_factor, row_target = (
        each.narrow(0, first_row, rows) for each in (row_largest, row_sum, row_factor, row_target)
    )
    row_scale, column_scale = row_factor / row_sum, column_factor / column_sum
    places = torch.arange(columns, device=input.device)
    named = torch.arange(rows, device=input.device) + first_row
    for block in blocks(input.shape[:1], input.device, columns):
        values = block(input).to(dtype)
        by_rows = (values - _origin(block(row_largest)).unsqueeze(1)).exp_()
        by_rows.mul_(block(row_scale).unsqueeze(1))
        share = _share(block(row_target).unsqueeze(1) == places, label_smoothing, columns, dtype)
        by_rows.sub_(share.mul_(block(row_factor).unsqueeze(1)))
        by_columns = (values - _origin(column_largest)).exp_().mul_(column_scale)
        share = _share(column_target == block(named).unsqueeze(1), label_smoothing, all_rows, dtype)
        by_columns.sub_(share.mul_(column_factor))
        block(input).copy_(by_rows.add_(by_columns))


def _share(own: Tensor, label_smoothing: float, classes: int, dtype: torch.dtype) -> Tensor:
    """The target distribution."""
    return own.to(dtype).mul_(1 - label_smoothing).add_(label_smoothing / max(1, classes))
