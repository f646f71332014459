"""The bodies of losses of two rows of the same classes, by way of the statistics of each row.

A loss tells its formulas as a :class:`Formulas`; they are those of its header in csrc/losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compile_losses.bodies.blocks import Block, blocks, sum_of_all, sum_type
from compile_losses.bodies.row_statistics import Rows
from compile_losses.bodies.rows import as_rows, column, finite_or_zero, largest_of
from compile_losses.ops import checks

NONE, MEAN, BATCHMEAN = (checks.REDUCTIONS[name] for name in ("none", "mean", "batchmean"))

#: Largest input, its exponentials, largest target, its mass, pivot, cross: [*rows, 1] each.
Statistics: TypeAlias = tuple[Tensor, ...]


class Formulas:
    """The mathematics of a loss, for rows [*rows, classes] in one wide dtype.

    The statistics are those that a forward saves, see csrc/losses/row_pair.h.
    """

    def statistics(self, x: Tensor, t: Tensor, weight: Tensor | None) -> Statistics:
        raise NotImplementedError

    def value(self, statistics: Statistics) -> Tensor:
        """The loss of each row [*rows, 1], in the dtype of sums, from statistics in that."""
        raise NotImplementedError

    def of_input(
        self, x: Tensor, t: Tensor, statistics: Statistics, scale: Tensor, weight: Tensor | None
    ) -> Tensor:
        """The gradient of the input's rows; scale is [*rows, 1] or one number."""
        raise NotImplementedError

    def of_target(
        self, x: Tensor, t: Tensor, statistics: Statistics, scale: Tensor, weight: Tensor | None
    ) -> Tensor:
        raise NotImplementedError

    def of_weight(self, x: Tensor, t: Tensor, statistics: Statistics, scale: Tensor) -> Tensor:
        """What each class of each row adds to the gradient of its class's weight."""
        raise NotImplementedError


def positive(number: float, dtype: torch.dtype) -> float:
    """At least the smallest normal number: 0 times an infinity would be nan."""
    return max(number, torch.finfo(dtype).smallest_normal)


def exponentials(rows: Tensor, inverse_temperature: float) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and all exponentials relative to it."""
    largest = largest_of(rows)
    relative = rows - finite_or_zero(largest)
    return largest, relative.mul_(inverse_temperature).exp_()


def finite_relative(rows: Tensor, largest: Tensor, inverse_temperature: float) -> Tensor:
    """Logits relative to the largest; finite, so that 0 times one is 0."""
    return (rows - largest).mul_(inverse_temperature).clamp_(min=-1e30)


class RowPair:
    """Rows of input and of target, along a dimension."""

    def __init__(
        self,
        name: str,
        formulas: Formulas,
        input: Tensor,
        target: Tensor,
        dim: int,
        reduction: int,
        divisor: float,
        weight: Tensor | None = None,
    ) -> None:
        self.name, self.formulas, self.dim, self.reduction = name, formulas, dim, reduction
        self.divisor = divisor
        self.dtype = checks.accumulation_type(torch.promote_types(input.dtype, target.dtype))
        self.x, self.t = self.of_rows(input), self.of_rows(target)
        self.shape, self.classes = self.x.shape[:-1], self.x.shape[-1]
        self.weight = None if weight is None else weight.to(self.dtype)
        self.device, self.given = input.device, input.shape

    def of_rows(self, tensor: Tensor) -> Tensor:
        return as_rows(tensor, self.dim)

    def blocks(self, *, by_threads: bool = True) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Some rows of both in the wide dtype."""
        if self.classes == 0:
            return
        for block in blocks(self.shape, self.device, self.classes, by_threads=by_threads):
            yield block, block(self.x).to(self.dtype), block(self.t).to(self.dtype)

    def scale(self, grad_output: Tensor | None) -> Tensor:
        """The factor of the gradients: one number, or [*rows]."""
        if grad_output is None:
            one = self.x.new_ones((), dtype=self.dtype)
        elif self.reduction == NONE:
            one = grad_output.reshape(self.shape).to(self.dtype)
        else:
            one = grad_output.reshape(()).to(self.dtype)
        return one / self.divisor if self.divisor else one * torch.inf

    def forward(
        self,
        loss: Tensor,
        stats: Tensor | None,
        gradient: Tensor | None = None,
        grad_output: Tensor | None = None,
    ) -> None:
        """Writes the loss and, if they are given, the rows' statistics and input's gradient."""
        losses = self.x.new_zeros(self.shape, dtype=sum_type(self.device))
        saved = None if stats is None else stats.view(*self.shape, 6)
        if saved is not None and self.classes == 0:
            saved.copy_(saved.new_tensor([-torch.inf, 0, -torch.inf, 0, 0, 0]))
        scale = self.scale(grad_output)
        for block, x, t in self.blocks():
            found = self.formulas.statistics(x, t, self.weight)
            rounded = tuple(each.to(self.dtype) for each in found)
            wide = tuple(each.to(losses.dtype) for each in rounded)
            block(losses).copy_(self.formulas.value(wide).squeeze(-1))
            if saved is not None:
                block(saved).copy_(torch.cat(rounded, -1))
            if gradient is not None:
                written = self.formulas.of_input(x, t, rounded, scale, self.weight)
                block(self.of_rows(gradient)).copy_(written)
        if self.reduction == NONE:
            loss.copy_(losses.view(loss.shape))
        else:
            total = sum_of_all(losses)
            loss.copy_(total / self.divisor if self.divisor else total * torch.nan)

    def saved(self, grad_output: Tensor, stats: Tensor) -> tuple[Tensor, Tensor]:
        """The factor of the gradients, with a place for the classes, and the rows' statistics."""
        each = self.reduction == NONE
        rows = [size for i, size in enumerate(self.given) if i != self.dim % len(self.given)]
        shape = rows if each else []
        if list(grad_output.shape) != shape:
            raise RuntimeError(
                f"{self.name}: expected grad_output of shape {shape}, got {list(grad_output.shape)}"
            )
        expected = (self.shape.numel(), 6)
        if stats.shape != expected or stats.dtype != self.dtype or not stats.is_contiguous():
            raise RuntimeError(
                f"{self.name}: expected stats as {self.name}_forward returns them, "
                f"got shape {list(stats.shape)}"
            )
        scale = self.scale(grad_output)
        return scale.expand(self.shape), stats.view(*self.shape, 6)

    def backward(
        self,
        grad_output: Tensor,
        stats: Tensor,
        grad_input: Tensor | None,
        grad_target: Tensor | None,
    ) -> None:
        scale, saved = self.saved(grad_output, stats)
        for block, x, t in self.blocks():
            given = (x, t, _columns(block(saved)), column(block(scale), self.dtype), self.weight)
            # Both are computed before the first is written, which may be over the other's operand.
            of_target = None if grad_target is None else self.formulas.of_target(*given)
            if grad_input is not None:
                block(self.of_rows(grad_input)).copy_(self.formulas.of_input(*given))
            if grad_target is not None and of_target is not None:
                block(self.of_rows(grad_target)).copy_(of_target)

    def weight_backward(self, grad_output: Tensor, stats: Tensor, result: Tensor) -> None:
        scale, saved = self.saved(grad_output, stats)
        total = result.new_zeros(self.classes, dtype=sum_type(self.device))
        for block, x, t in self.blocks(by_threads=False):  # sums over rows
            each = self.formulas.of_weight(
                x, t, _columns(block(saved)), column(block(scale), self.dtype)
            )
            total += each.flatten(0, -2).sum(0, dtype=total.dtype)
        result.copy_(total)


