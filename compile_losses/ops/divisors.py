"""What a mean of losses with class indices divides by."""

import torch
from torch import Tensor


def divisors(
    target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of a mean: the weight of the rows kept, for cross entropy; their number, for z-loss."""
    kept = target != ignore_index
    count = kept.sum().to(dtype)
    if weight is None:
        return count, count
    # Bounds are checked by the kernels.
    classes = target.to(torch.int64).clamp(0, len(weight) - 1)
    weights = weight.to(dtype).index_select(0, classes)
    return torch.where(kept, weights, 0).sum(dtype=torch.float64).to(dtype), count
