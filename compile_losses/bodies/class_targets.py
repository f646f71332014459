"""The bodies of losses with class indices: cross entropy, whole and of shards, and nll_loss.

The formulas, and what is done about infinite logits, are those of csrc/losses/cross_entropy.h. A
loss of whole rows is that of one shard that holds all classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_losses.bodies.blocks import Block, blocks, is_traced, sum_of_all, sum_type
from compile_losses.bodies.rows import (
    add_at,
    as_rows,
    capped,
    class_dim,
    column,
    finite_or_zero,
    largest_of,
    slope_of_cap,
)
from compile_losses.ops import checks
from compile_losses.ops.divisors import divisors, mean_of

NONE, MEAN = checks.REDUCTIONS["none"], checks.REDUCTIONS["mean"]


def check_bounds(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """Refuses classes that do not exist. On other devices than the CPU, and in compiled code,
    gathering them does."""
    if is_traced() or target.device.type != "cpu" or target.numel() == 0:
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
    if wrong.any():
        raise IndexError(
            f"{op}: target {int(target[wrong][0])} is out of bounds for {classes} classes "
            f"(ignore_index is {ignore_index})"
        )


@dataclass
class Targets:
    """The targets of rows [*rows], with what each of them weighs.

    Attributes:
        kept: those that are not ignored.
        here, place: those among the columns of the logits, and where; 0 where they are not.
        weight: of each target; 0 where it is ignored.
        weights: of the columns; None for 1.
        weight_sum: of all classes; used with smoothing.
    """

    op: str
    target: Tensor
    class_weights: Tensor | None
    ignore_index: int
    label_smoothing: float
    first_class: int
    columns: int
    classes: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not 0 <= self.first_class <= self.classes:
            raise RuntimeError(
                f"{self.op}: expected first_class to be one of {self.classes} classes, "
                f"got {self.first_class}"
            )
        given = self.class_weights
        if given is not None and given.shape != (self.classes,):
            raise RuntimeError(
                f"{self.op}: expected weight of shape {[self.classes]}, got {list(given.shape)}"
            )
        check_bounds(self.op, self.target, self.classes, self.ignore_index)
        index = self.target.to(torch.int64)
        self.kept = index != self.ignore_index
        place = index - self.first_class
        self.here = self.kept & (place >= 0) & (place < self.columns)
        exists = ~self.kept | ((index >= 0) & (index < self.classes))
        self.place = torch.where(self.here, place, torch.where(exists, 0, index))
        self.smoothing = self.label_smoothing if self.label_smoothing > 0 else 0.0
        self.weights: Tensor | None = None
        self.weight_sum: Tensor | float = float(self.classes)
        self.weight = self.kept.to(self.dtype)
        if self.class_weights is not None:
            of_all = self.class_weights.to(self.dtype)
            self.weights = of_all[self.first_class : self.first_class + self.columns]
            self.weight_sum = of_all.sum()
            if self.classes > 0:
                chosen = torch.where(self.kept, index, 0)
                picked = of_all.index_select(0, chosen.flatten()).view(chosen.shape)
                self.weight = torch.where(self.kept, picked, 0)

    def loss(self, parts: Sequence[Tensor], block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """The losses of rows, and their statistics, from the parts of one shard."""
        largest, exponentials, target_logit, *weighted = parts
        log_sum = exponentials.log()
        losses = block(self.weight) * ((largest - target_logit) + log_sum)
        if self.smoothing > 0:
            uniform = self.weight_sum * log_sum + weighted[0]
            losses = (1 - self.smoothing) * losses + self.smoothing / self.classes * uniform
        return torch.where(block(self.kept), losses, 0), largest, log_sum

    def parts(self, rows: Tensor, block: Block) -> list[Tensor]:
        """What a shard knows of some rows of its logits, after the soft-cap."""
        largest = largest_of(rows)
        relative = rows - finite_or_zero(largest)
        weighted = []
        if self.smoothing > 0:
            each = relative if self.weights is None else relative * self.weights
            weighted.append(-each.sum(-1))
        exponentials = relative.exp_().sum(-1)
        target_logit = torch.zeros_like(exponentials)
        if self.columns > 0:
            picked = rows.gather(-1, block(self.place).unsqueeze(-1)).squeeze(-1)
            target_logit = torch.where(block(self.here), picked, 0)
        return [largest.squeeze(-1), exponentials, target_logit, *weighted]

    def scales(self, reduction: int, grad_output: Tensor, total_weight: Tensor | None) -> Tensor:
        """The factors of the rows' gradients; 0 of ignored ones."""
        scale = grad_output.to(self.dtype)
        if reduction != NONE:
            scale = scale.reshape(())
        if reduction == MEAN and total_weight is not None:
            scale = scale / total_weight
        return torch.where(self.kept, scale, 0)

    def gradient(
        self,
        rows: Tensor,  # after the soft-cap
        block: Block,
        scales: Tensor,
        largest: Tensor,
        log_sum: Tensor,
        grad_squares: Tensor | None = None,
    ) -> Tensor:
        scale, weight = block(scales), block(self.weight)
        of_target = scale * weight
        factor, uniform = of_target, None
        if self.smoothing > 0:
            share = self.smoothing / self.classes
            factor = scale * ((1 - self.smoothing) * weight + share * self.weight_sum)
            of_target, uniform = (1 - self.smoothing) * of_target, scale * share
        if grad_squares is not None:
            factor = factor + torch.where(
                block(self.kept), 2 * block(grad_squares) * (largest + log_sum), 0
            )
        result = (rows - largest.unsqueeze(-1)).sub_(log_sum.unsqueeze(-1)).exp_()
        result.mul_(factor.unsqueeze(-1))
        if uniform is not None:
            uniform = uniform.unsqueeze(-1)
            result.sub_(uniform if self.weights is None else uniform * self.weights)
        add_at(
            result, block(self.place), -torch.where(block(self.here), of_target, 0).unsqueeze(-1)
        )
        return result


