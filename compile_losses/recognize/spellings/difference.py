"""Losses of one difference: which function of ``a - b`` a body is.

Such a body is a piecewise polynomial. So it is enough to evaluate it at more points than its degree
in each interval between its breakpoints. The breakpoints are known, because only comparisons of a
number with a multiple of the difference, or of its absolute value, are accepted. The body's own
ATen ops run on the points. Their gradients must agree as well, also at the breakpoints. So a clamp
at a hundred, or constants that do not agree, are noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses.recognize.graph.aten_replay import AtenReplay
from compile_losses.recognize.graph.symbolic_tensors import Value
from compile_losses.recognize.spellings.piecewise import (
    OPS,
    Evaluation,
    NotPiecewiseError,
    subtraction,
)
from compile_losses.torch_internals.ops import packet_of


@dataclass(frozen=True)
class Family:
    """A loss of a difference d.

    Attributes:
        op: its name, also of its ATen op, which hand-written bodies may contain.
        body: the loss of one element, in words.
        function: the same, of d and the parameter.
        parameter: the name of the op's parameter, at which the function changes.
    """

    op: str
    body: str
    function: Callable[[Tensor, float], Tensor]
    parameter: str | None = None


def _smooth_l1(d: Tensor, beta: float) -> Tensor:
    return F.smooth_l1_loss(d, torch.zeros_like(d), reduction="none", beta=beta)


def _huber(d: Tensor, delta: float) -> Tensor:
    return F.huber_loss(d, torch.zeros_like(d), reduction="none", delta=delta)


FAMILIES = [
    Family("mse_loss", "d²", lambda d, _: d * d),
    Family("l1_loss", "|d|", lambda d, _: d.abs()),
    Family("smooth_l1_loss", "d² / 2β if |d| < β else |d| - β/2", _smooth_l1, "beta"),
    Family("huber_loss", "d²/2 if |d| ≤ δ else δ (|d| - δ/2)", _huber, "delta"),
]


@dataclass(frozen=True)
class Found:
    """``body == scale * family.function(input - target, parameter)``."""

    family: Family
    parameter: float
    scale: float
    input: Value
    target: Value


_LARGEST_BODY = 32


def differences(body: Value, replay: AtenReplay) -> Iterator[tuple[Value, Value]]:
    """The pairs of tensors whose difference a body may be a function of, outermost first."""
    waiting = [body]
    seen: set[Value] = set()
    while waiting and len(seen) < _LARGEST_BODY:
        value = replay.resolve(waiting.pop(0))
        if value in seen or value.op is None or packet_of(value.op) not in OPS:
            continue
        seen.add(value)
        pair = subtraction(value, replay)
        if pair is not None:
            yield pair
        waiting += [argument for argument in value.args if isinstance(argument, Value)]


def _points(breakpoints: set[float]) -> Tensor:
    """The breakpoints, eleven points in each interval between them, and as many outside."""
    ends = sorted({0.0, *map(abs, breakpoints)})
    points = list(ends)
    for low, high in pairwise(ends):
        points += [low + (high - low) * step / 12 for step in range(1, 12)]
    far = ends[-1] or 0.125
    points += [far * factor for factor in (1.1, 1.5, 2, 4, 5, 8, 11, 16, 50, 1e3, 1e5)]
    return torch.tensor([*points, *(-p for p in points)], dtype=torch.float64)


def find_difference(body: Value, replay: AtenReplay) -> list[Found]:
    """The families that a body belongs to, with any scale; empty if it belongs to none."""
    for pair in differences(body, replay):
        try:
            found = _classify(body, pair, replay)
        except (NotPiecewiseError, TypeError, RuntimeError, OverflowError):
            continue
        if found:
            return found
    return []


def _classify(body: Value, pair: tuple[Value, Value], replay: AtenReplay) -> list[Found]:
    """The families that a body belongs to as a function of one difference.

    Raises:
        NotPiecewiseError: it is no function of this difference alone.
    """
    with torch.enable_grad():
        probe = Evaluation(pair, replay, torch.ones(1, dtype=torch.float64))
        probe.of(body)
        points = _points(probe.breakpoints).requires_grad_()
        values, _ = Evaluation(pair, replay, points).of(body)
        actual = _with_gradient(values, points)
        candidates = [(f, 0.0) for f in FAMILIES if f.parameter is None]
        candidates += [
            (f, p) for f in FAMILIES if f.parameter for p in sorted(probe.breakpoints) if p > 0
        ]
        found = []
        for family, parameter in candidates:
            expected = _with_gradient(family.function(points, parameter), points)
            scale = float((actual[0] / expected[0])[expected[0] != 0].mode().values)
            if scale != 0 and all(
                torch.allclose(a, e * scale, rtol=1e-10, atol=0.0)
                for a, e in zip(actual, expected, strict=True)
            ):
                found.append(Found(family, parameter, scale, *pair))
    return found


def _with_gradient(values: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(values, Tensor) or not values.requires_grad:
        raise NotPiecewiseError
    (gradient,) = torch.autograd.grad(values.sum(), points)
    return values.detach(), gradient
