"""Linear cross entropy and its gradients, a chunk of rows of logits at a time.

A chunk of input's rows, [chunk, hidden], is multiplied with the weight, [classes, hidden], into a
buffer [chunk, classes] that all chunks share. The row kernels write the logits' gradient over the
logits, and two more products make of it input's gradient, each chunk its own rows, and the
weight's, to which each chunk adds. Never in memory: logits, probabilities or their gradient for
more than a chunk of rows (:mod:`compile_losses.ops.linear.chunk_size`).

Nothing here depends on the device, except for ignored rows. On the CPU they are left out before the
first product where they are at least an eighth of the rows. Elsewhere the host would have to wait
for their number; they are computed like the others, to gradients of 0. No synchronisation; sums
have a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from compile_losses.ops.checks import accumulation_type
from compile_losses.ops.linear.arguments import check
from compile_losses.ops.linear.chunk_size import chunk_rows, sums_in_float32
from compile_losses.ops.linear.reference import autocast_off
from compile_losses.ops.linear.row_losses import NONE, RowLosses

#: Ignored rows are left out where they are at least one in this many.
IGNORED = 8
#: Products that are added to a sum in float32 are made in blocks of about this size.
BLOCK_BYTES = 64 * 2**20


class Problem:
    """The arguments of a leaf op, and the rows that are computed."""

    def __init__(self, arguments: tuple[Any, ...], grad_output: Tensor | None = None) -> None:
        self.input, self.linear_weight, target, self.linear_bias, weight, *options = arguments
        self.reduction, ignore_index, label_smoothing, softcap, z_loss, self.dtype = options
        check(*arguments, leaf=True)
        target = target.to(torch.int64)
        self.all_rows = len(target)
        self.kept = kept_rows(target, ignore_index)
        if self.kept is not None:
            target = target[self.kept]
            if grad_output is not None and self.reduction == NONE:
                grad_output = grad_output[self.kept]
        self.rows = len(target)
        self.losses = RowLosses(
            target, weight, self.reduction, ignore_index, label_smoothing, softcap, z_loss,
            accumulation_type(self.input.dtype), grad_output,
        )  # fmt: skip

    def logits(self, chunk: int) -> Any:
        """Yields which rows, those of input, and their logits, which may be overwritten."""
        return chunks_of_logits(self.input, self.linear_weight, self.linear_bias, chunk, self.kept)

    def chunk(self, **options: Any) -> int:
        """The rows of a chunk, for options of chunk_rows."""
        classes, hidden = self.linear_weight.shape
        return chunk_rows(self.rows, hidden, classes, self.input.dtype, **options)

    def for_all_rows(self, computed: Tensor) -> Tensor:
        """A result by row, with zeros for the rows that were left out."""
        if self.kept is None:
            return computed
        result = computed.new_zeros((self.all_rows, *computed.shape[1:]))
        return result.index_copy_(0, self.kept, computed)


def chunks_of_logits(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    chunk: int,
    kept: Tensor | None = None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields which rows (of those kept), their input and their logits, in one buffer for all."""
    count = len(input) if kept is None else len(kept)
    buffer = input.new_empty((min(chunk, count), len(linear_weight)))
    for first in range(0, count, chunk):
        rows = slice(first, min(first + chunk, count))
        part = input[rows] if kept is None else input.index_select(0, kept[rows])
        logits = buffer[: len(part)]
        if linear_bias is None:
            torch.mm(part, linear_weight.t(), out=logits)
        else:
            torch.addmm(linear_bias, part, linear_weight.t(), out=logits)
        yield rows, part, logits


def kept_rows(target: Tensor, ignore_index: int) -> Tensor | None:
    """The rows that are computed; None for all of them. See the module's docstring."""
    if target.device.type != "cpu":
        return None
    kept = (target != ignore_index).nonzero().squeeze(1)
    return kept if len(kept) * IGNORED <= len(target) * (IGNORED - 1) else None