class Problem:
    """Logits [C], [N, C] or [N, C, d1, ...] and their targets."""

    def __init__(
        self,
        op: str,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignore_index: int,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        first_class: int = 0,
        classes: int | None = None,
    ) -> None:
        self.dim, self.reduction, self.softcap = class_dim(input), reduction, softcap
        self.rows, self.dtype = self.of_rows(input), checks.accumulation_type(input.dtype)
        columns = self.rows.shape[-1]
        self.shape = self.rows.shape[:-1]
        self.targets = Targets(
            op, target.reshape(self.shape), weight, ignore_index, label_smoothing, first_class,
            columns, columns if classes is None else classes, self.dtype,
        )  # fmt: skip
        self.weight, self.ignore_index = weight, ignore_index
        self.device = input.device

    def of_rows(self, tensor: Tensor) -> Tensor:
        return as_rows(tensor, self.dim)

    def blocks(self) -> Any:
        return blocks(self.shape, self.device, max(1, self.rows.shape[-1]), by_threads=True)

    def block(self, block: Block) -> tuple[Tensor, Tensor]:
        """Some rows in the wide dtype, as they are and after the soft-cap."""
        rows = block(self.rows).to(self.dtype)
        return rows, capped(rows, self.softcap)

    def totals(self) -> Tensor:
        """The divisor of a mean, in the dtype of sums."""
        flat = self.targets.target.flatten()
        dtype = sum_type(self.device)
        return divisors(flat, self.weight, self.ignore_index, dtype)[0]

    def write_gradient(
        self, result: Tensor, block: Block, rows: Tensor, z: Tensor, *statistics: Any
    ) -> None:
        gradient = self.targets.gradient(z, block, *statistics)
        if self.softcap is not None:
            gradient.mul_(slope_of_cap(rows, self.softcap))
        block(self.of_rows(result)).copy_(gradient)

    def forward(
        self,
        loss: Tensor,
        stats: Tensor | None,
        total_weight: Tensor | None,
        gradient: Tensor | None = None,
        grad_output: Tensor | None = None,
    ) -> None:
        """Writes the loss and, if they are given, the other results."""
        totals = self.totals()
        losses = self.rows.new_empty(self.shape, dtype=self.dtype)
        saved = None if stats is None else stats.view(*self.shape, 2)
        scales = None
        if gradient is not None:
            one = losses.new_ones(()) if grad_output is None else grad_output
            scales = self.targets.scales(self.reduction, one, totals.to(self.dtype))
        for block in self.blocks():
            rows, z = self.block(block)
            each, largest, log_sum = self.targets.loss(self.targets.parts(z, block), block)
            block(losses).copy_(each)
            if saved is not None:
                block(saved)[..., 0].copy_(largest)
                block(saved)[..., 1].copy_(log_sum)
            if gradient is not None:
                self.write_gradient(gradient, block, rows, z, scales, largest, log_sum)
        if total_weight is not None:
            total_weight.copy_(totals)
        reduce(loss, losses, self.reduction, totals, self.targets.smoothing)


def reduce(loss: Tensor, losses: Tensor, reduction: int, totals: Tensor, smoothing: float) -> None:
    """Writes the loss of rows, reduced or not."""
    if reduction == NONE:
        loss.copy_(losses.view(loss.shape))
        return
    result = sum_of_all(losses, totals.dtype)
    loss.copy_(mean_of(result, totals, smoothed=smoothing > 0) if reduction == MEAN else result)


