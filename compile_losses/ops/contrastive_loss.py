"""Losses of all pairs of two batches of embeddings that the op of a head does not compute, without
ever holding the pairs' logits.

``torch.ops.fused.contrastive_loss(input, other, target, *, bias=None, mask=None, sigmoid=False,
reduction=1, ignore_index=-100, label_smoothing=0.0, dtype=None)`` takes ``logits = input @ other.T
+ bias`` of input [rows, hidden] and other [columns, hidden]. Either it is their cross entropy with
target int64 [rows], without the pairs that mask, bool [rows, columns], names; target's own pair is
never left out. Or, with ``sigmoid``, it is the binary cross entropy of each pair: the positive ones
are the column of each row that target, int64 [rows], says (none if it is negative), or those where
target [rows, columns] is above 0. Bias is [columns], in input's dtype, or with ``sigmoid`` in any.

The loss of a row is the sum over its pairs, and reduction mean divides by the number of rows that
are not ignored; with ``sigmoid`` none is. As of linear cross entropy, the logits are computed a
chunk of rows at a time, and a loss that is reduced makes its gradients in three products
(:mod:`compile_losses.ops.linear.row_chunks`).

Raises:
    RuntimeError: shapes or devices that don't go together, label_smoothing above 1 or with a mask;
        on the CPU, a target that is not below the number of columns.
    NotImplementedError: embeddings that are not floating point; DTensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library
from compile_losses.bodies.sigmoid_pairs import losses as losses_of_pairs
from compile_losses.distributed import mesh_of
from compile_losses.ops import checks
from compile_losses.ops.checks import accumulation_type, describe, loss_dtype
from compile_losses.ops.linear.leaf_ops import declare_leaves
from compile_losses.ops.linear.reference import autocast_layer, autocast_off, under_autocast
from compile_losses.ops.linear.row_chunks import Problem
from compile_losses.ops.linear.row_function import RowFunction
from compile_losses.ops.linear.row_losses import MEAN, NONE, RowLosses
from compile_losses.ops.sigmoid_pairs import pairs_
from compile_losses.ops.transforms import needs_torch

NAME = "contrastive_loss"

public = library.define(
    "contrastive_loss(Tensor input, Tensor other, Tensor target, *, Tensor? bias=None, "
    "Tensor? mask=None, bool sigmoid=False, int reduction=1, SymInt ignore_index=-100, "
    "float label_smoothing=0.0, ScalarType? dtype=None) -> Tensor"
)


class MaskedLosses:
    """The cross entropy of each row without some classes, whose logits become -inf."""

    def __init__(self, losses: RowLosses, mask: Tensor | None) -> None:
        self.losses, self.mask = losses, mask
        self.dtype, self.by_row, self.results = losses.dtype, losses.by_row, losses.results

    def beside(self, *, gradient: bool) -> float:
        return self.losses.beside(gradient=gradient)

    def add(self, rows: slice, logits: Tensor) -> None:
        self.losses.add(rows, self._without(rows, logits))

    def write_gradient(self, rows: slice, logits: Tensor) -> None:
        """Where a logit is -inf, its gradient is 0."""
        self.losses.write_gradient(rows, self._without(rows, logits))

    def _without(self, rows: slice, logits: Tensor) -> Tensor:
        if self.mask is None:
            return logits
        own = self.losses.target[rows].clamp(min=0).unsqueeze(1)
        of_own = logits.gather(1, own)
        return logits.masked_fill_(self.mask[rows], -math.inf).scatter_(1, own, of_own)


class SigmoidLosses:
    """The binary cross entropies of each row's pairs, added up.

    The logit of a positive pair is negated, and so is its gradient; then every pair has the loss
    of a negative one.
    """

    def __init__(
        self,
        target: Tensor,
        bias: Tensor | None,
        reduction: int,
        logits: torch.dtype,
        result: torch.dtype,
        grad_output: Tensor | RowFunction | None,
    ) -> None:
        self.target, self.logits, self.result = target, logits, result
        self.dtype, self.by_row = accumulation_type(logits), reduction == NONE
        self.bias = None if bias is None else bias.to(self.dtype).contiguous()
        nothing = target.new_zeros((), dtype=self.dtype)
        self.sums = [nothing]
        self.each = [nothing.new_empty(0)]
        self.row_function = grad_output if isinstance(grad_output, RowFunction) else None
        self.divisor = max(1, len(target)) if reduction == MEAN else 1
        one = grad_output.to(self.dtype) if isinstance(grad_output, Tensor) else nothing + 1
        self.factor = one.reshape(()) / self.divisor

    def beside(self, *, gradient: bool) -> float:
        """Without a gradient, or by row, logits of 16 bits are widened, and the losses of pairs are
        held to be added up."""
        if gradient and not self.by_row:
            return 0
        widened = self.dtype.itemsize / self.logits.itemsize
        return (self.logits != self.dtype) * widened + (self.by_row or not gradient) * widened

    def add(self, rows: slice, logits: Tensor) -> Tensor:
        """Computes the losses of some rows; returns their logits, as of negative pairs."""
        signed = self._signed(rows, self._with_bias(logits))
        losses = losses_of_pairs(signed)
        if self.by_row:
            self.each.append(losses.sum(1))
        else:
            self.sums.append(losses.sum())
        return signed

    def write_gradient(self, rows: slice, logits: Tensor) -> None:
        """The same, and the gradient of the logits, over them."""
        if not self.by_row:
            target = self.target[rows]
            target = target > 0 if target.dim() == 2 else target
            self.sums.append(pairs_(logits, target, self.bias, self.factor))
            return
        gradient = self.add(rows, logits)
        assert self.row_function is not None
        (factor,) = self.row_function(rows, [self.each[-1].to(self.result)])
        assert factor is not None
        gradient = gradient.sigmoid_().mul_(factor.to(self.dtype).unsqueeze(1))
        logits.copy_(self._signed(rows, gradient))

    def _with_bias(self, logits: Tensor) -> Tensor:
        """In the dtype of sums; in place if the logits are in it."""
        wide = logits.to(self.dtype)
        return wide if self.bias is None else wide.add_(self.bias)

    def _signed(self, rows: slice, numbers: Tensor) -> Tensor:
        """Negates those of positive pairs in place."""
        target = self.target[rows]
        if target.dim() == 2:
            return numbers.mul_(torch.where(target > 0, -1.0, 1.0).to(numbers.dtype))
        place = target.clamp(min=0).unsqueeze(1)
        own = numbers.gather(1, place)
        return numbers.scatter_(1, place, torch.where((target < 0).unsqueeze(1), own, -own))

    def results(self) -> tuple[Tensor]:
        """The loss of each row so far, or of all."""
        if self.by_row:
            return (torch.cat(self.each).to(self.result),)
        total = torch.stack(self.sums).sum(dtype=torch.float64) / self.divisor
        return (total.to(self.result),)


def _problem(
    arguments: tuple[Any, ...], grad_output: Tensor | RowFunction | None = None
) -> Problem:
    input, other, target, bias, mask, reduction, ignore_index, smoothing, sigmoid, dtype = arguments
    _check(*arguments)
    losses: Any
    if sigmoid:
        losses = SigmoidLosses(target, bias, reduction, input.dtype, dtype, grad_output)
        return Problem(input, other, None, losses)
    losses = RowLosses(
        target, None, reduction, ignore_index, smoothing, None, 0.0,
        accumulation_type(input.dtype), dtype, grad_output,
    )  # fmt: skip
    return Problem(input, other, bias, MaskedLosses(losses, mask))  # type: ignore[arg-type]


def reference(
    input: Tensor,
    other: Tensor,
    target: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    sigmoid: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The loss in torch's own ops, over all pairs."""
    logits = (input @ other.T).to(dtype)
    if bias is not None:
        logits = logits + bias
    columns = torch.arange(logits.shape[1], device=logits.device)
    own = target > 0 if target.dim() == 2 else target.unsqueeze(1) == columns
    if not sigmoid:
        if mask is not None:
            logits = logits.masked_fill(mask & ~own, -math.inf)
        return F.cross_entropy(
            logits,
            target,
            ignore_index=ignore_index,
            reduction=checks.reduction_name(reduction),
            label_smoothing=label_smoothing,
        )
    each = -F.logsigmoid(torch.where(own, logits, -logits)).sum(1)
    if reduction == NONE:
        return each
    return each.sum() / max(1, len(input)) if reduction == MEAN else each.sum()


