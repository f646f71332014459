"""Contrastive losses of two batches of embeddings, which never hold the logits of all pairs.

Their logits are ``scale * input @ other.T + bias`` for rows of input, which other's rows are
compared with. Whether embeddings are normalised is the caller's choice. A queue, hard negatives or
the batches of other ranks are more rows of other. Gradients go to both embeddings, and to a scale
and a bias that are tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

import compile_losses.ops  # noqa: F401  declares fused::*
from compile_losses.arguments import reduction_of
from compile_losses.distributed import are_dtensors
from compile_losses.ops.checks import check_embeddings, describe

__all__ = ["contrastive_cross_entropy", "contrastive_sigmoid_cross_entropy"]


def contrastive_cross_entropy(
    input: Tensor,
    other: Tensor,
    target: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    symmetric: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy over all pairs: InfoNCE (van den Oord et al., Representation Learning with
    Contrastive Predictive Coding, 2018), and in both directions the loss of CLIP (Radford et al.,
    Learning Transferable Visual Models From Natural Language Supervision, 2021)::

        logits = scale * input @ other.T + bias
        F.cross_entropy(logits.masked_fill(mask, -inf), target)

    Without a mask it is :func:`compile_losses.linear.linear_cross_entropy`; in both directions,
    without a mask and a bias, ``torch.ops.fused.two_way_cross_entropy``, which has four products.

    Args:
        input: [rows, hidden], of a floating dtype.
        other: [columns, hidden], in input's dtype, unless autocast is on.
        target: the column of each row's positive pair, int64 [rows]; by default the diagonal.
        scale: of the logits, a number or a tensor of one: the inverse of a temperature.
        bias: a number of each column, [columns], such as the logarithm of how often it is drawn,
            negated (Yi et al., Sampling-Bias-Corrected Neural Modeling, 2019).
        mask: pairs that are no negatives, bool [rows, columns]: they are left out, but for a row's
            own positive pair. One byte for each pair is held by who makes it.
        symmetric: whether the mean of both directions is computed: the columns choose among the
            rows as well. Rows and columns are then pairs, and target is the diagonal.
        ignore_index: rows with this target are ignored.
        label_smoothing: from 0 to 1; not with a mask.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, the loss of each row, [rows]; if symmetric,
            the mean of those of a pair's row and column.

    Returns:
        The loss in input's dtype, or in float32 under autocast.

    Raises:
        RuntimeError: shapes, dtypes or devices that don't go together; more or less rows than
            columns, or a target, if symmetric; label_smoothing above 1 or with a mask; with a mask
            what else is an IndexError.
        NotImplementedError: embeddings that are not floating point; DTensors with a mask.
        ValueError: unknown reduction; input's and target's numbers of rows differ.
        IndexError: on the CPU, a target outside [0, columns) that is not ignore_index.
    """
    name = "contrastive_cross_entropy"
    check_embeddings(name, input, other)
    enum = reduction_of(reduction)
    if symmetric and (target is not None or input.shape[0] != other.shape[0]):
        given = "no target" if target is None else f"target {describe(target)}"
        raise RuntimeError(
            f"{name}: expected as many rows of input as of other and no target with symmetric, got "
            f"{list(input.shape)}, {list(other.shape)} and {given}"
        )
    if target is None:
        target = _diagonal(name, input, other)
    input = _scaled(name, input, scale)

    def direction(
        rows: Tensor, columns: Tensor, bias: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        fused = torch.ops.fused
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        if mask is None:
            return fused.linear_cross_entropy(
                rows, columns, target, linear_bias=bias, reduction=enum, **options
            )
        return fused.contrastive_loss(
            rows, columns, target, bias=bias, mask=mask, reduction=enum, **options
        )

    if symmetric and bias is None and mask is None and not are_dtensors(input, other):
        losses = torch.ops.fused.two_way_cross_entropy(
            input, other, target, target, ignore_index=ignore_index,
            label_smoothing=label_smoothing, reduction=enum,
        )  # fmt: skip
        return (losses[0] + losses[1]) / 2
    loss = direction(input, other, bias, mask)
    if not symmetric:
        return loss
    # A number that is added to a whole column changes no softmax of the column.
    return (loss + direction(other, input, None, None if mask is None else mask.t())) / 2


def contrastive_sigmoid_cross_entropy(
    input: Tensor,
    other: Tensor,
    target: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    bias: float | Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Binary cross entropy of every pair, the loss of SigLIP (Zhai et al., Sigmoid Loss for
    Language Image Pre-Training, 2023)::

        logits = scale * input @ other.T + bias
        labels = 2 * torch.eye(len(input)) - 1
        -F.logsigmoid(labels * logits).sum() / len(input)

    Args:
        input: [rows, hidden], of a floating dtype.
        other: [columns, hidden], in input's dtype, unless autocast is on.
        target: the column of each row's positive pair, int64 [rows], -1 for rows that have none, as
            of the batch of another rank; or labels [rows, columns] of any dtype, of which positive
            pairs are above 0, so 1 and -1, 1 and 0, or bools. By default the diagonal.
        scale: of the logits, a number or a tensor of one: the inverse of a temperature.
        bias: a number that is added to all logits, or a tensor of one. It is not rounded to
            embeddings of 16 bits.
        reduction: ``"mean"``, the mean over the rows of the sum over their pairs; ``"sum"``; or
            ``"none"``, the sum of each row, [rows].

    Returns:
        The loss in input's dtype, or in float32 under autocast.

    Raises:
        RuntimeError: shapes, dtypes or devices that don't go together; on the CPU, a target that is
            not below the number of columns.
        NotImplementedError: embeddings that are not floating point; DTensors.
        ValueError: unknown reduction.
    """
    name = "contrastive_sigmoid_cross_entropy"
    check_embeddings(name, input, other)
    if target is None:
        target = _diagonal(name, input, other)
    if bias is not None:
        one = _one(name, "bias", bias, input)
        bias = one.expand(other.shape[0])
    return torch.ops.fused.contrastive_loss(
        _scaled(name, input, scale), other, target,
        bias=bias, sigmoid=True, reduction=reduction_of(reduction),
    )  # fmt: skip


def _diagonal(name: str, input: Tensor, other: Tensor) -> Tensor:
    rows, columns = input.shape[0], other.shape[0]
    if rows > columns:
        raise RuntimeError(
            f"{name}: expected target for {rows} rows and {columns} columns, got None, which is "
            "the diagonal and has a column for each row"
        )
    return torch.arange(rows, device=input.device)


def _one(name: str, argument: str, value: float | Tensor, input: Tensor) -> Tensor:
    """A number as a tensor without dimensions."""
    if not isinstance(value, Tensor):
        wide = torch.promote_types(input.dtype, torch.float32)
        return torch.tensor(value, dtype=wide, device=input.device)
    if value.numel() != 1:
        raise RuntimeError(f"{name}: expected {argument} to be one number, got {describe(value)}")
    return value.reshape(())


def _scaled(name: str, input: Tensor, scale: float | Tensor) -> Tensor:
    """The product is scaled by what one of its operands is scaled by."""
    if not isinstance(scale, Tensor):
        return input if scale == 1 else input * scale
    return input * _one(name, "scale", scale, input)