def _columns(saved: Tensor) -> Statistics:
    return tuple(saved[..., i : i + 1] for i in range(saved.shape[-1]))


class RowPairs:
    """The bodies of a loss of row pairs.

    Args:
        prepare: the pair, from input, target, the loss's other tensors and its options.
        tensors: how many tensors come first, of input on.
    """

    def __init__(self, name: str, prepare: Callable[..., RowPair], tensors: int = 2) -> None:
        self.name, self.prepare, self.tensors = name, prepare, tensors

    def forward(self, results: tuple[Tensor, Tensor], *arguments: Any) -> None:
        *given, _ = arguments
        self.prepare(*given).forward(*results)

    def backward(self, results: Sequence[Tensor], grad_output: Tensor, *arguments: Any) -> None:
        *given, needs_input, needs_target = arguments
        pair, stats = self._saved(given)
        first, second = results
        pair.backward(
            grad_output, stats, first if needs_input else None, second if needs_target else None
        )

    def weight_backward(self, result: Tensor, grad_output: Tensor, *arguments: Any) -> None:
        pair, stats = self._saved(arguments)
        pair.weight_backward(grad_output, stats, result)

    def _saved(self, given: Sequence[Any]) -> tuple[RowPair, Tensor]:
        pair = self.prepare(*given[: self.tensors], *given[self.tensors + 1 :])
        return pair, given[self.tensors]

    def with_grad(self, results: tuple[Tensor, Tensor], *arguments: Any) -> None:
        self._loss_and_gradient(*results, *arguments)

    def with_grad_(self, loss: Tensor, *arguments: Any) -> None:
        self._loss_and_gradient(loss, arguments[0], *arguments)

    def _loss_and_gradient(self, loss: Tensor, gradient: Tensor, *arguments: Any) -> None:
        *given, _, grad_output = arguments
        pair = self.prepare(*given)
        checks.check_with_gradient(self.name, pair.reduction)
        pair.forward(loss, None, gradient, grad_output)

    def shared_backward(self, _: None, *arguments: Any) -> None:
        """``X_row_statistics_backward_``."""
        grads, rest = arguments[:4], arguments[4:]
        input, target, stats, ignore_index, softcap, *rest_of_pair = rest
        of_divergence, teacher, divergence_stats, reverse, *options = rest_of_pair
        if teacher.dtype != input.dtype:
            raise RuntimeError(
                f"{self.name}_row_statistics_backward_: expected teacher to have input's dtype"
            )
        ordered = (teacher, input) if reverse else (input, teacher)
        pair = self.prepare(*ordered, NONE, *options, -1)
        scale, saved = pair.saved(of_divergence, divergence_stats)

        def added(z: Tensor, block: Block) -> Tensor:
            t = block(pair.of_rows(teacher)).to(pair.dtype)
            given = (_columns(block(saved)), column(block(scale), pair.dtype), None)
            if reverse:
                return pair.formulas.of_target(t, z, *given)
            return pair.formulas.of_input(z, t, *given)

        rows = Rows(input, target, ignore_index, softcap)
        rows.write_gradient(input, grads, stats, added)
