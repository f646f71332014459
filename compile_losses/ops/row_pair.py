"""What losses of two rows of the same classes share: ``cross_entropy`` with class probabilities,
``softmax_kl_div``, ``softmax_js_div`` and ``softmax_finite_kl_div``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def statistics(input: Tensor, target: Tensor, rows: Sequence[int]) -> Tensor:
    """The fake of ``stats`` [rows, 6], what a forward saves of each row for the backward.

    For input, and for target if it holds logits, the largest and the sum of the exponentials
    relative to it; and how far the rows are apart, relative to one input logit, for probabilities
    the row's loss, in two parts, or how far each is from their mixture, or the sum of the target's
    probabilities that count. float64 if input or target is, else float32.
    """
    double = torch.float64 in (input.dtype, target.dtype)
    return input.new_empty((math.prod(rows), 6), dtype=torch.float64 if double else torch.float32)