def _check(
    input: Tensor,
    other: Tensor,
    target: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    sigmoid: bool,
    dtype: torch.dtype,
) -> None:
    checks.check_reduction(NAME, reduction)
    checks.check_floating(NAME, input=input, other=other)
    checks.check_same_device(NAME, input, other=other, target=target, bias=bias, mask=mask)
    checks.check_embeddings(NAME, input, other)
    if input.dtype != other.dtype:
        raise RuntimeError(
            f"{NAME}: expected other to have input's dtype {input.dtype}, got {other.dtype}"
        )
    rows, columns = input.shape[0], other.shape[0]
    is_index = target.dtype == torch.int64 and checks.same_shape(target.shape, input.shape[:1])
    if not is_index and not (sigmoid and tuple(target.shape) == (rows, columns)):
        expected = f"int64 {[rows]}" + f", or {[rows, columns]}" * sigmoid
        raise RuntimeError(f"{NAME}: expected target to be {expected}, got {describe(target)}")
    if bias is not None and (
        tuple(bias.shape) != (columns,) or not (sigmoid or bias.dtype == input.dtype)
    ):
        expected = f"of shape {[columns]}" + f" in input's dtype {input.dtype}" * (not sigmoid)
        raise RuntimeError(f"{NAME}: expected bias {expected}, got {describe(bias)}")
    if mask is not None:
        if mask.dtype != torch.bool or tuple(mask.shape) != (rows, columns):
            raise RuntimeError(
                f"{NAME}: expected mask to be bool {[rows, columns]}, got {describe(mask)}"
            )
        if sigmoid or label_smoothing > 0:
            # The smoothed loss of a pair that is left out is infinite.
            what = "sigmoid" if sigmoid else f"label_smoothing {label_smoothing}"
            raise RuntimeError(f"{NAME}: expected no mask with {what}")
    checks.check_label_smoothing(NAME, label_smoothing)


