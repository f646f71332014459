"""Statistics of the rows of a chunk of logits, and the gradient of these logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compile_losses.ops import row_numbers, row_picks, row_statistics
from compile_losses.ops.linear.row_divergences import NONE, Pair, TeacherLogits, tensors_beside
from compile_losses.ops.linear.row_function import RowFunction

#: Places of the statistics; the first ones have gradients.
NLL, LOGSUMEXP, ENTROPY, TOTAL, DIVERGENCE, LOG_PROBS = range(6)
LOG_SQUARES, VARIANCE, RANK, TOP_VALUES, TOP_INDICES, MAXIMUM, ARGMAX = range(6, 13)
COUNT, DIFFERENTIABLE = ARGMAX + 1, LOG_PROBS + 1
#: Those that are int64: classes, or numbers of classes.
PLACES_OF_CLASSES = (RANK, TOP_INDICES, ARGMAX)
#: For a variance so many logits are copied at a time, in the dtype of sums.
_BLOCK = 1 << 22


class RowStatistics:
    """The statistics of :mod:`compile_losses.ops.row_statistics` for each row of logits.

    With a pair, the divergence of each row from the teacher's is one of them; with picks, the
    log-probabilities of these; with squares, the logarithm of the sum of squared probabilities;
    with variance, that of the logits; and what is asked for of
    :mod:`compile_losses.ops.row_numbers`. The gradient is for the gradients that row_function makes
    of the statistics, one or None for each of the first six, and is that of the product without its
    scale. Without row_function there is none.
    """

    by_row = True

    def __init__(
        self,
        like: Tensor,  # on the device, of the logits' dtype
        target: Tensor | None,  # int64 [rows]
        picks: Tensor | None,  # int64 [rows, K]
        ignore_index: int,
        softcap: float | None,
        pair: Pair | None,
        with_entropy: bool,  # of the teacher, added to the divergence
        teacher: TeacherLogits | None,  # given with a pair
        dtype: torch.dtype,  # that sums are made in, and of the statistics
        row_function: RowFunction | None,
        *,
        squares: bool = False,
        variance: bool = False,
        ranked: Tensor | None = None,  # int64 [rows]
        top_k: int = 0,
        ties: bool = False,
        scale: float = 1.0,  # of the logits in the product
    ) -> None:
        self.target, self.picks, self.all_targets = target, picks, target
        self.ignore_index, self.softcap = ignore_index, softcap
        self.pair, self.with_entropy, self.teacher = pair, with_entropy, teacher
        self.logits, self.dtype, self.row_function = like.dtype, dtype, row_function
        self.squares, self.variance, self.scale = squares, variance, scale
        self.ranked, self.top_k, self.ties = ranked, top_k, ties
        self.nothing = like.new_empty(0, dtype=dtype)
        nothing = [self.nothing] * COUNT
        if picks is not None:
            nothing[LOG_PROBS] = like.new_empty((0, picks.shape[1]), dtype=dtype)
        if top_k:
            nothing[TOP_VALUES] = nothing[TOP_INDICES] = like.new_empty((0, top_k), dtype=dtype)
        for place in PLACES_OF_CLASSES:
            nothing[place] = nothing[place].to(torch.int64)
        self.chunks: list[tuple[Tensor, ...]] = [tuple(nothing)]

    def keep(self, rows: Tensor) -> None:
        """Leaves out all rows but these, int64 [kept]."""
        self.target = None if self.target is None else self.target[rows]
        self.picks = None if self.picks is None else self.picks[rows]
        self.ranked = None if self.ranked is None else self.ranked[rows]
        if self.teacher is not None:
            self.teacher.keep(rows)
        if self.row_function is not None:
            self.row_function = self.row_function.keep(rows)

    def left_out(self, classes: int) -> list[Tensor | float | None]:
        """The statistics of rows that are left out: those of equal logits, with which what is made
        of them is as finite as with any, and a negative log-likelihood of 0 if they are ignored;
        None for those that nobody asked for."""
        most = math.log(classes)
        found: list[Tensor | float | None] = [None] * COUNT
        if self.all_targets is not None:
            found[NLL] = torch.where(self.all_targets == self.ignore_index, 0.0, most)
        found[LOGSUMEXP] = found[ENTROPY] = most
        found[TOTAL] = found[MAXIMUM] = found[ARGMAX] = 0
        if self.pair is not None:  # no edge of what is made of it, as 0 may be
            found[DIVERGENCE] = 1.0
        if self.picks is not None:
            found[LOG_PROBS] = -most
        if self.squares:
            found[LOG_SQUARES] = -most
        if self.variance:
            found[VARIANCE] = 0
        if self.ranked is not None:
            found[RANK] = 0
        if self.top_k:
            found[TOP_VALUES] = found[TOP_INDICES] = 0
        return found

    def beside(self, *, gradient: bool) -> float:
        """How many tensors of the logits' size are held besides them."""
        numbers = row_numbers.tensors_beside(
            self.logits, self.softcap, ranks=self.ranked is not None, top_k=self.top_k
        )
        if self.pair is None or self.teacher is None:
            return numbers
        return numbers + tensors_beside(
            self.logits,
            self.teacher.dtype,
            computed=self.teacher.computed,
            by_row=True,
            reverse=self.pair.reverse,
            softcap=self.softcap is not None,
            picks=self.picks is not None,
            gradient=gradient,
        )

    def add(self, rows: slice, logits: Tensor) -> None:
        """Computes the statistics of some rows."""
        self._computed(rows, logits)

    def write_gradient(self, rows: slice, logits: Tensor) -> None:
        """The same, and the gradient of the logits before the soft-cap, over them."""
        stats, compared = self._computed(rows, logits)
        assert self.row_function is not None
        found = self.row_function(rows, self.chunks[-1])
        if self.scale != 1:
            found = [None if each is None else each * self.scale for each in found]
        *given, of_divergence, of_picks = found
        if self.picks is None:
            of_picks = None
        if compared is None or of_divergence is None:
            self._write_without_divergence(rows, given, of_picks, logits, stats)
            return
        assert self.pair is not None
        student, teacher, saved = compared
        if teacher.dtype == logits.dtype and of_picks is None:
            self.pair.gradient_of_statistics_(
                given, of_divergence, logits, teacher, stats, saved, *self._options(rows)
            )
            return
        added = self.pair.gradient(of_divergence, student, teacher, saved)
        if self.softcap is not None:
            tanh = torch.div(logits, self.softcap, out=student).tanh_()
            torch.ops.aten.tanh_backward.grad_input(added, tanh, grad_input=added)
        self._write_without_divergence(rows, given, of_picks, logits, stats)
        logits += added

    def _write_without_divergence(
        self,
        rows: slice,
        given: Sequence[Tensor | None],
        of_picks: Tensor | None,
        logits: Tensor,
        stats: Tensor,
    ) -> None:
        """The gradient without that of a divergence, over the logits."""
        target, ignore_index, softcap = self._options(rows)
        options = (ignore_index, softcap)
        if self.picks is None or of_picks is None:
            row_statistics.backward_(*given, logits, target, stats, *options)
        else:
            picks = self.picks[rows]
            row_picks.backward_(of_picks, tuple(given), logits, target, picks, stats, *options)

    def results(self) -> tuple[Tensor, ...]:
        """The statistics of all rows so far."""
        return tuple(torch.cat(parts) for parts in zip(*self.chunks, strict=True))

    def _computed(
        self, rows: slice, logits: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """Computes the statistics of some rows.

        Returns:
            the saved numbers for the statistics' gradient; with a pair also the student's logits,
            the teacher's logits, and the saved numbers for the divergence's gradient.
        """
        options = (*self._options(rows), self.squares)
        *found, stats, log_squares = row_statistics.forward(logits, *options)
        divergence, compared = self.nothing, None
        if self.pair is not None and self.teacher is not None:
            student, teacher = logits, self.teacher(rows)
            if self.softcap is not None:
                student = (logits / self.softcap).tanh_().mul_(self.softcap)
            divergence, saved = self.pair.forward(student, teacher, NONE, self.dtype)
            compared = (student, teacher, saved)
            if self.with_entropy:
                of_teacher = row_statistics.forward(teacher, None, -1, None)
                divergence = divergence + of_teacher[ENTROPY].to(self.dtype)
        log_probs = self.nothing
        if self.picks is not None:
            picked = row_picks.picked_logits(logits, self.picks[rows], self.softcap)
            log_probs = row_picks.log_probs_of(picked, stats)
        variance = self._variance(logits) if self.variance else self.nothing
        ranked = None if self.ranked is None else self.ranked[rows]
        numbers = row_numbers.numbers_of(logits, ranked, self.top_k, self.softcap, ties=self.ties)
        more = (divergence, log_probs, log_squares, variance, *numbers)
        self.chunks.append((*found[:DIVERGENCE], *more, *found[DIVERGENCE:]))
        return stats, compared

    def _variance(self, logits: Tensor) -> Tensor:
        """Of each row. A sum of squares less that of the mean would lose digits."""
        blocks = logits.split(max(1, _BLOCK // logits.shape[1]))
        wide = (row_statistics.capped(block.to(self.dtype), self.softcap) for block in blocks)
        return torch.cat([block.var(1, correction=0) for block in wide])

    def _options(self, rows: slice) -> tuple[Tensor | None, int, float | None]:
        target = None if self.target is None else self.target[rows]
        return target, self.ignore_index, self.softcap
