"""A loss of a linear layer's output and its gradients, a chunk of rows of logits at a time.

A chunk of input's rows, [chunk, hidden], is multiplied with the weight, [classes, hidden], into a
buffer [chunk, classes] that all chunks share. The row kernels write the logits' gradient over the
logits. Of that gradient two more products make the chunk's rows of input's gradient, and a part of
the weight's gradient, which is a sum over chunks. Logits, probabilities or their gradient are never
in memory for more than a chunk of rows. If the sum costs most, a large first chunk has its logits
in the memory of the weight's gradient (:mod:`compile_losses.ops.linear.class_blocks`).
:mod:`compile_losses.ops.linear.chunk_size` decides how many rows each chunk has.

Several statistics of a row, for losses and metrics that share the logits, take one read of the
logits (:mod:`compile_losses.ops.linear.row_statistics`). A divergence reads a teacher's logits as
well, which are given, or computed a chunk at a time
(:mod:`compile_losses.ops.linear.row_divergences`). Its logits never lie in the weight's gradient,
since two rows of logits do not come apart into blocks of classes.

If at least an eighth of the rows do not count, they are left out before the first product. Of a
cross entropy those are the rows that are ignored, whose number a GPU's host has to wait for. It
waits if the products take far longer than the wait, after all is ready for the first of them, and
never while a CUDA graph is captured. Of any loss they are what a compiled graph says, which counts
them before (:mod:`compile_losses.ops.counted_rows`). If rows are not left out, they are computed
like the others, to gradients of 0. Sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compile_losses import switches
from compile_losses.device_constants import is_worth_waiting, rows_of_equal_threads
from compile_losses.ops.checks import accumulation_type
from compile_losses.ops.counted_rows import CountedRows, KeptRows, is_captured
from compile_losses.ops.linear.arguments import check
from compile_losses.ops.linear.chunk_size import (
    Plan,
    chunk_rows,
    part_rows,
    plan,
    sums_in_float32,
)
from compile_losses.ops.linear.class_blocks import FirstRows
from compile_losses.ops.linear.matrix_products import (
    PIECE,
    Chunk,
    Gradients,
    add_chunks,
    chunks_of_logits,
    parts_of,
    rows_of,
)
from compile_losses.ops.linear.reference import autocast_off
from compile_losses.ops.linear.row_divergences import RowDivergences
from compile_losses.ops.linear.row_function import RowFunction, known_gradients
from compile_losses.ops.linear.row_losses import NONE, RowLosses
from compile_losses.ops.linear.row_statistics import RowStatistics
from compile_losses.ops.linear.weight_sum import current_sum, rows_of_sum

Losses: TypeAlias = RowLosses | RowDivergences | RowStatistics


class Problem:
    """A linear layer, the losses of its output's rows, and which rows are computed.

    Args:
        counts: begins to count the rows that may be left out, if there are any.
        scale: of all logits.
    """

    def __init__(
        self,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        losses: Losses,
        counts: Callable[[], KeptRows] | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        self.input, self.linear_weight, self.linear_bias = input, linear_weight, linear_bias
        self.losses, self.counts, self.scale = losses, counts, scale
        self.counted: KeptRows | None = None
        self.kept: Tensor | None = None
        self.rows = self.all_rows = len(input)

    def count(self) -> None:
        """Begins to count the rows that may be left out."""
        if self.counts is not None:
            self.counted = self.counts()

    def leave_out(self) -> bool:
        """Leaves out the rows that do not count if they are many; waits until they are counted."""
        return self.counted is not None and self.keep(self.counted.indices())

    def keep(self, rows: Tensor | None) -> bool:
        """Leaves out all rows but these, int64 [kept]; None and False if all rows stay."""
        if rows is None:
            return False
        self.kept, self.rows = rows, len(rows)
        self.losses.keep(rows)
        return True

    def logits(self, chunk: int, start: int = 0) -> Iterator[Chunk]:
        return chunks_of_logits(
            self.input, self.linear_weight, self.linear_bias, chunk, self.kept, start, self.scale
        )

    @property
    def sizes(self) -> tuple[int, int, int, torch.dtype, torch.device]:
        classes, hidden = self.linear_weight.shape
        return self.rows, hidden, classes, self.input.dtype, self.input.device

    def plan(self, needs_input: bool, needs_weight: bool) -> Plan:
        """How many rows of logits are held at a time for the gradients, and where."""
        beside = self.losses.beside(gradient=True)
        own = current_sum() is None
        if not (needs_weight and own and isinstance(self.losses, RowLosses)) or self.losses.by_row:
            rows, hidden, classes, dtype, device = self.sizes
            chunk = chunk_rows(
                rows_of_sum(rows), hidden, classes, dtype, device,
                beside=beside, sums_weight=needs_weight, is_taken=True,
            )  # fmt: skip
            return Plan(max(1, min(chunk, rows)))
        return plan(
            *self.sizes,
            needs_input=needs_input,
            gathered=self.kept is not None,
        )

    def part(self, chunk: int, beside: float) -> int:
        """How many rows of a chunk the losses compute at a time.

        With the option ``batch_invariant`` no more than kernels give as many threads as one.
        """
        part = part_rows(chunk, self.input.device, beside)
        if not switches.is_batch_invariant():
            return part
        return min(part, PIECE, rows_of_equal_threads(self.input.device))

    def results(self) -> tuple[Tensor, ...]:
        """The results of the losses, each row in its place."""
        computed = self.losses.results()
        if self.kept is None or not self.losses.by_row:
            return computed
        others = self.losses.left_out(len(self.linear_weight))
        return tuple(map(self.for_all_rows, computed, others))

    def for_all_rows(self, computed: Tensor, other: Tensor | float | None = 0) -> Tensor:
        """A result by row, for the rows that were left out as well.

        Args:
            other: what these have, one number for all or for each row, [all rows]; None for a
                result that nobody asked for.
        """
        if self.kept is None or other is None:
            return computed
        result = computed.new_empty((self.all_rows, *computed.shape[1:]))
        if isinstance(other, Tensor):
            result.copy_(other)
        else:
            result.fill_(other)
        return result.index_copy_(0, self.kept, computed)


def of_cross_entropy(
    arguments: tuple[Any, ...], grad_output: Tensor | RowFunction | None = None
) -> Problem:
    """The problem of a leaf op of linear cross entropy."""
    input, linear_weight, target, linear_bias, weight, *options = arguments
    reduction, ignore_index, label_smoothing, softcap, z_loss, dtype = options
    check(*arguments, leaf=True)
    target = target.to(torch.int64)
    counts: Callable[[], KeptRows] | None = None
    operations = 6 * linear_weight.numel() * len(target)
    if is_worth_waiting(target.device, operations) and not is_captured(target):

        def counts() -> KeptRows:
            return KeptRows(target != ignore_index)

    losses = RowLosses(
        target, weight, reduction, ignore_index, label_smoothing, softcap, z_loss,
        accumulation_type(input.dtype), dtype, grad_output,
    )  # fmt: skip
    return Problem(input, linear_weight, linear_bias, losses, counts)


@dataclass(frozen=True)
class Several:
    """The results of a loss that computes several numbers of each row, and reduces none.

    Attributes:
        count: how many there are.
        gradients: the names of the gradients of those that have one, which are the first.
        fake: the results, from the leaf ops' arguments as fakes.
        for_gradients: the gradients that are read, and the arguments they are computed from, of
            the gradients and arguments that the backward is given.
    """

    count: int
    gradients: tuple[str, ...]
    fake: Callable[..., tuple[Tensor, ...]]
    for_gradients: Callable[[Any, Any], tuple[list[Tensor | None], tuple[Any, ...]]]


@dataclass(frozen=True)
class RowChunks:
    """The kernels of the leaf ops of a loss.

    Attributes:
        name: of the loss.
        count, tensors: how many arguments the leaf ops share, and how many of these are tensors;
            the first that is none is the reduction, if there is one.
        problem: from these arguments and a grad_output.
        several: the results; None if there is one.
    """

    name: str
    count: int
    tensors: int
    problem: Callable[..., Problem]
    several: Several | None = None

    def forward(self, *rest: Any) -> Any:
        """fused::X_forward: one product in all."""
        arguments, counted = rest[: self.count], rest[self.count :]
        with autocast_off(arguments[0]):
            found = results(_counting(self.problem(arguments), *counted))
            return found[0] if self.several is None else found

    def with_grad(self, *rest: Any) -> tuple[Tensor, ...]:
        """fused::X_with_grad: three products for all gradients."""
        arguments, needs, more = self._apart(rest)
        if self._is_by_row(arguments):
            raise RuntimeError(f"{self.name}: a loss with its gradient needs a reduction")
        return self._with_gradients(arguments, needs, *more)

    def _apart(self, rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
        """The arguments that all leaf ops share, the needs, and what follows them."""
        needs = slice(self.count, self.count + 3)
        return rest[: self.count], rest[needs], rest[needs.stop :]

    def rows_with_grad(self, *rest: Any) -> tuple[Tensor, ...]:
        """fused::X_rows_with_grad: three products, as for a loss that is reduced."""
        arguments, needs, (row_function, known, *counted) = self._apart(rest)
        if not self._is_by_row(arguments):
            raise RuntimeError(
                f"{self.name}: expected reduction 0 (none) for gradients by row, "
                f"got {arguments[self.tensors]}"
            )
        function = RowFunction(row_function, tuple(known))
        return self._with_gradients(arguments, needs, function, *counted)

    def backward(self, *rest: Any) -> tuple[Tensor, ...]:
        """fused::X_backward: the logits are computed again."""
        first = 1 if self.several is None else len(self.several.gradients)
        gradients, (arguments, needs, counted) = rest[:first], self._apart(rest[first:])
        if self.several is not None:
            read, arguments = self.several.for_gradients(gradients, arguments)
            given: Any = known_gradients(read, self.several.count)
            return self._with_gradients(arguments, needs, given, *counted)[self.several.count :]
        (given,) = gradients
        given = known_gradients([given]) if self._is_by_row(arguments) else given
        return self._with_gradients(arguments, needs, given, *counted)[1:]

    def _is_by_row(self, arguments: Sequence[Any]) -> bool:
        return self.several is not None or arguments[self.tensors] == NONE

    def _with_gradients(
        self,
        arguments: tuple[Any, ...],
        needs: Any,
        grad_output: Tensor | RowFunction | None = None,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        with autocast_off(arguments[0]):
            problem = _counting(self.problem(arguments, grad_output), counted)
            return results_with_gradients(problem, needs)


def _counting(problem: Problem, counted: Tensor | None = None) -> Problem:
    """A problem without the rows that do not count, if others have counted them."""
    if counted is not None:
        problem.counts = None
        problem.keep(CountedRows(counted, problem.all_rows).indices())
    return problem


def results(problem: Problem) -> tuple[Tensor, ...]:
    """The results of the losses, in one product."""
    problem.count()
    problem.leave_out()
    losses = problem.losses
    beside = losses.beside(gradient=False)
    chunk = chunk_rows(*problem.sizes, beside=beside, is_taken=True)
    part = problem.part(chunk, beside)
    for each in problem.logits(chunk):
        for some in parts_of(each, part):
            losses.add(*some)
    return problem.results()


def results_with_gradients(problem: Problem, needs: tuple[bool, bool, bool]) -> tuple[Tensor, ...]:
    """The same, and the gradients of input, weight and bias, in three products."""
    problem.count()
    how, gradients, first = _prepared(problem, needs)  # while a device counts
    if problem.leave_out():
        del gradients, first
        how, gradients, first = _prepared(problem, needs)
    if first is not None:
        rows = rows_of(problem.input, slice(0, how.first_rows), problem.kept)
        first.add(rows, problem.linear_bias)
        del first, rows
    part = problem.part(how.chunk, problem.losses.beside(gradient=True))
    chunks = problem.logits(how.chunk, how.first_rows)
    add_chunks(gradients, chunks, part, problem.losses.write_gradient)
    grad_input, *others = gradients.result()
    if gradients.needs_input:
        grad_input = problem.for_all_rows(grad_input)
    return *problem.results(), grad_input, *others


def _prepared(
    problem: Problem, needs: tuple[bool, bool, bool]
) -> tuple[Plan, Gradients, FirstRows | None]:
    """How the gradients of the problem's rows are computed, and the memory for it."""
    needs_input, needs_weight, _ = needs
    losses = problem.losses
    how = problem.plan(needs_input, needs_weight)
    rows = rows_of_sum(problem.rows)
    wide = how.first is None and sums_in_float32(rows, how.chunk, problem.input.dtype)
    gradients = Gradients(
        problem.linear_weight, problem.rows, needs, losses.dtype, wide=wide, total=current_sum()
    )
    first = None
    if how.first is not None and isinstance(losses, RowLosses):
        first = FirstRows(gradients, how.first, losses)
    return how, gradients, first
