"""The cross entropies of the rows and of the columns of one product, whose matrix is never held.

``torch.ops.fused.two_way_cross_entropy(input, other, target, other_target, *, reduction=1,
ignore_index=-100, label_smoothing=0.0, dtype=None)`` takes ``logits = input @ other.T`` of input
[rows, hidden] and other [columns, hidden]. It returns the cross entropy of logits with target,
int64 [rows], and that of ``logits.T`` with other_target, int64 [columns]: the losses of CLIP.
Reduction and the other options are those of cross entropy, for both. With dtype the results are
those of logits that are cast to it; otherwise autocast casts the embeddings.

The forward computes a chunk of rows of logits at a time, and reads it once for the statistics of
its rows and those of the columns so far. The backward computes the chunk again, writes over it the
gradient of both losses, and multiplies that with both embeddings. So there are four products, where
two calls of linear cross entropy have six.

Raises:
    RuntimeError: shapes, dtypes or devices that don't go together; label_smoothing above 1.
    NotImplementedError: embeddings that are not floating point; DTensors.
    ValueError: unknown reduction.
    IndexError: on the CPU, a target out of bounds that is not ignore_index. On CUDA the kernel
        stops with a device-side assertion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library
from compile_losses.bodies.class_targets import check_bounds
from compile_losses.device_constants import constants_of
from compile_losses.distributed import mesh_of
from compile_losses.ops import checks, softmax_sums
from compile_losses.ops.checks import REDUCTIONS, accumulation_type, describe, loss_dtype
from compile_losses.ops.linear.chunk_size import sums_in_float32
from compile_losses.ops.linear.matrix_products import Gradients, chunks_of_logits
from compile_losses.ops.linear.reference import autocast_layer, autocast_off, under_autocast
from compile_losses.ops.transforms import double_backward, needs_torch

NAME = "two_way_cross_entropy"
NONE, MEAN = REDUCTIONS["none"], REDUCTIONS["mean"]

#: So that a chunk takes at most a tenth of what torch holds, the matrix and its gradient.
LEAST_CHUNKS = 5

public = library.define(
    f"{NAME}(Tensor input, Tensor other, Tensor target, Tensor other_target, *, int reduction=1, "
    "SymInt ignore_index=-100, float label_smoothing=0.0, ScalarType? dtype=None) "
    "-> (Tensor, Tensor)"
)

_TENSORS = "Tensor input, Tensor other, Tensor target, Tensor other_target"
_OPTIONS = "int reduction, SymInt ignore_index, float label_smoothing, ScalarType dtype"
_SAVED = "Tensor row_largest, Tensor row_sum, Tensor column_largest, Tensor column_sum"
forward = library.define(
    f"two_way_losses_forward({_TENSORS}, {_OPTIONS}) -> (Tensor loss, Tensor other_loss, {_SAVED})"
)
backward = library.define(
    f"two_way_losses_backward(Tensor? grad_loss, Tensor? grad_other_loss, {_TENSORS}, {_SAVED}, "
    f"{_OPTIONS}, bool needs_grad_input, bool needs_grad_other) -> (Tensor, Tensor)"
)


class Options(NamedTuple):
    """See the module; ``dtype`` is that of the results."""

    reduction: int
    ignore_index: int
    label_smoothing: float
    dtype: torch.dtype


@dataclass
class Side:
    """The rows, or the columns, and what is known of each of them so far.

    Attributes:
        target: int64 [count].
        largest: the largest logit; -inf of none.
        sum: of exponentials relative to it.
        own: the logit of the target.
        total: of all logits; used with smoothing.
    """

    target: Tensor
    largest: Tensor
    sum: Tensor
    own: Tensor
    total: Tensor

    @staticmethod
    def of(target: Tensor, dtype: torch.dtype) -> Side:
        largest = target.new_full(target.shape, -torch.inf, dtype=dtype)
        return Side(target, largest, *(torch.zeros_like(largest) for _ in range(3)))

    def counts(self, options: Options) -> Tensor:
        """Which are not ignored."""
        return self.target != options.ignore_index

    def loss(self, others: int, options: Options) -> Tensor:
        """
        Args:
            others: how many logits each has.
        """
        smoothing = options.label_smoothing
        target = self.own - self.largest
        if smoothing > 0:
            uniform = self.total / others - self.largest
            target = (1 - smoothing) * target + smoothing * uniform
        counts = self.counts(options)
        losses = torch.where(counts, self.sum.log() - target, 0)
        if options.reduction != NONE:
            losses = losses.sum(dtype=torch.float64)
        if options.reduction == MEAN:
            losses = losses / counts.sum()
        return losses.to(options.dtype)

    def factor(self, gradient: Tensor | None, options: Options) -> Tensor:
        """The gradient of each one's own loss, from that of the result; 0 where it is ignored."""
        counts = self.counts(options)
        if gradient is None:
            return torch.zeros_like(self.sum)
        each = gradient.to(self.sum.dtype)
        if options.reduction == MEAN:
            each = each / counts.sum()
        return torch.where(counts, each, 0)


