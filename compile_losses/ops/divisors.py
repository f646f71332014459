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


def mean_of(losses: Tensor, total_weight: Tensor, *, smoothed: bool) -> Tensor:
    """A sum of losses over the total weight of their targets.

    With smoothing torch adds the means of two terms: where the total weight is 0, that of the
    targets is 0/0, and their sum nan.

    Args:
        smoothed: whether there are class weights and label smoothing.
    """
    mean = losses / total_weight
    return torch.where(total_weight == 0, torch.nan, mean) if smoothed else mean