leaves = declare_leaves(
    "contrastive_pairs",
    "Tensor input, Tensor other, Tensor target, Tensor? bias, Tensor? mask, int reduction, "
    "SymInt ignore_index, float label_smoothing, bool sigmoid, ScalarType dtype",
    problem=_problem,
    check=_check,
    reference=reference,
)


def public_kernel(
    input: Tensor,
    other: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sigmoid: bool = False,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    tensors = (input, other, target, bias, mask)
    names = ("input", "other", "target", "bias", "mask")
    if mesh_of(NAME, **dict(zip(names, tensors, strict=True))) is not None:
        raise NotImplementedError(f"{NAME}: expected plain tensors, got DTensors")
    result = loss_dtype(dtype, input)
    if dtype is None and under_autocast(input):
        of_product = [input, other] if sigmoid else [input, other, bias]
        input, other, *rest = autocast_layer(*of_product)  # type: ignore[assignment]
        bias = rest[0] if rest else bias
    arguments = (
        input, other, target, bias, mask,
        reduction, ignore_index, max(label_smoothing, 0.0), sigmoid, result,
    )  # fmt: skip
    if needs_torch(input, other, target, bias, mask):
        _check(*arguments)
        with autocast_off(input):
            return reference(*arguments)
    return leaves(arguments, by_row=reduction == NONE)  # which check them


library.implement_public(public, public_kernel)