def rows_of_chunk(
    rows: int, hidden: int, columns: int, dtype: torch.dtype, device: torch.device
) -> int:
    """The rows of a chunk, the same in forward and backward.

    The gradient of the columns is a sum over chunks: larger ones read and write it less often.
    """
    constants = constants_of(device)
    least = constants.least_rows
    most = max(least, constants.two_way_bytes // max(1, columns * dtype.itemsize))
    wanted = min(rows // LEAST_CHUNKS, most, constants.two_way_rows)
    return max(1, min(rows, max(least, wanted // least * least)))


def _chunk(input: Tensor, other: Tensor) -> int:
    (rows, hidden), columns = input.shape, len(other)
    return rows_of_chunk(rows, hidden, columns, input.dtype, input.device)


def forward_kernel(
    input: Tensor, other: Tensor, target: Tensor, other_target: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    options = Options(*rest)
    _check(input, other, target, other_target, *options)
    for given, count in ((target, len(other)), (other_target, len(input))):
        check_bounds(NAME, given, count, options.ignore_index)
    dtype = accumulation_type(input.dtype)
    rows, columns = Side.of(target, dtype), Side.of(other_target, dtype)
    smooths = options.label_smoothing > 0
    with autocast_off(input):
        for some, _, logits in chunks_of_logits(input, other, None, _chunk(input, other)):
            softmax_sums.add_(
                logits, rows.largest, rows.sum, rows.own, target,
                columns.largest, columns.sum, columns.own, other_target,
                some.start, options.ignore_index,
            )  # fmt: skip
            if smooths:
                torch.sum(logits, 1, dtype=dtype, out=rows.total[some])
                columns.total += logits.sum(0, dtype=dtype)
    for side in (rows, columns):
        side.sum.masked_fill_(side.largest.isinf(), torch.nan)
    saved = (rows.largest, rows.sum, columns.largest, columns.sum)
    return rows.loss(len(other), options), columns.loss(len(input), options), *saved


def backward_kernel(
    grad_loss: Tensor | None,
    grad_other_loss: Tensor | None,
    input: Tensor,
    other: Tensor,
    target: Tensor,
    other_target: Tensor,
    row_largest: Tensor,
    row_sum: Tensor,
    column_largest: Tensor,
    column_sum: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    *some_options, needs_input, needs_other = rest
    options = Options(*some_options)
    _check(input, other, target, other_target, *options)
    nothing = row_sum.new_empty(0)
    rows = Side(target, row_largest, row_sum, nothing, nothing)
    columns = Side(other_target, column_largest, column_sum, nothing, nothing)
    of_columns = (
        column_largest, column_sum, columns.factor(grad_other_loss, options), other_target
    )  # fmt: skip
    of_rows = (row_largest, row_sum, rows.factor(grad_loss, options), target)
    chunk = _chunk(input, other)
    gradients = Gradients(
        other, len(input), (needs_input, needs_other, False), row_sum.dtype,
        wide=sums_in_float32(len(input), chunk, input.dtype),
    )  # fmt: skip
    with autocast_off(input):
        for each in chunks_of_logits(input, other, None, chunk):
            some, _, logits = each
            softmax_sums.gradient_(
                logits, *of_rows, *of_columns, some.start, options.label_smoothing
            )
            gradients.add(*each)
        grad_input, grad_other, _ = gradients.result()
    return grad_input, grad_other


def reference(
    input: Tensor, other: Tensor, target: Tensor, other_target: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The losses in torch's own ops, of all logits at a time."""
    options = Options(*rest)
    logits = (input @ other.T).to(options.dtype)
    given: Any = {
        "ignore_index": options.ignore_index,
        "reduction": checks.reduction_name(options.reduction),
        "label_smoothing": options.label_smoothing,
    }
    return F.cross_entropy(logits, target, **given), F.cross_entropy(
        logits.T, other_target, **given
    )


def _check(input: Tensor, other: Tensor, target: Tensor, other_target: Tensor, *rest: Any) -> None:
    options = Options(*rest)
    checks.check_reduction(NAME, options.reduction)
    checks.check_floating(NAME, input=input, other=other)
    checks.check_same_device(NAME, input, other=other, target=target, other_target=other_target)
    checks.check_embeddings(NAME, input, other)
    if input.dtype != other.dtype:
        raise RuntimeError(
            f"{NAME}: expected other to have input's dtype {input.dtype}, got {other.dtype}"
        )
    for name, given, of in (("target", target, input), ("other_target", other_target, other)):
        if given.dtype != torch.int64 or not checks.same_shape(given.shape, of.shape[:1]):
            raise RuntimeError(
                f"{NAME}: expected {name} to be int64 {list(of.shape[:1])}, got {describe(given)}"
            )
    checks.check_label_smoothing(NAME, options.label_smoothing)


def forward_fake(
    input: Tensor, other: Tensor, target: Tensor, other_target: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    options = Options(*rest)
    _check(input, other, target, other_target, *options)
    wide = accumulation_type(input.dtype)
    counts = (input.shape[:1], other.shape[:1])
    shapes: Sequence[Any] = counts if options.reduction == NONE else ((), ())
    losses = [input.new_empty(shape, dtype=options.dtype) for shape in shapes]
    return *losses, *(input.new_empty(shape, dtype=wide) for shape in counts for _ in range(2))


def backward_fake(
    grad_loss: Tensor | None, grad_other_loss: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    *tensors, needs_input, needs_other = rest
    forward_fake(*tensors[:4], *tensors[8:])
    return tuple(
        tensor.new_empty(tensor.shape if needed else 0)
        for tensor, needed in zip(tensors, (needs_input, needs_other), strict=False)
    )


for op, kernel, fake in (
    (forward, forward_kernel, forward_fake),
    (backward, backward_kernel, backward_fake),
):
    library.implement(op, kernel, "CompositeExplicitAutograd")
    library.register_fake(op, fake)


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    _, _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.options = inputs[4:]
    ctx.save_for_backward(*inputs[:4], *saved)


def _forward_vjp(
    ctx: Any, grad_loss: Tensor | None, grad_other_loss: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 6
    if grad_loss is None and grad_other_loss is None:
        return None, None, *nothing
    needs = ctx.needs_input_grad[:2]
    found = backward(grad_loss, grad_other_loss, *ctx.saved_tensors, *ctx.options, *needs)
    return *(g if needed else None for g, needed in zip(found, needs, strict=True)), *nothing


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    *ctx.options, needs_input, needs_other = inputs[10:]
    ctx.needs = (needs_input, needs_other)
    ctx.mark_non_differentiable(
        *(g for g, needed in zip(output, ctx.needs, strict=True) if not needed)
    )
    ctx.save_for_backward(*inputs[:6])


def _backward_vjp(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """By torch's formulas, for the sum of the results times their gradients."""
    *gradients, input, other, target, other_target = ctx.saved_tensors
    wanted = [c if needed else None for c, needed in zip(cotangents, ctx.needs, strict=True)]
    given = [place for place, gradient in enumerate(gradients) if gradient is not None]
    products: list[Tensor | None] = [None] * 4
    if given and any(c is not None for c in wanted):

        def total(*roots: Tensor) -> Tensor:
            *factors, input, other = roots
            losses = reference(input, other, target, other_target, *ctx.options)
            each = [(losses[p] * f).sum() for p, f in zip(given, factors, strict=True)]
            return torch.stack(each).sum()

        one = input.new_ones((), dtype=accumulation_type(input.dtype))
        with autocast_off(input):
            _, *found = double_backward(
                total, one, [*(gradients[p] for p in given), input, other],
                [None] * len(given) + wanted,
            )  # fmt: skip
        for place, product in zip((*given, 2, 3), found, strict=True):
            products[place] = product
    return *products, *(None,) * 12


leaf = library.register_autograd(forward, _forward_vjp, _setup_forward)
library.register_autograd(backward, _backward_vjp, _setup_backward)


def public_kernel(
    input: Tensor,
    other: Tensor,
    target: Tensor,
    other_target: Tensor,
    *,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    tensors = (input, other, target, other_target)
    names = ("input", "other", "target", "other_target")
    if mesh_of(NAME, **dict(zip(names, tensors, strict=True))) is not None:
        raise NotImplementedError(f"{NAME}: expected plain tensors, got DTensors")
    result = loss_dtype(dtype, input)
    if dtype is None and under_autocast(input):
        input, other = autocast_layer(input, other)  # type: ignore[assignment]
    options = Options(reduction, ignore_index, max(label_smoothing, 0.0), result)
    arguments = (input, other, target, other_target, *options)
    with autocast_off(input):
        if needs_torch(*tensors):
            _check(*arguments)
            return reference(*arguments)
        loss, other_loss, *_ = leaf(*arguments)  # which checks them
    return loss, other_loss


library.implement_public(public, public_kernel)
