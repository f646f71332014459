"""How many rows of logits are held at a time, and where.

Fewer rows hold less memory, but the weight's gradient is read and written once more for each chunk.
How much memory that is worth depends on the device (:mod:`compile_losses.device_constants`). What a
loss holds besides the logits, such as a teacher's, is for a part of a chunk's rows at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from compile_losses.device_constants import DeviceConstants, constants_of
from compile_losses.ops.checks import NARROW
from compile_losses.ops.linear.block_layout import BlockLayout, smallest_scratch

#: Sums over this many chunks may be rounded to a 16-bit dtype at each; that stays within the
#: accuracy of a gradient that is itself rounded to it. Sums over more are kept in float32.
MOST_NARROW_SUMS = 8

#: The part of the budget that the buffers of the first rows may take. The rest is for what is not
#: counted: statistics, the gathered rows' indices, what the allocator rounds up.
COUNTED = 9 / 10

#: A chunk is computed in so many parts if the loss holds tensors of its size besides the logits.
PARTS = 2


@dataclass(frozen=True)
class Plan:
    """How the gradients of all rows are computed.

    ``first`` says how the logits of the first rows lie in the weight's gradient, if they do; the
    others, or all, are computed in chunks of ``chunk`` rows.
    """

    chunk: int
    first: BlockLayout | None = None
    #: Bytes that are read and written for the sums, and for logits that are read twice.
    moved: int = 0
    #: Bytes of the buffers that are held at a time.
    held: int = 0

    @property
    def first_rows(self) -> int:
        return 0 if self.first is None else self.first.rows


def plan(
    rows: int,
    hidden: int,
    classes: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    needs_input: bool = True,
    gathered: bool = False,
) -> Plan:
    """The cheapest way to the gradients of a loss with one grad_output, the weight's among them.

    Each chunk of rows but the first reads and writes the weight's gradient once more. A first chunk
    whose logits lie in that gradient holds far more rows in the same memory, often all rows. It
    saves the reads and writes of the chunks that it replaces. In return its logits are read once
    more, and the gradient of its input is a sum over the blocks of classes. The bytes that either
    way moves are compared; the products are the same. Many features and classes gain (8192 x 4096
    x 128256, 4096 x 8192 x 262144), few do not (8192 x 1024 x 151936).

    The scratch buffer of the first rows takes at most COUNTED of the budget of chunk_rows. The
    other chunks are as large as without first rows. A gradient in a 16-bit dtype is the sum of at
    most MOST_NARROW_SUMS products. If all rows fit one chunk, there are no first rows.

    Args:
        rows, hidden, classes, dtype, device: as those of chunk_rows.
        needs_input: whether the gradient of input is computed.
        gathered: whether the rows are a copy of some of input's.
    """
    constants = constants_of(device)
    least = constants.least_rows
    item, narrow = dtype.itemsize, dtype in NARROW
    weight_bytes, row_bytes = classes * hidden * item, classes * item
    chunk = chunk_rows(rows, hidden, classes, dtype, device, sums_weight=True)
    chunks = -(-rows // chunk)
    moved = 2 * max(0, chunks - 1) * weight_bytes
    if sums_in_float32(rows, chunk, dtype):
        moved = 2 * chunks * classes * hidden * 4
    held = chunk * row_bytes
    best = Plan(chunk, None, moved, held)
    if moved == 0:
        return best

    # A row of input's gradient: in a wide dtype the sum is the gradient itself.
    sum_bytes = hidden * (4 if narrow else item) if needs_input else 0
    room = int(COUNTED * _budget_of_sums(rows, hidden, classes, dtype, constants))
    most_blocks = classes // constants.least_classes
    # Rows beyond hidden are in the scratch buffer, with all of their classes.
    most = min(rows, hidden + room // row_bytes)
    for first in sorted({*range(least, most + 1, least), *[rows] * (most == rows)}):
        # The sum lies in the memory of input's gradient if that has twice as many rows.
        beside = sum_bytes * (narrow and 2 * first > rows) + gathered * hidden * item
        fitting = (room - first * beside) // item
        layout = _fewest_blocks(first, hidden, classes, most_blocks, fitting)
        rest = -(-(rows - first) // chunk)
        if layout is None or (narrow and 1 + rest > MOST_NARROW_SUMS):
            continue
        moved = 2 * rest * weight_bytes + first * row_bytes + 2 * layout.blocks * first * sum_bytes
        if moved < best.moved:
            of_first = layout.scratch_elements * item + first * beside
            best = Plan(chunk, layout, moved, max(of_first, held * (rest > 0)))
    return best


def _fewest_blocks(
    rows: int, hidden: int, classes: int, most: int, fitting: int
) -> BlockLayout | None:
    """The layout with the fewest blocks, and at most so many, whose scratch buffer has at most so
    many elements."""
    for blocks in range(2, most + 1):
        layout = smallest_scratch(rows, hidden, classes, blocks)
        if layout is not None and layout.scratch_elements <= fitting:
            return layout
    return None


def chunk_rows(
    rows: int,
    hidden: int,
    classes: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    beside: float = 0,
    sums_weight: bool = False,
    is_taken: bool = False,
) -> int:
    """How many rows of logits to compute at a time.

    As many multiples of the device's least_rows as the budget holds, and never fewer than one, or
    than least_elements asks for. If a 16-bit weight gradient would be the sum of more than
    MOST_NARROW_SUMS chunks, it would take a sum in float32 beside it. Then chunks are larger: so
    large that they do without that sum, if they need no more memory than the sum; else as large as
    the gradient itself. Without sums of a weight's gradient fewer rows cost little time. So if the
    head is taken, and the least chunk needs more than the budget, a chunk of few more rows has at
    most a fourth of them, in multiples of a fourth of least_rows, and two of these at least.

    Args:
        rows, hidden, classes: input is [rows, hidden], the logits [rows, classes].
        dtype: of the logits.
        device: of the input.
        beside: tensors of the logits' size that the loss needs besides them.
        sums_weight: whether the gradient of the weight, [classes, hidden], is computed.
        is_taken: whether the head is computed in chunks in any case; else the answer decides that.

    Returns:
        The rows of every chunk but the last, which has what is left.
    """
    constants = constants_of(device)
    buffers = 1 + beside / PARTS
    row_bytes = max(1, math.ceil(classes * dtype.itemsize * buffers))
    budget = constants.logits_bytes
    if sums_weight:
        budget = _budget_of_sums(rows, hidden, classes, dtype, constants)
    least = constants.least_rows

    def whole(rows: int) -> int:
        return max(1, rows // least) * least

    fitting = whole(budget // row_bytes)
    if sums_weight and hidden > 0:
        busy = whole(constants.least_elements // hidden + least // 2)
        fitting = max(fitting, min(busy, whole(int(hidden / buffers))))
    if sums_weight and sums_in_float32(rows, fitting, dtype):
        narrow = -(-rows // (MOST_NARROW_SUMS * least)) * least
        if (narrow - fitting) * row_bytes <= 4 * hidden * classes:
            fitting = narrow
        else:
            fitting = max(fitting, whole(int(hidden / buffers)))
    is_large = rows > least and least * classes * dtype.itemsize > constants.logits_bytes
    if is_taken and not sums_weight and is_large:
        fitting = min(fitting, max(2, rows // least) * least // 4)
    return max(1, min(rows, fitting))


def part_rows(chunk: int, device: torch.device, beside: float) -> int:
    """How many rows of a chunk a loss computes at a time.

    All, if it holds nothing besides the logits. A chunk of fewer rows than the device's least_rows
    is one part too: products of even fewer rows would be slower.

    Args:
        beside: as that of chunk_rows.
    """
    is_whole = beside == 0 or chunk < constants_of(device).least_rows
    return chunk if is_whole else -(-chunk // PARTS)


def held_rows(chunk: int, device: torch.device, beside: float) -> int:
    """How many rows of a tensor of the logits' kind take as much as all that a chunk holds."""
    return chunk + math.ceil(beside * part_rows(chunk, device, beside))


def sums_in_float32(rows: int, chunk: int, dtype: torch.dtype) -> bool:
    """Whether a sum over chunks is kept in float32 beside a gradient of this dtype."""
    return dtype in NARROW and -(-rows // chunk) > MOST_NARROW_SUMS


def _budget_of_sums(
    rows: int, hidden: int, classes: int, dtype: torch.dtype, constants: DeviceConstants
) -> int:
    """The bytes that logits may take if the weight's gradient is a sum over chunks."""
    of_weight = constants.part_of_weight * hidden * classes * dtype.itemsize
    of_logits = rows * classes * dtype.itemsize
    part = int(max(of_weight, constants.part_of_rows * of_logits))
    most = max(constants.summed_bytes, min(part, constants.most_bytes))
    return max(constants.logits_bytes, min(most, int(constants.part_of_logits * of_logits)))
