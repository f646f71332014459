"""How many rows of logits are held at a time."""

from __future__ import annotations

import torch

#: What the logits of a chunk may take, unless LEAST_ROWS rows take more.
LOGITS_BYTES = 192 * 2**20

#: They may take this part of the weight's gradient instead, where that is computed, and at most so
#: many bytes: each chunk but the first reads and writes that gradient, 4 bytes an element in a
#: 16-bit dtype against 6 * rows operations.
PART_OF_WEIGHT = 3 / 8
MOST_BYTES = 512 * 2**20

#: Chunks have multiples of so many rows: fewer make the matrix products slower, and so do multiples
#: of 128 or 512 between them.
LEAST_ROWS = 1024

#: Sums over this many chunks may be rounded to a 16-bit dtype at each; that stays within the
#: accuracy of a gradient that is itself rounded to it. Sums over more are kept in float32.
MOST_NARROW_SUMS = 8

NARROW = (torch.bfloat16, torch.float16)


def chunk_rows(
    rows: int,
    hidden: int,
    classes: int,
    dtype: torch.dtype,
    *,
    buffers: int = 1,
    sums_weight: bool = False,
    budget: int | None = None,
) -> int:
    """How many rows of logits to compute at a time.

    As many multiples of LEAST_ROWS as the budget holds, and never fewer than one. Where a 16-bit
    weight gradient would be the sum of more than MOST_NARROW_SUMS chunks, which takes a sum in
    float32 beside it, chunks are larger: as large as it takes to do without that sum, if they need
    no more memory than it; else as large as that gradient itself.

    Args:
        rows, hidden, classes: input is [rows, hidden], the logits [rows, classes].
        dtype: of the logits.
        buffers: tensors of the logits' size that the loss needs.
        sums_weight: whether the gradient of the weight, [classes, hidden], is computed.
        budget: bytes that the buffers may take; by default LOGITS_BYTES or PART_OF_WEIGHT.

    Returns:
        The rows of every chunk but the last, which has what is left.
    """
    row_bytes = max(1, classes * dtype.itemsize * buffers)
    if budget is None:
        weight_bytes = hidden * classes * dtype.itemsize if sums_weight else 0
        budget = max(LOGITS_BYTES, min(int(PART_OF_WEIGHT * weight_bytes), MOST_BYTES))
    fitting = _whole(budget // row_bytes)
    if sums_weight and sums_in_float32(rows, fitting, dtype):
        narrow = -(-rows // (MOST_NARROW_SUMS * LEAST_ROWS)) * LEAST_ROWS
        if (narrow - fitting) * row_bytes <= 4 * hidden * classes:
            fitting = narrow
        else:
            fitting = max(fitting, _whole(hidden // buffers))
    return max(1, min(rows, fitting))


def sums_in_float32(rows: int, chunk: int, dtype: torch.dtype) -> bool:
    """Whether a sum over chunks is kept in float32 beside a gradient of this dtype."""
    return dtype in NARROW and -(-rows // chunk) > MOST_NARROW_SUMS


def _whole(rows: int) -> int:
    return max(1, rows // LEAST_ROWS) * LEAST_ROWS
