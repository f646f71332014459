"""Softmaxes of the rows of logits, and multiples of these, as ATen ops.

A cast between floating dtypes holds the same numbers, which it rounds at most: what is made of a
row's statistics is rounded less. So casts after a softmax are gone through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from compile_losses.op_traits import PRODUCTS, QUOTIENTS
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten
from compile_losses.recognize.graph.constants import constant
from compile_losses.recognize.graph.symbolic_tensors import Value
from compile_losses.recognize.spellings.row_views import VIEWS, as_one_hot, pushed_under_softmax


@dataclass(frozen=True)
class Multiple:
    """A number times a softmax, or times its logarithm.

    Attributes:
        logits: of the softmax, with the classes in dimension dim.
        factor: the number.
    """

    logits: Value
    dim: int
    factor: float


def multiple_of_softmax(value: Value, replay: AtenReplay, *, logarithm: bool) -> Multiple | None:
    """A Value as a multiple of a softmax or log_softmax; None if it is no such multiple."""
    inner, factor = unscaled(value, replay)
    found = softmax_of(inner, replay, logarithm=logarithm)
    return None if found is None else Multiple(*found, factor)


def unscaled(value: Value, replay: AtenReplay) -> tuple[Value, float]:
    """A Value without its casts, signs and constant factors, and the product of these."""
    factor = 1.0
    while True:
        value = uncast(value, replay)
        if value.op is aten.neg.default:
            value, factor = value.args[0], -factor
            continue
        number = _constant_factor(value, replay)
        if number is None:
            return value, factor
        value, factor = value.args[0], factor * number


def _constant_factor(value: Value, replay: AtenReplay) -> float | None:
    """The number that the first argument of a product or quotient is multiplied by; None of
    another op."""
    if value.op not in (*PRODUCTS, *QUOTIENTS) or value.kwargs or len(value.args) != 2:
        return None
    source, other = value.args
    number = constant(other, value.fake.dtype, replay) if isinstance(source, Value) else None
    if number is None or number == 0 or not math.isfinite(number):
        return None
    return number if value.op in PRODUCTS else 1 / number


def uncast(value: Value, replay: AtenReplay) -> Value:
    """A Value before casts between floating dtypes."""
    value = replay.resolve(value)
    while value.op is aten._to_copy.default:
        inner = value.args[0]
        floating = inner.fake.is_floating_point() and value.fake.is_floating_point()
        if not floating or inner.fake.device != value.fake.device:
            break
        value = replay.resolve(inner)
    return value


def one_hot_classes(value: Value, replay: AtenReplay) -> Value | None:
    """The classes of a one-hot tensor, which may be cast; None of another tensor."""
    value = replay.resolve(value)
    found = as_one_hot(value, replay)
    if found is None and value.op is aten._to_copy.default:
        found = as_one_hot(replay.resolve(value.args[0]), replay)
    return found


def softmax_of(value: Value, replay: AtenReplay, *, logarithm: bool) -> tuple[Value, int] | None:
    """The logits and the dimension of the classes, if a Value is their softmax or log_softmax."""
    value = uncast(value, replay)
    op = value.op
    if op is None or value.kwargs:
        return None
    if logarithm and op is aten._log_softmax.default and not value.args[2]:
        found = value.args[0], value.args[1] % value.args[0].rank
    elif logarithm and op is aten.sub.Tensor and isinstance(value.args[1], Value):
        x, subtrahend = value.args[0], replay.resolve(value.args[1])
        if not isinstance(x, Value) or subtrahend.op is not aten.logsumexp.default:
            return None
        inner, dims, *keepdim = subtrahend.args
        if keepdim != [True] or len(dims) != 1 or not replay.same(inner, x):
            return None
        found = x, dims[0] % x.rank
    elif not logarithm and op is aten._softmax.default and not value.args[2]:
        found = value.args[0], value.args[1] % value.args[0].rank
    elif not logarithm and op is aten.exp.default:
        return softmax_of(value.args[0], replay, logarithm=True)
    else:
        pushed = pushed_under_softmax(value, replay) if op in VIEWS else None
        if pushed is None or (pushed.op is aten._log_softmax.default) is not logarithm:
            return None
        found = pushed.args[0], pushed.args[1]
    # The softmax of log-probabilities is the same softmax; torch's Categorical writes that.
    again = softmax_of(found[0], replay, logarithm=True)
    return again if again is not None and again[1] == found[1] else found


def unbounded(value: Value, replay: AtenReplay) -> Value:
    """A factor of probabilities without the least number of its dtype as a bound.

    ``Categorical.entropy`` has this bound, so that 0 times -inf becomes 0.
    """
    resolved = replay.resolve(value)
    if resolved.op is not aten.clamp.default or resolved.args[2] is not None:
        return value
    bounded: Value = resolved.args[0]
    return bounded if resolved.args[1] == torch.finfo(resolved.fake.dtype).min else value
