"""Rows of logits, their soft-cap and their softmax."""

from __future__ import annotations

import torch
from torch import Tensor


def as_rows(tensor: Tensor, dim: int) -> Tensor:
    """A view [*rows, classes] of at least two dimensions, of classes along a dimension."""
    rows = tensor.movedim(dim, -1)
    return rows if rows.dim() > 1 else rows.unsqueeze(0)


def class_dim(tensor: Tensor) -> int:
    """Where the classes lie of logits [C], [N, C] or [N, C, d1, ...]."""
    return min(1, tensor.dim() - 1)


def column(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of rows, as a factor of the rows."""
    return tensor.to(dtype).unsqueeze(-1)


def capped(rows: Tensor, softcap: float | None) -> Tensor:
    return rows if softcap is None else (rows / softcap).tanh_().mul_(softcap)


def slope_of_cap(rows: Tensor, softcap: float) -> Tensor:
    """``1 - tanh(rows / softcap) ** 2``, with the digits that the tanh loses near 1."""
    x = rows / softcap
    near = 1 - x.tanh().square_()
    decay = x.abs_().mul_(-2).exp_()
    return torch.where(near > 0.5, near, 4 * decay / (1 + decay).square_())


def largest_of(rows: Tensor) -> Tensor:
    """The largest logit of each row, [*rows, 1]; -inf of no classes."""
    if rows.shape[-1] == 0:
        return rows.new_full((*rows.shape[:-1], 1), -torch.inf)
    return rows.amax(-1, keepdim=True)


def finite_or_zero(logit: Tensor) -> Tensor:
    """What sums of exponentials are relative to: -inf less -inf would make them nan."""
    return torch.where(logit == -torch.inf, 0, logit)


def add_at(rows: Tensor, place: Tensor, added: Tensor) -> None:
    """Adds a number to one class of each row; without atomics, since there is one a row."""
    if rows.shape[-1] > 0:
        place = place.unsqueeze(-1)
        rows.scatter_(-1, place, rows.gather(-1, place) + added)
