"""The gradient of one weight, a sum over several calls.

A call that makes a weight's gradient adds up products of chunks of rows. If other calls have rows
of the same weight, what each adds up goes into one sum (``fused::joined_heads``), and none has a
gradient of the weight of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from compile_losses.ops.linear.matrix_products import add_product


@dataclass
class WeightSum:
    """A sum of products over all rows of several calls.

    Attributes:
        rows: how many rows the calls have in all.
        dtype: of the gradient.
        places: those results of the call that runs which go into the sum.
        total: the sum so far, in ``dtype`` or wider; None before the first product.
    """

    rows: int
    dtype: torch.dtype
    places: Collection[int] = ()
    total: Tensor | None = None

    def add(self, a: Tensor, b: Tensor, *, wide: bool) -> None:
        """Adds ``a @ b``, the product of a chunk of rows.

        Args:
            wide: whether the sum has to be in float32; the first product decides.
        """
        starts = self.total is None
        if self.total is None:
            dtype = torch.promote_types(self.dtype, torch.float32) if wide else self.dtype
            self.total = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
        add_product(self.total, a, b, starts=starts)

    def begin(self, like: Tensor, shape: Sequence[int]) -> None:
        """Has a sum of zeros if no product was added yet; for calls without rows."""
        if self.total is None:
            self.total = like.new_zeros(shape, dtype=self.dtype)

    def result(self) -> Tensor:
        """The gradient, once all calls have run."""
        assert self.total is not None
        return self.total.to(self.dtype)


_current: ContextVar[WeightSum | None] = ContextVar("weight_sum", default=None)


def current_sum() -> WeightSum | None:
    """The sum that the call which runs adds to; None if its gradient is its own."""
    return _current.get()


def rows_of_sum(count: int) -> int:
    """Over how many rows the weight's gradient is a sum.

    Args:
        count: the rows of the call that runs.
    """
    total = current_sum()
    return count if total is None else max(count, total.rows)


@contextmanager
def adds_to(total: WeightSum, places: Collection[int]) -> Iterator[None]:
    """While a call runs, its results at some places are parts of a sum, and not made."""
    total.places = places
    token = _current.set(total)
    try:
        yield
    finally:
        _current.reset(token)
