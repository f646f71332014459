"""The mean of a loss over the batches of all ranks, for DDP, FSDP2 and HSDP.

These average gradients over the ranks. If every rank computes the mean over its own tokens, the
result is a mean of means, in which the tokens of a rank with few tokens count more. It is not the
mean that one process would compute over the whole batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compile_losses.ops.checks import accumulation_type

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def global_mean(
    total: Tensor,
    count: Tensor | float,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    gradients: str = "averaged",
) -> Tensor:
    """The sum of all ranks' totals over the sum of their counts.

    ::

        total = F.cross_entropy(logits, labels, reduction="sum")
        loss = global_mean(total, (labels != -100).sum())
        loss.backward()

    Every rank gets the same value: the loss of the whole batch. Its gradient is that of the rank's
    own part, times the number of ranks where gradients are averaged afterwards, so that training is
    that of one process with all of the batch.

    In eager mode both sums take one all-reduce. A compiled function sums up the counts first, in an
    all-reduce of their own: then the loss knows what divides it when it computes its gradient.

    With gradient accumulation give each micro-batch the count of the whole step, divided by nothing
    else: the sum over micro-batches is then the mean over all of the step's tokens.

    Args:
        total: this rank's sum, one number.
        count: what it is to be divided by: this rank's number of tokens, or the sum of their class
            weights. 0 on a rank that has none. No gradient flows to it.
        group: the ranks; all by default. Of a DeviceMesh, all of its dimensions: give HSDP's
            two-dimensional mesh, and not the one of tensor parallelism.
        gradients: what becomes of the ranks' gradients: "averaged", as by DDP and fully_shard, or
            "summed".

    Raises:
        ValueError: gradients is neither; total is not one number.
    """
    if gradients not in ("averaged", "summed"):
        raise ValueError(
            f"global_mean: expected gradients to be 'averaged' or 'summed', got {gradients!r}"
        )
    if total.numel() != 1:
        raise ValueError(
            f"global_mean: expected total to be one number, got shape {list(total.shape)}; "
            "use reduction='sum'"
        )
    if isinstance(count, Tensor):
        count = count.detach().to(total.device)
    else:
        count = torch.full_like(total, count, requires_grad=False)
    groups, ranks = _groups(group)
    # Counts and sums of a large batch need more than a 16-bit type.
    wide = accumulation_type(total.dtype)
    total, dtype = total.reshape(()).to(wide), total.dtype
    if gradients == "averaged" and ranks > 1:
        # The value stays, the gradient is multiplied.
        total = ranks * total - (ranks - 1) * total.detach()
    from compile_losses.distributed.collectives import totals_over

    count = count.reshape(()).to(wide)
    if torch.compiler.is_compiling():
        (counted,) = totals_over(groups, [count])
        (whole,) = totals_over(groups, [total])
    else:
        whole, counted = totals_over(groups, [total, count])
    return (whole / counted).to(dtype)


def _groups(group: Any) -> tuple[list[Any], int]:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return [], 1
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return [group], group.size()
    return [(group, dim) for dim in range(group.ndim)], group.size()
