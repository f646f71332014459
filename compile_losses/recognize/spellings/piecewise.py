"""Functions of one difference, evaluated: a body's own ATen ops run on values of ``a - b``.

A body of the ops accepted here is a piecewise polynomial of the difference. The points at which its
pieces meet are known, because only a multiple of the difference or of its absolute value, plus a
number, may be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_losses.recognize.graph.aten_replay import AtenReplay, aten
from compile_losses.recognize.graph.symbolic_tensors import Value
from compile_losses.torch_internals.ops import packet_of


class NotPiecewiseError(Exception):
    """The body is no function of this difference, or of no kind whose breakpoints are known."""


@dataclass(frozen=True)
class _Line:
    """``slope * u + offset``, with u the difference or, if ``absolute``, its absolute value."""

    slope: float
    offset: float
    absolute: bool | None = None  # None for a number

    def scaled(self, factor: float) -> _Line:
        return _Line(self.slope * factor, self.offset * factor, self.absolute)

    def shifted(self, offset: float) -> _Line:
        return _Line(self.slope, self.offset + offset, self.absolute)


_COMPARISONS = {aten.lt, aten.le, aten.gt, aten.ge}
_BOUNDS = {aten.clamp, aten.clamp_min, aten.clamp_max, aten.relu, aten.hardtanh}
_EXTREMES = {aten.minimum, aten.maximum}
_ANYWHERE = {aten.where, aten.mul, aten.logical_not, aten.logical_and, aten.bitwise_not}
_NUMBERS = {aten.zeros_like, aten.ones_like, aten.full_like}
_LOSSES = {
    aten.mse_loss.default: None,
    aten.smooth_l1_loss.default: 1.0,
    aten.huber_loss.default: 1.0,
}
#: Every op that a body may be made of.
OPS = {
    *(aten.add, aten.sub, aten.rsub, aten.neg, aten.div, aten.pow, aten.abs, aten.sgn, aten.sign),
    *(aten._to_copy, aten.scalar_tensor, aten.detach, aten.alias),
    *(*_COMPARISONS, *_BOUNDS, *_EXTREMES, *_ANYWHERE, *_NUMBERS),
    *(packet_of(op) for op in _LOSSES),
}


def subtraction(value: Value, replay: AtenReplay) -> tuple[Value, Value] | None:
    """``(a, b)`` if a Value is ``a - b``, or an unreduced loss of it; else None."""
    if value.op in _LOSSES:
        if len(value.args) > 2 and value.args[2] == 0:
            return value.args[0], value.args[1]
        return None
    if value.op not in (aten.sub.Tensor, aten.add.Tensor, aten.rsub.Tensor):
        return None
    left, right = value.args[:2]
    if not isinstance(left, Value) or not isinstance(right, Value):
        return None
    if value.kwargs.get("alpha", 1) != 1 or len(value.args) > 2:
        return None
    if value.op is aten.sub.Tensor:
        return left, right
    if value.op is aten.rsub.Tensor:
        return right, left
    for kept, other in ((left, right), (right, left)):
        negation = replay.resolve(other)
        if negation.op is aten.neg.default:
            return kept, negation.args[0]
        factor = negation.args[1] if negation.op is aten.mul.Tensor else None
        if isinstance(factor, int | float) and factor == -1:
            return kept, negation.args[0]
    return None


class Evaluation:
    """A body's ATen ops, run on values of the difference.

    Attributes:
        breakpoints: where the pieces may meet, on either side of 0.
    """

    def __init__(self, pair: tuple[Value, Value], replay: AtenReplay, points: Tensor) -> None:
        self.replay = replay
        self.pair = tuple(map(replay.key, pair))
        self.points = points
        self.breakpoints: set[float] = {0.0}
        self.done: dict[Value, tuple[Any, _Line | None]] = {}

    def of(self, argument: Any) -> tuple[Any, _Line | None]:
        """The values of an argument at the points, and its line if it is one, else None."""
        if isinstance(argument, bool):
            raise NotPiecewiseError
        if isinstance(argument, int | float):
            return argument, _Line(0.0, float(argument))
        if not isinstance(argument, Value):
            raise NotPiecewiseError
        value = self.replay.resolve(argument)
        if value not in self.done:
            self.done[value] = self._value(value)
        return self.done[value]

    def _value(self, value: Value) -> tuple[Tensor, _Line | None]:
        """The values of a Value, and its line if it is one.

        Raises:
            NotPiecewiseError: it is made of other tensors, or by an op that is not known.
        """
        pair = subtraction(value, self.replay)
        keys = pair and tuple(map(self.replay.key, pair))
        sign = 1.0 if keys == self.pair else -1.0 if keys and keys[::-1] == self.pair else None
        if sign is not None and value.op not in _LOSSES:
            return self.points * sign, _Line(sign, 0.0, False)
        if value.op is None or packet_of(value.op) not in OPS or len(self.done) > 2 * len(OPS):
            raise NotPiecewiseError
        if value.op in _LOSSES:
            if sign is None:
                raise NotPiecewiseError
            parameter = value.args[3] if len(value.args) > 3 else _LOSSES[value.op]
            if parameter is not None:
                self.at(_number(parameter))
            zero = torch.zeros_like(self.points)
            return value.op(self.points * sign, zero, *value.args[2:]), None
        return self._op(value)

    def _op(self, value: Value) -> tuple[Tensor, _Line | None]:
        """Likewise of the result of an op."""
        packet = packet_of(value.op)
        if packet is aten._to_copy:
            return self._cast(value)
        if packet in _NUMBERS or packet is aten.scalar_tensor:
            filling = {aten.zeros_like: 0.0, aten.ones_like: 1.0}.get(packet)
            number = _number(value.args[-1]) if filling is None else filling
            return torch.full_like(self.points, number).detach(), _Line(0.0, number)
        if packet is aten.detach:  # a cut of the gradient shows in the comparison of gradients
            values, line = self.of(value.args[0])
            return values.detach(), line
        arguments = [argument for argument in value.args if argument is not None]
        found = [self.of(argument) for argument in arguments]
        lines = [line for _, line in found]
        replaced = iter(found)
        args = [None if argument is None else next(replaced)[0] for argument in value.args]
        if set(value.kwargs) - {"alpha", "min", "max"} or value.kwargs.get("alpha", 1) != 1:
            raise NotPiecewiseError
        for bound in (value.kwargs.get("min"), value.kwargs.get("max")):
            if bound is not None:
                lines.append(_Line(0.0, _number(bound)))
        result = value.op(*args, **value.kwargs)  # type: ignore[misc]
        return result, self._line(packet, lines, value)

    def _cast(self, value: Value) -> tuple[Tensor, _Line | None]:
        """A cast of a comparison's result. Any other cast would round the body. It is a line, or
        None, as what is cast."""
        values, line = self.of(value.args[0])
        if values.dtype != torch.bool or not value.fake.is_floating_point():
            raise NotPiecewiseError
        return values.to(self.points.dtype), line

    def _line(self, packet: Any, lines: list[_Line | None], value: Value) -> _Line | None:
        """The line that an op's result is, None if it is none; notes where pieces of it meet.

        Raises:
            NotPiecewiseError: they meet at points that are not known.
        """
        if packet in _COMPARISONS or packet in _EXTREMES:
            self._crossing(lines[0], lines[1])
        elif packet in _BOUNDS:
            bounds = [_Line(0.0, 0.0)] if packet is aten.relu else lines[1:]
            for bound in bounds:
                self._crossing(lines[0], bound)
        elif packet in (aten.abs, aten.sgn, aten.sign):
            self._crossing(lines[0], _Line(0.0, 0.0))
            (line,) = lines
            if packet is aten.abs and line is not None and line.offset == 0:
                return _Line(abs(line.slope), 0.0, True)
        elif packet is aten.pow:
            exponent = value.args[1]
            if exponent not in (1, 2, 3, 4):
                raise NotPiecewiseError
        elif packet is aten.div:
            divisor = value.args[1]
            if isinstance(divisor, Value) or divisor == 0:
                raise NotPiecewiseError
            return lines[0] and lines[0].scaled(1 / divisor)
        elif packet is aten.neg:
            return lines[0] and lines[0].scaled(-1.0)
        elif packet is aten.alias:
            return lines[0]
        elif packet in (aten.add, aten.sub, aten.rsub, aten.mul) and None not in lines:
            return _combined(packet, *lines)  # type: ignore[arg-type]
        return None

    def at(self, point: float) -> None:
        self.breakpoints |= {point, -point}

    def _crossing(self, left: _Line | None, right: _Line | None) -> None:
        """Notes where one line meets another, for either sign of the difference."""
        if left is None or right is None:
            raise NotPiecewiseError
        for sign in (1.0, -1.0):
            slopes = [line.slope * (sign if line.absolute else 1.0) for line in (left, right)]
            if slopes[0] != slopes[1]:
                self.at((right.offset - left.offset) / (slopes[0] - slopes[1]))


def _combined(packet: Any, left: _Line, right: _Line) -> _Line | None:
    """The sum, difference or product of two lines; None if that is no line."""
    if packet is aten.mul:
        for line, number in ((left, right), (right, left)):
            if number.absolute is None:
                return line.scaled(number.offset)
        return None
    if packet is aten.rsub:
        left, right = right, left
    if packet is not aten.add:
        right = right.scaled(-1.0)
    if right.absolute is None:
        return left.shifted(right.offset)
    if left.absolute is None:
        return right.shifted(left.offset)
    if left.absolute != right.absolute:
        return None
    return _Line(left.slope + right.slope, left.offset + right.offset, left.absolute)


def _number(argument: Any) -> float:
    if isinstance(argument, bool) or not isinstance(argument, int | float):
        raise NotPiecewiseError
    return float(argument)
