"""Losses with class indices: cross entropy, and negative log likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compile_losses.distributed.collectives import totals
from compile_losses.distributed.layout import Rows, assemble, local, replicated, summed
from compile_losses.distributed.vocabulary import Vocabulary, VocabularyParallel
from compile_losses.ops import checks
from compile_losses.ops.divisors import divisors, mean_of

NONE, MEAN, SUM = (checks.REDUCTIONS[name] for name in ("none", "mean", "sum"))

#: From input, target, weight, reduction, the loss's options and its dtype to the loss and, if it is
#: known, the total weight.
Part = Callable[..., tuple[Tensor, Tensor | None]]


def cross_entropy(
    whole: Callable[..., Tensor],
    mesh: DeviceMesh,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype,
) -> Tensor:
    """Of logits whose rows, classes, both or neither are sharded.

    Args:
        whole: the public op, for local tensors of whole rows.
    """
    rows = Rows("cross_entropy", input, target)
    options = (ignore_index, label_smoothing)
    arguments = (mesh, input, target, weight, reduction, options, dtype)
    if rows.classes is None:
        return _reduced(_of_whole_rows(whole), rows, *arguments)
    vocabulary = Vocabulary(mesh, rows.classes, input.shape[0 if input.dim() == 1 else 1])

    def part(input: Tensor, target: Tensor, weight: Tensor | None, *rest: Any) -> Any:
        return VocabularyParallel.apply(input, target, weight, vocabulary, *rest)

    return _reduced(part, rows, *arguments)


def nll_loss(
    whole: Callable[..., Tensor],
    mesh: DeviceMesh,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype,
) -> Tensor:
    """Of log-probabilities whose rows are sharded; arguments as for cross_entropy."""
    rows = Rows("nll_loss", input, target)
    rows.refuse_sharded_classes(
        "nll_loss", "Give cross_entropy the logits, or redistribute input to Replicate() first"
    )
    part = _of_whole_rows(whole)
    return _reduced(part, rows, mesh, input, target, weight, reduction, (ignore_index,), dtype)


def _of_whole_rows(whole: Callable[..., Tensor]) -> Part:
    def part(input: Tensor, target: Tensor, weight: Tensor | None, *rest: Any) -> Any:
        *options, dtype = rest
        weight = None if weight is None else weight.to(dtype)
        return whole(input, target, weight, *options, dtype=dtype), None

    return part


def _reduced(
    part: Part,
    rows: Rows,
    mesh: DeviceMesh,
    input: Any,
    target: Any,
    weight: Any,
    reduction: int,
    options: tuple[Any, ...],
    dtype: torch.dtype,
) -> Tensor:
    own_target, own_weight = local(target, rows.target), local(weight, replicated(mesh))
    shards = (local(input, rows.input), own_target, own_weight)
    if reduction == NONE:
        losses, _ = part(*shards, NONE, *options, dtype)
        return assemble(losses, mesh, rows.target, target.shape)
    if reduction == SUM:
        loss, _ = part(*shards, SUM, *options, dtype)
        return assemble(loss, mesh, summed(mesh, rows.mesh_dims), torch.Size())
    wide = torch.promote_types(dtype, checks.accumulation_type(input.dtype))
    loss, total_weight = part(*shards, SUM, *options, wide)
    if total_weight is None:
        # Not from the loss's own op, which compiled graphs replace by one that has the gradient.
        total_weight, _ = divisors(own_target, own_weight, options[0], wide)
    loss, total_weight = totals([loss, total_weight], mesh, rows.mesh_dims)
    smoothed = weight is not None and len(options) > 1 and options[1] > 0
    mean = mean_of(loss, total_weight, smoothed=smoothed)
    return assemble(mean.to(dtype), mesh, replicated(mesh), torch.Size())
