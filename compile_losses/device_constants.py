"""What was measured of each class of devices, in one table: a column a class.

Thresholds between two ways of computing a loss, and how much memory buys how much time. A device
that nobody measured has the column of its kind. ``docs/performance.md`` says what was measured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class DeviceConstants:
    """A column of the table.

    Attributes:
        least_rows: chunks of a linear layer's rows (:mod:`compile_losses.ops.linear.chunk_size`)
            have multiples of so many. Fewer make the matrix products slower, and so do multiples
            of 128 or 512 between them.
        least_elements: chunks have about as many rows as give input's gradient of a chunk so many
            elements, where the weight's gradient is computed and takes no less than the logits.
            With fewer, the product that makes it does not keep a GPU's processors busy.
        least_classes: blocks of classes have at least so many. Fewer make the products slower.
        logits_bytes: what the logits of a chunk may take, unless ``least_rows`` rows take more.
        summed_bytes, part_of_weight, most_bytes: where the weight's gradient is a sum over chunks,
            logits may take the first instead, or this part of that gradient and at most the last:
            each chunk but the first reads and writes the gradient, 4 bytes an element in a 16-bit
            dtype against 6 * rows operations.
        part_of_logits: but no more than this part of the logits of all rows.
        operations_worth_waiting: a GPU's host waits for the number of ignored rows where the matrix
            products take so many operations, which are some milliseconds.
        small_bytes, small_simple_bytes: with a largest argument of fewer bytes, the calls of a
            kernel take longer than it saves; the second of losses of little arithmetic.
        short_row_bytes: a row of logits with fewer bytes takes less time than what is done once a
            row.
        short_pair_bytes, few_classes: the same of pairs of rows without a gradient. Inductor
            unrolls a reduction over fewer numbers.
        moves_gradients: whether Inductor adds up a loss without a kernel and writes its gradient in
            one loop (:mod:`compile_losses.lower.elementwise`), and that is faster.
        least_gradient_bytes: with fewer bytes of such a gradient, calls take longer than one read
            saves.
        longest_row, shortest_row: elements of a row that is summed first, at most where there are
            few rows, and at least.
        many_rows: so many rows keep a device busy, whatever their length.
    """

    least_rows: int = 1024
    least_elements: int = 1 << 22
    least_classes: int = 4096
    logits_bytes: int = 192 << 20
    part_of_logits: float = 1.0
    summed_bytes: int = 192 << 20
    part_of_weight: float = 3 / 8
    most_bytes: int = 512 << 20
    operations_worth_waiting: float = 2e12

    small_bytes: int = 0
    small_simple_bytes: int = 0
    short_row_bytes: int = 0
    short_pair_bytes: int = 0
    few_classes: int = 0

    moves_gradients: bool = True
    least_gradient_bytes: int = 1 << 20
    longest_row: int = 8192
    shortest_row: int = 256
    many_rows: int = 512


_CPU = DeviceConstants(
    small_bytes=1 << 20,
    small_simple_bytes=2 << 20,
    moves_gradients=False,
)
#: Of an H200, on which these were measured, and of GPUs that nobody measured.
_GPU = DeviceConstants(short_row_bytes=20, short_pair_bytes=28, few_classes=8)
#: Of an H100. Each further sum over the weight's gradient takes about 1% of a step there. An H200,
#: with the same arithmetic and 1.4 times the bandwidth, takes torch's time with less memory.
_H100 = replace(
    _GPU, part_of_logits=3 / 8, summed_bytes=384 << 20, part_of_weight=3 / 4, most_bytes=768 << 20
)

#: In bytes: H100s have 80 to 96 GB, an H200 has 141.
_MOST_OF_AN_H100 = 100 << 30

#: By the names of the classes.
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
