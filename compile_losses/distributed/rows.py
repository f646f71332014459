"""Losses with class indices: cross entropy, and negative log likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compile_losses.distributed.collectives import totals
from compile_losses.distributed.layout import Rows, assemble, local, mesh_of, replicated, summed
from compile_losses.distributed.vocabulary import Vocabulary, VocabularyParallel
from compile_losses.ops import checks

NONE, MEAN, SUM = (checks.REDUCTIONS[name] for name in ("none", "mean", "sum"))

Forward = Callable[..., tuple[Tensor, Tensor]]


def cross_entropy(
    forward: Forward,
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
        forward: the loss and the total weight of local tensors, from its arguments after these.
    """
    mesh = mesh_of("cross_entropy", input=input, target=target, weight=weight)
    rows = Rows("cross_entropy", input, target)
    if rows.classes is not None:
        vocabulary = Vocabulary(mesh, rows.classes, input.shape[0 if input.dim() == 1 else 1])

        def forward(input: Tensor, target: Tensor, weight: Any, *rest: Any) -> Any:
            return VocabularyParallel.apply(input, target, weight, vocabulary, *rest)

    options = (ignore_index, label_smoothing)
    return _reduced(forward, rows, input, target, weight, reduction, options, dtype)


def nll_loss(
    forward: Forward,
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
    return _reduced(forward, rows, input, target, weight, reduction, (ignore_index,), dtype)


def _reduced(
    forward: Forward,
    rows: Rows,
    input: Any,
    target: Any,
    weight: Any,
    reduction: int,
    options: tuple[Any, ...],
    dtype: torch.dtype,
) -> Tensor:
    mesh = input.device_mesh
    shards = (
        local(input, rows.input),
        local(target, rows.target),
        local(weight, replicated(mesh)),
    )
    if reduction == NONE:
        losses, _ = forward(*shards, NONE, *options, dtype)
        return assemble(losses, mesh, rows.target, target.shape)
    if reduction == SUM:
        loss, _ = forward(*shards, SUM, *options, dtype)
        return assemble(loss, mesh, summed(mesh, rows.mesh_dims), torch.Size())
    wide = torch.promote_types(dtype, checks.accumulation_type(input.dtype))
    loss, total_weight = forward(*shards, SUM, *options, wide)
    loss, total_weight = totals([loss, total_weight], mesh, rows.mesh_dims)
    return assemble((loss / total_weight).to(dtype), mesh, replicated(mesh), torch.Size())
