"""What a reader of logits holds, computed from the statistics of each row."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compile_losses.ops.checks import REDUCTIONS
from compile_losses.ops.linear.row_statistics import (
    LOG_PROBS,
    LOGSUMEXP,
    NLL,
    TOP_INDICES,
    TOP_VALUES,
    TOTAL,
    VARIANCE,
)
from compile_losses.recognize.graph.aten_replay import aten
from compile_losses.recognize.graph.symbolic_tensors import example
from compile_losses.recognize.heads.head import NotAbsorbedError
from compile_losses.recognize.heads.readings import MEAN_OF_ROWS, Move, Place, Reading, Spread


class ComputedReading:
    """Computes a reader from the op's results: with tensors, or as nodes of a graph.

    Args:
        call: applies an op to arguments.
        statistics: the op's results.
        place: where these have the classes that the reader picks; None if it picks none.
        target: the class of each of the reader's rows, for a cross entropy.
        linear_weight: [classes, hidden].
        weight: of each class, [classes].
    """

    def __init__(
        self,
        call: Callable[..., Any],
        statistics: Any,
        place: Place | None,
        target: Any,
        linear_weight: Any,
        weight: Any = None,
    ) -> None:
        self.call, self.statistics, self.place, self.target = call, statistics, place, target
        self.linear_weight, self.weight = linear_weight, weight
        self.base_shape: list[Any] = []
        self.moves: Sequence[Move] = ()

    def of(
        self,
        reading: Reading,
        dtype: torch.dtype,
        shape: list[Any],
        base_shape: list[Any],
        moves: Sequence[Move],
        batch: Any = None,
    ) -> Any:
        """The value of a reader.

        Args:
            dtype, shape: of the value.
            base_shape: of the rows that were computed.
            moves: the ops that make the reader's rows of these, with a last dimension of one.
            batch: what a divergence's batchmean divides by, if that is its reduction.
        """
        self.base_shape, self.moves = base_shape, moves
        columns = reading.columns
        if reading.spread is not None:
            result = self._spread_of(reading, reading.spread)
            result = self.call(aten.to.dtype, result, dtype)
            return self.call(aten.reshape.default, result, shape)
        result = self._sum_of(reading)
        if reading.exponential is not None:
            result = self._times(self.call(aten.exp.default, result), reading.exponential)
        result = self._moved(result, columns)
        if reading.call is not None:
            result = self._cross_entropy(reading.call, result)
        if reading.divergence is not None:
            result = self._reduced(reading, result, batch)
        if reading.over_rows is not None:
            result = self.call(reading.over_rows, result)
        result = self.call(aten.to.dtype, result, dtype)
        return self.call(aten.reshape.default, result, shape)

    def _spread_of(self, reading: Reading, spread: Spread) -> Any:
        """Of all rows it is made of those of each row, and of that of their means."""
        call, classes = self.call, reading.logits.fake.shape[reading.dim]
        found = self._moved(self._statistic(VARIANCE))
        if spread.of_all:
            means = self._times(self._moved(self._statistic(TOTAL)), 1 / classes)
            count = self._times(
                call(aten.sum.default, call(aten.ones_like.default, means)), classes
            )
            free = call(aten.clamp.default, call(aten.sub.Tensor, count, spread.correction), 0)
            apart = call(aten.var.default, means, False)
            found = call(aten.add.Tensor, call(aten.mean.default, found), apart)
            found = call(aten.mul.Tensor, found, call(aten.div.Tensor, count, free))
        elif spread.correction:
            free = classes - spread.correction
            found = self._times(found, classes / free if free > 0 else math.inf)
        found = call(aten.sqrt.default, found) if spread.is_root else found
        return self._times(found, spread.factor)

    def _moved(self, values: Any, columns: int | None = None) -> Any:
        """The values of the reader's rows, of values of all rows.

        Args:
            columns: how many numbers there are of each row, if they have a dimension.
        """
        if not self.moves:
            return values
        values = self.call(aten.reshape.default, values, [*self.base_shape, columns or 1])
        for op, arguments in self.moves:
            if op is aten.reshape.default:
                arguments = [[*arguments[0][:-1], columns or 1]]
            values = self.call(op, values, *arguments)
        values = self.call(aten.contiguous.default, values)
        return self.call(aten.reshape.default, values, [-1, *[columns] * (columns is not None)])

    def _times(self, values: Any, factor: float) -> Any:
        if factor == -1:
            return self.call(aten.neg.default, values)
        return values if factor == 1 else self.call(aten.mul.Tensor, values, factor)

    def _statistic(self, place: int) -> Any:
        return self.call(operator.getitem, self.statistics, place)

    def _log_probs(self, reading: Reading) -> Any:
        """Of the classes that the reader picks among the picks."""
        found = self._statistic(LOG_PROBS)
        assert self.place is not None
        if len(self.place.columns) > 1:
            found = self.call(aten.split_with_sizes.default, found, [*self.place.columns], 1)
            found = self.call(operator.getitem, found, self.place.part)
            found = self.call(aten.contiguous.default, found)
        return found if reading.picks is not None else self.call(aten.reshape.default, found, [-1])

    def _sum_of(self, reading: Reading) -> Any:
        """The sum of a reader's multiples of statistics, of all rows."""
        total: Any = None
        for place, factor in reading.terms.items():
            if place == LOG_PROBS and reading.picks is not None:
                term = self._log_probs(reading)
            elif place == NLL and self.place is not None and self.place.columns:
                term, factor = self._log_probs(reading), -factor
            else:
                term = self._statistic(place)
                if place in (TOP_VALUES, TOP_INDICES):
                    term = self.call(aten.slice.Tensor, term, 1, 0, reading.top_k)
                    term = self.call(aten.contiguous.default, term)
                elif reading.columns is not None:
                    term = self.call(aten.unsqueeze.default, term, -1)
            term = self._times(term, factor)
            total = term if total is None else self.call(aten.add.Tensor, total, term)
        return total

    def _reduced(self, reading: Reading, losses: Any, batch: Any) -> Any:
        """Reduces the divergence of each row as torch reduces the terms of all classes."""
        assert reading.divergence is not None
        reduction = reading.divergence.reduction
        if reduction == REDUCTIONS["none"]:
            return losses
        if reduction in (REDUCTIONS["sum"], REDUCTIONS["batchmean"]):
            total = self.call(aten.sum.default, losses)
            return total if batch is None else self.call(aten.div.Tensor, total, batch)
        mean = self.call(aten.mean.default, losses)
        if reduction == MEAN_OF_ROWS:
            return mean
        classes = reading.logits.fake.shape[reading.dim]
        if not isinstance(classes, int):
            raise NotAbsorbedError("the divisor of its mean is a symbol")
        return self.call(aten.mul.Tensor, mean, 1 / classes)

    def _cross_entropy(self, given: dict[str, Any], losses: Any) -> Any:
        """Cross entropy from the negative log-likelihood of each row, as torch defines it."""
        call, dtype, target, place = self.call, example(losses).dtype, self.target, self.place
        assert place is not None
        kept = call(aten.ne.Scalar, target, place.ignore_index)
        if place.columns:  # an ignored row has the log-probability of a class
            losses = call(aten.where.ScalarOther, kept, losses, 0.0)
        count = None
        if self.weight is not None:
            picked = call(aten.mul.Tensor, target, kept)
            weights = call(aten.index_select.default, self.weight, 0, picked)
            count = call(aten.mul.Tensor, call(aten.to.dtype, weights, dtype), kept)
            losses = call(aten.mul.Tensor, losses, count)
        smoothing = max(given["label_smoothing"], 0.0)
        if smoothing:
            classes = example(self.linear_weight).shape[0]
            if not isinstance(classes, int):
                raise NotAbsorbedError(
                    "label smoothing of classes whose number is a symbol: "
                    "torch._dynamo.mark_static of the weight makes it known"
                )
            mean = call(aten.mul.Tensor, self._moved(self._statistic(TOTAL)), 1 / classes)
            spread = call(aten.sub.Tensor, self._moved(self._statistic(LOGSUMEXP)), mean)
            spread = call(aten.where.ScalarOther, kept, spread, 0.0)
            losses = call(aten.mul.Tensor, losses, 1 - smoothing)
            losses = call(aten.add.Tensor, losses, call(aten.mul.Tensor, spread, smoothing))
        if given["reduction"] == REDUCTIONS["none"]:
            return losses
        loss = call(aten.sum.default, losses)
        if given["reduction"] == REDUCTIONS["mean"]:
            count = call(aten.to.dtype, kept, dtype) if count is None else count
            loss = call(aten.div.Tensor, loss, call(aten.sum.default, count))
        return loss
