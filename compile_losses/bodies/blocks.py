"""Blocks of tensors, and the sums of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

#: A part of each tensor whose first dimensions are those that were cut into blocks.
Block: TypeAlias = Callable[[Tensor], Tensor]

#: So many elements has a block. A CPU's block and what is computed of it lie in its cache. For
#: other devices blocks bound the memory, and are large enough for calls to take no time.
CPU_ELEMENTS, OTHER_ELEMENTS = 1 << 17, 1 << 24
#: So many elements of a block of rows has each thread of a CPU. With fewer torch uses fewer
#: threads.
THREAD_ELEMENTS = 1 << 15

#: So many numbers are added up by one thread.
_RUN = 1024

#: Devices without float64.
_NARROW = ("mps",)


def blocks(
    shape: Sequence[int], device: torch.device, width: int = 1, *, by_threads: bool = False
) -> Iterator[Block]:
    """Cuts dimensions of these sizes into blocks, along the largest of them.

    Args:
        width: the number of elements behind each place.
        by_threads: whether they may depend on the number of a CPU's threads, since no result does.
    """
    if is_traced():
        yield _whole
        return
    limit = CPU_ELEMENTS if device.type == "cpu" else OTHER_ELEMENTS
    if device.type == "cpu" and by_threads:
        limit = THREAD_ELEMENTS * torch.get_num_threads()
    elements = math.prod(shape) * width
    if elements <= limit or not shape:
        yield _whole
        return
    dim = max(range(len(shape)), key=shape.__getitem__)
    size = shape[dim]
    step = max(1, limit * size // elements)
    for first in range(0, size, step):
        yield partial(torch.narrow, dim=dim, start=first, length=min(step, size - first))


def is_traced() -> bool:
    """Whether a graph is made of a body. In a graph no number is known, and its compiler chooses
    what is computed at a time."""
    return get_proxy_mode() is not None


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def sum_type(device: torch.device) -> torch.dtype:
    """The dtype of sums over blocks and rows."""
    return torch.float32 if device.type in _NARROW else torch.float64


def sum_of_all(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of a block, in the same order for any number of a CPU's threads."""
    flat = values.flatten()
    whole = len(flat) - len(flat) % _RUN
    runs = flat[:whole].view(-1, _RUN).sum(1, dtype=dtype)
    return (
        sum_of_all(runs, dtype) + flat[whole:].sum(dtype=dtype) if whole else flat.sum(dtype=dtype)
    )


def total(sums: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sum of the sums of blocks, in their wide dtype."""
    dtype = sum_type(like.device)
    if not sums:
        return torch.zeros((), dtype=dtype, device=like.device)
    return torch.stack([each.to(dtype) for each in sums]).sum()


def wide_sum(tensor: Tensor, dim: int = -1) -> Tensor:
    """The sum of one dimension in the dtype of sums, which the dimension keeps with one place."""
    return tensor.sum(dim, keepdim=True, dtype=sum_type(tensor.device))