class WeightGradient:
    """The sum over chunks of gradient.t() @ input, in float32 where it would be rounded often."""

    def __init__(self, linear_weight: Tensor, rows: int, chunk: int) -> None:
        self.total = linear_weight.new_empty(linear_weight.shape)
        self.wide: Tensor | None = None
        if rows == 0:
            self.total.zero_()
        elif sums_in_float32(rows, chunk, linear_weight.dtype):
            classes, hidden = linear_weight.shape
            self.wide = self.total.new_zeros((classes, hidden), dtype=torch.float32)
            block = max(1, BLOCK_BYTES // max(1, hidden * linear_weight.dtype.itemsize))
            self.block = self.total.new_empty((min(classes, block), hidden))

    def add(self, rows: slice, gradient: Tensor, input: Tensor) -> None:
        if self.wide is not None:
            for first in range(0, len(self.total), len(self.block)):
                columns = gradient[:, first : first + len(self.block)]
                block = self.block[: columns.shape[1]]
                torch.mm(columns.t(), input, out=block)
                self.wide[first : first + len(block)] += block
        elif rows.start == 0:
            torch.mm(gradient.t(), input, out=self.total)
        else:
            self.total.addmm_(gradient.t(), input)

    def result(self) -> Tensor:
        return self.total if self.wide is None else self.total.copy_(self.wide)


def forward(*arguments: Any) -> Tensor:
    """fused::linear_cross_entropy_forward: one product in all."""
    with autocast_off(arguments[0]):
        problem = Problem(arguments)
        losses = problem.losses
        each = losses.target.new_empty(problem.rows, dtype=losses.dtype)
        for rows, _, logits in problem.logits(
            problem.chunk(buffers=losses.buffers(gradient=False))
        ):
            each[rows] = losses.value(rows, logits)
        if problem.reduction == NONE:
            return problem.for_all_rows(each.to(problem.dtype))
        return losses.reduced().to(problem.dtype)


def with_grad(*rest: Any) -> tuple[Tensor, ...]:
    """fused::linear_cross_entropy_with_grad: three products for all gradients."""
    *arguments, needs_input, needs_weight, needs_bias = rest[:14]
    grad_output = rest[14] if len(rest) > 14 else None
    if arguments[5] == NONE:
        raise RuntimeError("linear_cross_entropy: a loss with its gradient needs a reduction")
    needs = (needs_input, needs_weight, needs_bias)
    return _with_gradients(tuple(arguments), needs, grad_output)


def backward(grad_output: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """fused::linear_cross_entropy_backward: the logits are computed again."""
    *arguments, needs_input, needs_weight, needs_bias = rest
    needs = (needs_input, needs_weight, needs_bias)
    _, *gradients = _with_gradients(tuple(arguments), needs, grad_output)
    return tuple(gradients)


def _with_gradients(
    arguments: tuple[Any, ...], needs: tuple[bool, bool, bool], grad_output: Tensor | None
) -> tuple[Tensor, ...]:
    needs_input, needs_weight, needs_bias = needs
    with autocast_off(arguments[0]):
        problem = Problem(arguments, grad_output)
        input, weight, losses = problem.input, problem.linear_weight, problem.losses
        chunk = problem.chunk(buffers=losses.buffers(gradient=True), sums_weight=needs_weight)
        grad_input = input.new_empty((problem.rows, input.shape[1]) if needs_input else 0)
        grad_weight = WeightGradient(weight, problem.rows, chunk) if needs_weight else None
        grad_bias = weight.new_zeros(len(weight) if needs_bias else 0, dtype=losses.dtype)
        for rows, inputs, logits in problem.logits(chunk):
            gradient = losses.gradient(rows, logits)
            if needs_input:
                torch.mm(gradient, weight, out=grad_input[rows])
            if grad_weight is not None:
                grad_weight.add(rows, gradient, inputs)
            if needs_bias:
                grad_bias += gradient.sum(0)
        return (
            losses.reduced().to(problem.dtype),
            problem.for_all_rows(grad_input) if needs_input else grad_input,
            input.new_empty(0) if grad_weight is None else grad_weight.result(),
            grad_bias.to(weight.dtype),
        )
