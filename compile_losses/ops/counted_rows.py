"""Which rows of a loss count, and how many these are, for a host that does not wait.

``fused::counted_rows(Tensor mask) -> Tensor`` is put at the front of compiled graphs. Mask is bool,
[rows]. The result is int64, [rows + 1]: the numbers of the rows that count in their order, then
zeros, and last how many rows count. On a GPU their number goes to the host at once. The head, which
needs it, comes after the whole trunk; by then the number is there.

Rows that do not count are left out of a head if they are at least one in EIGHTH.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from compile_losses import library

#: Rows are left out if they are at least one in this many.
EIGHTH = 8

counted_rows = library.define("counted_rows(Tensor mask) -> Tensor")


def is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is captured, which would keep the number of rows that it meets."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class KeptRows:
    """The rows of a mask, bool [rows]; a device counts them while the host goes on."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.number = _Number(mask.sum())

    def indices(self) -> Tensor | None:
        """Waits for the device. None if too few rows do not count to leave them out."""
        if not is_worthwhile(self.number.read(), len(self.mask)):
            return None
        return self.mask.nonzero().squeeze(1)


class CountedRows:
    """The rows that ``counted_rows`` has counted.

    Args:
        counted: its result.
        rows: how many rows there are in all.
    """

    def __init__(self, counted: Tensor, rows: int) -> None:
        if counted.dtype != torch.int64 or counted.shape != (rows + 1,):
            raise RuntimeError(
                f"counted_rows: expected counted to be int64 of shape {[rows + 1]}, "
                f"got {counted.dtype} {list(counted.shape)}"
            )
        self.counted, self.rows = counted, rows

    def indices(self) -> Tensor | None:
        """Waits for the device, if it has not counted yet. None if too few rows do not count, or a
        CUDA graph is captured."""
        if is_captured(self.counted):
            return None
        number = _numbers.get(self.counted)
        count = int(self.counted[-1]) if number is None else number.read()
        return self.counted[:count] if is_worthwhile(count, self.rows) else None


def is_worthwhile(count: int, rows: int) -> bool:
    """Whether so few of the rows count that the others are left out."""
    return count * EIGHTH <= rows * (EIGHTH - 1)


class _Number:
    """A number of a device, on its way to the host."""

    def __init__(self, number: Tensor) -> None:
        self.number = number.to("cpu", non_blocking=True)
        self.arrived: torch.cuda.Event | None = None
        if number.is_cuda:
            self.arrived = torch.cuda.current_stream(number.device).record_event()

    def read(self) -> int:
        if self.arrived is not None:
            self.arrived.synchronize()
        return int(self.number)


#: The numbers of rows that were counted, while the results are there.
_numbers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _counted(mask: Tensor) -> Tensor:
    _check(mask)
    rows = len(mask)
    counts = mask.cumsum(0)
    result = counts.new_zeros(rows + 1)
    # Rows that do not count go to the last place, which then gets the number.
    places = torch.where(mask, counts - 1, rows)
    result.scatter_(0, places, torch.arange(rows, device=mask.device))
    result[rows:] = counts[-1:] if rows else 0
    if not is_captured(mask):
        _numbers[result] = _Number(result[-1])
    return result


def _check(mask: Tensor) -> None:
    if mask.dtype != torch.bool or mask.dim() != 1:
        raise RuntimeError(
            f"counted_rows: expected mask to be bool of shape [rows], "
            f"got {mask.dtype} {list(mask.shape)}"
        )


def _fake(mask: Tensor) -> Tensor:
    _check(mask)
    return mask.new_empty(mask.shape[0] + 1, dtype=torch.int64)


library.compose(counted_rows, _counted, _fake)