def _saved(op: str, stats: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The statistics of rows that a forward has saved."""
    if stats.shape != (shape.numel(), 2) or stats.dtype != dtype or not stats.is_contiguous():
        raise RuntimeError(f"{op} returns them, got shape {list(stats.shape)}")
    largest, log_sum = stats.view(*shape, 2).unbind(-1)
    return largest, log_sum


def _check_grad_output(op: str, grad_output: Tensor, target: Tensor, reduction: int) -> None:
    shape = target.shape if reduction == NONE else torch.Size()
    if grad_output.shape != shape:
        raise RuntimeError(
            f"{op}_backward: expected grad_output of shape {list(shape)}, "
            f"got {list(grad_output.shape)}"
        )


def _check_total(op: str, total_weight: Tensor, dtype: torch.dtype) -> None:
    if total_weight.numel() != 1 or total_weight.dtype != dtype:
        raise RuntimeError(
            f"{op}_backward: expected total_weight as {op}_forward returns it, "
            f"got shape {list(total_weight.shape)}"
        )


class CrossEntropy:
    """The bodies of ``cross_entropy``."""

    op = "cross_entropy"

    def forward(self, results: tuple[Tensor, Tensor, Tensor], *arguments: Any) -> None:
        *given, _, softcap = arguments
        Problem(self.op, *(*given, softcap)).forward(*results)

    def value(self, loss: Tensor, input: Tensor, target: Tensor, *options: Any) -> None:
        Problem(self.op, input, target, None, *options).forward(loss, None, None)

    def backward(
        self, gradient: Tensor, grad_output: Tensor, input: Tensor, target: Tensor,
        weight: Tensor | None, stats: Tensor, total_weight: Tensor, *options: Any,
    ) -> None:  # fmt: skip
        problem = Problem(self.op, input, target, weight, *options)
        told = f"{self.op}_backward: expected stats as {self.op}_forward"
        saved = _saved(told, stats, problem.shape, problem.dtype)
        _check_total(self.op, total_weight, problem.dtype)
        _check_grad_output(self.op, grad_output, target, problem.reduction)
        each = _in_rows(grad_output, problem)
        scales = problem.targets.scales(problem.reduction, each, total_weight.reshape(()))
        _write(problem, gradient, scales, saved)

    def with_grad(self, results: tuple[Tensor, Tensor], *arguments: Any) -> None:
        self._loss_and_gradient(*results, *arguments)

    def with_grad_(self, loss: Tensor, *arguments: Any) -> None:
        self._loss_and_gradient(loss, arguments[0], *arguments)

    def _loss_and_gradient(self, loss: Tensor, gradient: Tensor, *arguments: Any) -> None:
        *given, _, softcap, grad_output = arguments
        problem = Problem(self.op, *(*given, softcap))
        checks.check_with_gradient(self.op, problem.reduction)
        problem.forward(loss, None, None, gradient, grad_output)


def _in_rows(grad_output: Tensor, problem: Problem) -> Tensor:
    """A gradient for each row, or for all."""
    return grad_output.reshape(problem.shape) if problem.reduction == NONE else grad_output


def _write(
    problem: Problem,
    gradient: Tensor,
    scales: Tensor,
    saved: tuple[Tensor, Tensor],
    grad_squares: Tensor | None = None,
) -> None:
    """Writes the gradient of all rows, from their statistics."""
    for block in problem.blocks():
        rows, z = problem.block(block)
        largest, log_sum = map(block, saved)
        problem.write_gradient(gradient, block, rows, z, scales, largest, log_sum, grad_squares)


class Shards:
    """The bodies of ``vocabulary_parallel_parts`` and its other ops."""

    def parts(
        self, result: Tensor, input: Tensor, target: Tensor, weight: Tensor | None,
        first_class: int, classes: int, ignore_index: int, label_smoothing: float,
        softcap: float | None,
    ) -> None:  # fmt: skip
        problem = Problem(
            CrossEntropy.op, input, target, weight, NONE, ignore_index, label_smoothing, softcap,
            first_class, classes,
        )  # fmt: skip
        columns = result.view(*problem.shape, result.shape[-1])
        for block in problem.blocks():
            found = problem.targets.parts(problem.block(block)[1], block)
            block(columns).copy_(torch.stack(found, -1))

    def merge(
        self, results: tuple[Tensor, Tensor, Tensor], parts: Tensor, target: Tensor,
        weight: Tensor | None, shard_weights: Tensor | None, classes: int, reduction: int,
        ignore_index: int, label_smoothing: float, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        loss, stats, total_weight = results
        columns = 4 if label_smoothing > 0 else 3
        if parts.dim() != 3 or parts.shape[1:] != (target.numel(), columns):
            raise RuntimeError(
                "vocabulary_parallel_merge: expected parts of shape "
                f"[shards, {target.numel()}, {columns}], got {list(parts.shape)}"
            )
        if columns == 4 and (shard_weights is None or shard_weights.shape != parts.shape[:1]):
            raise RuntimeError(
                "vocabulary_parallel_merge: expected shard_weights of shape "
                f"{[parts.shape[0]]} with label smoothing"
            )
        targets = Targets(
            CrossEntropy.op, target.reshape(-1), weight, ignore_index, label_smoothing, 0, classes,
            classes, parts.dtype,
        )  # fmt: skip
        largest, exponentials, target_logit, *weighted = parts.unbind(-1)  # [shards, rows]
        most = largest.amax(0)
        finite = largest > -torch.inf
        factors = torch.where(finite, (largest - most).exp(), 1)
        merged = [most, (exponentials * factors).sum(0), target_logit.sum(0)]
        if weighted and shard_weights is not None:
            masses = shard_weights.to(parts.dtype).unsqueeze(1)
            moved = torch.where(finite, masses * (most - largest), 0)
            merged.append((weighted[0] + moved).sum(0))
        losses, most, log_sum = targets.loss(merged, lambda tensor: tensor)
        stats.copy_(torch.stack([most, log_sum], 1))
        totals = divisors(targets.target, weight, ignore_index, sum_type(parts.device))[0]
        total_weight.copy_(totals)
        reduce(loss, losses, reduction, totals, targets.smoothing)

    def gradient(self, result: Tensor, grad_output: Tensor, input: Tensor, *rest: Any) -> None:
        target, weight, stats, first_class, classes, reduction, *options = rest
        ignore_index, label_smoothing, softcap, grad_squares = options
        if reduction == MEAN:
            raise RuntimeError(
                "vocabulary_parallel_gradient: expected reduction to be 0 (none) or 2 (sum), got 1"
            )
        problem = Problem(
            CrossEntropy.op, input, target, weight, reduction, ignore_index, label_smoothing,
            softcap, first_class, classes,
        )  # fmt: skip
        told = "vocabulary_parallel_gradient: expected stats as vocabulary_parallel_merge"
        saved = _saved(told, stats, problem.shape, problem.dtype)
        _check_grad_output(CrossEntropy.op, grad_output, target, reduction)
        squares = None
        if grad_squares is not None:
            if grad_squares.shape not in (target.shape, torch.Size()):
                raise RuntimeError(
                    "vocabulary_parallel_gradient: expected grad_squares of shape [] or "
                    f"{list(target.shape)}, got {list(grad_squares.shape)}"
                )
            each = grad_squares.reshape(problem.shape) if grad_squares.dim() else grad_squares
            squares = each.to(problem.dtype).expand(problem.shape)
        scales = problem.targets.scales(reduction, _in_rows(grad_output, problem), None)
        _write(problem, result, scales, saved, squares)

    def gradient_(self, _: None, grad_output: Tensor, input: Tensor, *rest: Any) -> None:
        self.gradient(input, grad_output, input, *rest)


class NllLoss:
    """The bodies of ``nll_loss``."""

    op = "nll_loss"

    def forward(self, results: tuple[Tensor, Tensor], *arguments: Any) -> None:
        *given, _ = arguments
        self._loss(*results, *given)

    def value(self, loss: Tensor, input: Tensor, target: Tensor, *options: Any) -> None:
        self._loss(loss, None, input, target, None, *options)

    def _loss(self, loss: Tensor, total_weight: Tensor | None, *given: Any) -> None:
        problem = Problem(self.op, *given)
        targets, totals = problem.targets, problem.totals()
        losses = targets.weight
        if targets.columns > 0:
            picked = problem.rows.gather(-1, targets.place.unsqueeze(-1)).squeeze(-1)
            losses = torch.where(targets.kept, -targets.weight * picked.to(problem.dtype), 0)
        if total_weight is not None:
            total_weight.copy_(totals)
        reduce(loss, losses, problem.reduction, totals, 0)

    def backward(
        self, gradient: Tensor, grad_output: Tensor, input: Tensor, target: Tensor,
        weight: Tensor | None, total_weight: Tensor, *options: Any,
    ) -> None:  # fmt: skip
        problem = Problem(self.op, input, target, weight, *options)
        targets = problem.targets
        _check_total(self.op, total_weight, problem.dtype)
        _check_grad_output(self.op, grad_output, target, problem.reduction)
        each = _in_rows(grad_output, problem)
        scales = targets.scales(problem.reduction, each, total_weight.reshape(()))
        gradient.zero_()
        of_target = torch.where(targets.kept, -targets.weight * scales, 0)
        places = problem.of_rows(gradient)
        add_at(places, targets.place, column(of_target, gradient.dtype))
