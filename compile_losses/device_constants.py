"""Measured constants of each class of devices, in one table: a column a class.

They are thresholds between two ways of computing a loss, and trade memory for time. A device that
nobody measured has the column of its kind. ``docs/performance.md`` has the measurements.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class DeviceConstants:
    """A column of the table.

    Attributes:
        least_rows: the rows of a chunk of a linear layer's rows
            (:mod:`compile_losses.ops.linear.chunk_size`) are a multiple of this. Fewer rows make
            the matrix products slower, and so do multiples of 128 or 512 in between.
        least_elements: if the weight's gradient is computed and takes no less than the logits, a
            chunk has about as many rows as give its part of input's gradient so many elements. With
            fewer, the product that makes this part does not keep a GPU's processors busy.
        least_classes: the least size of a block of classes. Fewer make the products slower.
        logits_bytes: the most that a chunk's logits take, unless ``least_rows`` rows take more.
        summed_bytes, part_of_weight, part_of_rows, most_bytes: if the weight's gradient is a sum
            over chunks, a chunk's logits may instead take ``summed_bytes``, or ``part_of_weight``
            of the gradient or ``part_of_rows`` of the logits of all rows, and at most
            ``most_bytes``. Each chunk but the first reads and writes the gradient, 4 bytes an
            element in a 16-bit dtype against 6 * rows operations.
        part_of_logits: the most that a chunk's logits take, as a part of the logits of all rows.
        hidden_without_kernels: without kernels a head is taken in chunks if it has at least so many
            features, unless memory is preferred. With fewer the passes of torch's ops over the
            logits take longer than what the products leave. None: with no number.
        operations_worth_waiting: if the matrix products take so many operations (some
            milliseconds), a GPU's host waits for the number of ignored rows.
        small_bytes, small_simple_bytes: if the largest argument has fewer bytes, a kernel's calls
            take longer than the kernel saves; the second is for losses of little arithmetic.
        statistics_bytes, statistics_classes: the fewest bytes of logits, and of classes, whose
            entropies and further statistics are read by one call. Of fewer classes Inductor reads a
            row once for all of them, and computes more in the same kernel.
        two_softmaxes_bytes: the fewest bytes of a matrix whose softmaxes by rows and by columns are
            computed after one read of it.
        two_way_rows, two_way_bytes: the most rows and bytes of a chunk of a matrix that has losses
            by rows and by columns and is not held.
        ahead_bytes: if a gradient has fewer bytes, the calls that hold one at a time
            (:mod:`compile_losses.ops.ahead`) take longer than the memory is worth.
        short_row_bytes: a row of logits with fewer bytes takes less time than the work once a row.
        short_pair_bytes, few_classes: the same for pairs of rows without a gradient. Inductor
            unrolls a reduction over fewer numbers.
        moves_gradients: whether Inductor computes a loss without a kernel and its gradient in
            one loop (:mod:`compile_losses.lower.elementwise`), and this is faster.
        least_gradient_bytes: if such a gradient has fewer bytes, calls take longer than one read
            saves.
        longest_row, shortest_row: a loss is first summed over rows of at least ``shortest_row``
            elements and, if there are few rows, at most ``longest_row``.
        many_rows: so many rows keep a device busy, whatever their length.
        merges_loops: whether Inductor merges the dimensions of a loop before it compares loops.
        most_functions: if a loss and its gradient take more calls, Inductor stores results between
            them in loops of their own; of account where it merges loops.
        writes_over: whether such a gradient may be written over what a layer made. Inductor's C++
            code for a loop with such a write fails for some losses (torch 2.13: a KeyError for
            ``softplus(-x).mean()``).
    """

    least_rows: int = 1024
    least_elements: int = 1 << 22
    least_classes: int = 4096
    logits_bytes: int = 192 << 20
    part_of_logits: float = 1.0
    summed_bytes: int = 192 << 20
    part_of_weight: float = 3 / 8
    part_of_rows: float = 1 / 16
    most_bytes: int = 512 << 20
    hidden_without_kernels: int | None = None
    operations_worth_waiting: float = 2e12

    small_bytes: int = 0
    small_simple_bytes: int = 0
    statistics_bytes: int = 64 << 20
    statistics_classes: int = 4096
    two_softmaxes_bytes: int = 64 << 20
    ahead_bytes: int = 32 << 20
    two_way_rows: int = 4096
    two_way_bytes: int = 1 << 30
    short_row_bytes: int = 0
    short_pair_bytes: int = 0
    few_classes: int = 0

    moves_gradients: bool = True
    least_gradient_bytes: int = 1 << 20
    longest_row: int = 8192
    shortest_row: int = 256
    many_rows: int = 512
    merges_loops: bool = False
    most_functions: int = 60
    writes_over: bool = True


_CPU = DeviceConstants(
    hidden_without_kernels=512,
    small_bytes=1 << 20,
    small_simple_bytes=2 << 20,
    statistics_bytes=1 << 20,
    statistics_classes=1024,
    two_softmaxes_bytes=4 << 20,
    least_gradient_bytes=8 << 20,
    merges_loops=True,
    writes_over=False,
)
#: Measured on an H200; also for GPUs that nobody measured.
_GPU = DeviceConstants(short_row_bytes=20, short_pair_bytes=28, few_classes=8)
#: For an H100. Each further sum over the weight's gradient takes about 1% of a step there. An H200
#: has the same arithmetic and 1.4 times the bandwidth, and takes torch's time with less memory.
_H100 = replace(
    _GPU, part_of_logits=3 / 8, summed_bytes=384 << 20, part_of_weight=3 / 4, most_bytes=768 << 20
)

#: In bytes. H100s have 80 to 96 GB, an H200 has 141 GB.
_MOST_OF_AN_H100 = 100 << 30

#: The columns by the names of the classes.
COLUMNS = {"cpu": _CPU, "gpu": _GPU, "h100": _H100}


def constants_of(device: torch.device) -> DeviceConstants:
    """The column of a device's class."""
    return COLUMNS[_class_of(device.type, device.index)]


@functools.cache
def _class_of(type: str, index: int | None) -> str:
    if type in ("cpu", "meta"):
        return "cpu"
    if type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return "gpu"
    properties = torch.cuda.get_device_properties(index)
    is_hopper = (properties.major, properties.minor) == (9, 0)
    return "h100" if is_hopper and properties.total_memory <= _MOST_OF_AN_H100 else "gpu"


def memory_of(device: torch.device) -> int | None:
    """The bytes of a GPU's memory; None of other devices, and without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(device).total_memory


def exceeds_memory(device: torch.device, size: int) -> bool:
    """Whether so many bytes are more than a GPU has; False of other devices."""
    memory = memory_of(device)
    return memory is not None and size > memory


def is_worth_waiting(device: torch.device, operations: int) -> bool:
    """Whether a head whose products take so many operations may wait for the number of its rows."""
    return device.type == "cpu" or operations >= constants_of(device).operations_worth_waiting


def rows_of_equal_threads(device: torch.device) -> int:
    """How many rows a kernel may have so that each has as many threads as if it were the only one.

    A GPU's kernels share a row among at most 512 threads, and among fewer if the threads of all
    rows, 512 each, would not fit on the device at a time.
    """
    if _class_of(device.type, device.index) == "cpu":
        return sys.maxsize
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count * 2048 // 512
