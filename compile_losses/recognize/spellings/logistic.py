"""Binary cross entropy of logits, written out.

A body becomes a polynomial of a logit x, its softplus and tensors taken as they are, in which
``logsigmoid(x)`` is ``x - softplus(x)``, ``softplus(-x)`` is ``softplus(x) - x``, and the loss
``softplus(x) - x * target``.

The positive part of a logit and its absolute value occur in stable ways to write a softplus. For a
logit of 0 torch's gradient of a positive part depends on the function: 1/2 of ``torch.maximum``, 0
of ``relu``, 1 of ``clamp``. So each of these is an atom of its own. If they do not cancel, as in
``clamp(x, min=0) - x * y + log(1 + exp(-|x|))``, the spelling is declined: its gradient at 0 is not
the loss's, and a head that starts with zeros would train differently.

A spelling that saturates or overflows for finite logits is no such loss, as ``log(sigmoid(x))`` and
``log(1 + exp(x))``. Nor is SigLIP's ``logsigmoid(labels * x)``: it is finite for infinite logits.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from compile_losses.recognize.graph.aten_replay import AtenReplay, aten, compute, same_sizes
from compile_losses.recognize.graph.constants import constant
from compile_losses.recognize.graph.symbolic_tensors import Value, example
from compile_losses.recognize.spellings.polynomial import (
    Atom,
    OpaqueError,
    Polynomial,
    atom,
    combined,
    number,
)
from compile_losses.torch_internals.ops import packet_of

#: The bodies that are looked for, in words.
BODY = (
    "softplus(x) - x y, also with a weight of the positive class; softplus, logsigmoid, logaddexp, "
    "or a positive part plus log(1 + exp(-|x|))"
)

X, SOFTPLUS = atom(("x",)), atom(("softplus",))
#: max(x, 0) by its derivative at 0: 1/2, as of torch.maximum; 0; 1.
HALF, ZERO, ONE = (atom(("positive", at_zero)) for at_zero in ("half", "zero", "one"))
_POSITIVE = (HALF, ZERO, ONE)

_LOGARITHMS = {aten.softplus, aten.log_sigmoid, aten.logaddexp, aten.log, aten.log1p}
_OF_LOGITS = {
    *(aten.softplus, aten.log_sigmoid, aten.logaddexp, aten.abs, aten.relu, aten.clamp),
    *(aten.clamp_min, aten.clamp_max, aten.maximum, aten.minimum),
    *(aten.ge, aten.gt, aten.le, aten.lt),
}
_SUMS = {aten.add, aten.sub, aten.rsub, aten.mul, aten.div}
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_LARGEST_BODY = 48

_AT_ZERO = (
    "where a logit is 0, the gradient of this spelling is that of its clamp or relu, "
    "and not the loss's"
)
_THRESHOLD = "torch's softplus is x above its threshold, which differs in this dtype"


@dataclass(frozen=True)
class Logistic:
    """``body == scale * weights * binary_cross_entropy_with_logits(input, target, pos_weight)``.

    Attributes:
        reason: why the loss must stay torch's nevertheless.
    """

    input: Value
    target: Value
    scale: float
    weights: tuple[Value, ...] = ()
    pos_weight: Value | None = None
    reason: str | None = None


def find_logistic(body: Value, replay: AtenReplay) -> Iterator[Logistic]:
    """The losses that a body may be, each with one of the body's tensors as its logit."""
    parts = _parts(body, replay)
    if not any(part.op and packet_of(part.op) in _LOGARITHMS for part in parts):
        return
    tried = set()
    for part in parts:
        if part.op is None or packet_of(part.op) not in _OF_LOGITS:
            continue
        for argument in part.args[:2]:
            logit = _unsigned(argument, replay) if isinstance(argument, Value) else None
            if logit is None or not same_sizes(logit.fake.shape, body.fake.shape):
                continue
            key = replay.key(logit)
            if key in tried or not logit.fake.is_floating_point():
                continue
            tried.add(key)
            found = _Body(logit, replay).matches(body, parts)
            if found is not None:
                yield found


def _parts(body: Value, replay: AtenReplay) -> list[Value]:
    """The parts of a body, outermost first."""
    waiting, found = [body], dict[Value, None]()
    while waiting and len(found) < _LARGEST_BODY:
        value = replay.resolve(waiting.pop(0))
        if value not in found:
            found[value] = None
            if value.op is not None and packet_of(value.op) in _LOGARITHMS | _INSIDE:
                waiting += [argument for argument in value.args if isinstance(argument, Value)]
    return list(found)


_INSIDE = {*_SUMS, *_OF_LOGITS, aten.neg, aten.exp, aten.where}


def _unsigned(value: Value, replay: AtenReplay) -> Value:
    value = replay.resolve(value)
    while value.op is aten.neg.default or (value.op is aten.mul.Tensor and value.args[1] == -1):
        value = replay.resolve(value.args[0])
    return value


class _Body:
    """Polynomials of one logit."""

    def __init__(self, logit: Value, replay: AtenReplay) -> None:
        self.logit = logit
        self.replay = replay
        self.leaves: dict[Hashable, Value] = {}
        self.done: dict[Value, Polynomial] = {}
        self.reason: str | None = None

    def matches(self, body: Value, parts: list[Value]) -> Logistic | None:
        """The loss that a body is of this logit; None if it is none."""
        try:
            exact = self.of(body)
            for whole in dict.fromkeys((exact, _merged(exact))):
                polynomial, factors = _without_factors(whole)
                found = self._target(polynomial, parts) or self._pos_weight(polynomial)
                if found is not None:
                    weights = tuple(self.leaves[factor[1]] for factor in factors)
                    reason = self.reason if whole is exact else _AT_ZERO
                    return self._found(*found, weights, reason)
        except OpaqueError:
            pass
        return None

    def _target(
        self, polynomial: Polynomial, parts: list[Value]
    ) -> tuple[float, Value, None] | None:
        """The scale and the target: a part of the body, made of tensors taken as they are; None if
        no part is."""
        for part in parts:
            value = self.of(part)
            if value.atoms() and all(found[0] == "leaf" for found in value.atoms()):
                scale = polynomial.ratio(SOFTPLUS - X * value)
                if scale is not None:
                    return scale, part, None
        return None

    def _pos_weight(self, polynomial: Polynomial) -> tuple[float, Value, Value | None] | None:
        """With a weight of the positive class: a tensor, or a number. None if there is none."""
        scale = polynomial.get(frozenset({(("softplus",), 1)}))
        if not scale:
            return None
        leaves = {key: atom(("leaf", key)) for key in self.leaves}
        for key, target in leaves.items():
            product = next(iter(X * target))
            weights: dict[Any, Polynomial] = {k: leaf for k, leaf in leaves.items() if k != key}
            if product in polynomial:
                weights = {None: number(-polynomial[product] / scale)}
            for other, weight in weights.items():
                positive, negative = target * (SOFTPLUS - X), (number(1) - target) * SOFTPLUS
                if polynomial.ratio(weight * positive + negative) is None:
                    continue
                given = self.leaves.get(other)
                if other is None:
                    (factor,) = weight.values()
                    given = compute(aten.new_full.default, self.logit, [], factor)
                return None if given is None else (scale, self.leaves[key], given)
        return None

    def _found(
        self,
        scale: float,
        target: Value,
        pos_weight: Value | None,
        weights: tuple[Value, ...],
        reason: str | None,
    ) -> Logistic | None:
        """The loss with its target and weights as the op takes them; None if one can't be cast or
        expanded."""
        shape, given = self.logit.fake.shape, (target, pos_weight, *weights)
        dtype = self.logit.fake.dtype
        cast = []
        for i, value in enumerate(given):
            if value is not None and not value.fake.is_floating_point():
                value = compute(torch.ops.prims.convert_element_type.default, value, dtype)
                if value is None:
                    return None
            if i == 0 and value is not None and not same_sizes(value.fake.shape, shape):
                if not all(isinstance(size, int) for size in shape):
                    return None
                value = compute(aten.expand.default, value, list(shape))
                if value is None:
                    return None
            cast.append(value)
        first, second, *rest = cast
        assert first is not None
        factors = tuple(factor for factor in rest if factor is not None)
        return Logistic(self.logit, first, scale, factors, second, reason)

    def of(self, value: Value) -> Polynomial:
        """The polynomial of a Value; of one that is not understood, an atom that stands for it."""
        value = self.replay.resolve(value)
        if value not in self.done:
            key = self.replay.key(value)
            if key == self.replay.key(self.logit):
                self.done[value] = X
            else:
                try:
                    self.done[value] = self._of(value)
                except OpaqueError:
                    self.leaves.setdefault(key, value)
                    self.done[value] = atom(("leaf", key))
        return self.done[value]

    def _of(self, value: Value) -> Polynomial:
        """The polynomial of a Value.

        Raises:
            OpaqueError: its op is not known, or not with these arguments; as all methods below.
        """
        fake, op, args = value.fake, value.op, value.args
        if op is None or len(self.done) > _LARGEST_BODY:
            raise OpaqueError
        packet = packet_of(op)
        if packet is aten.neg and (fake.is_floating_point() or fake.dtype in _SIGNED):
            return self.of(args[0]) * -1.0
        if packet in _SUMS:
            return self._arithmetic(packet, value)
        if packet is aten.softplus:
            return self._softplus(*args)
        if packet is aten.log_sigmoid:
            return SOFTPLUS * -1.0 + (X if self._sign(args[0]) > 0 else number(0))
        if packet is aten.abs:
            self._sign(args[0])
            return HALF * 2.0 - X
        if packet in (aten.log, aten.log1p, aten.logaddexp):
            return self._log_of_two(packet, args)
        if packet is aten.where:
            return self._where(*args)
        return self._bounded(packet, value)

    def _sign(self, argument: Any) -> int:
        """1 for the logit, -1 for its negative."""
        polynomial = self.of(argument) if isinstance(argument, Value) else None
        if polynomial == X:
            return 1
        if polynomial == X * -1.0:
            return -1
        raise OpaqueError

    def _arithmetic(self, packet: Any, value: Value) -> Polynomial:
        """A sum, difference, product, or quotient by a number."""
        if value.kwargs or not (value.fake.is_floating_point() or value.fake.dtype in _SIGNED):
            raise OpaqueError
        left, right = (self._operand(argument, value) for argument in value.args[:2])
        if len(value.args) > 2:
            raise OpaqueError
        result = combined(packet, left, right)
        if result is not None:
            return result
        divisor = right.get(frozenset())
        if divisor is None or len(right) > 1 or not value.fake.is_floating_point():
            raise OpaqueError
        return left * (1 / divisor)

    def _operand(self, argument: Any, value: Value) -> Polynomial:
        """The polynomial of an argument: a number, a tensor of zeros or another tensor."""
        known = constant(argument, value.fake.dtype, self.replay)
        if known is not None:
            return number(known)
        if not isinstance(argument, Value):
            raise OpaqueError
        return number(0) if self._is_zero(argument) else self.of(argument)

    def _softplus(self, x: Any, beta: Any = 1, threshold: Any = 20) -> Polynomial:
        """That of ``softplus`` of the logit or its negative; notes what makes it another in this
        dtype."""
        sign = self._sign(x)
        if beta != 1 or not isinstance(threshold, int | float) or threshold <= 0:
            raise OpaqueError
        if math.exp(-threshold) > torch.finfo(x.fake.dtype).eps * threshold:
            self.reason = _THRESHOLD
        return SOFTPLUS if sign > 0 else SOFTPLUS - X

    def _log_of_two(self, packet: Any, args: tuple[Any, ...]) -> Polynomial:
        """log(exp(a) + exp(b)), if neither overflows."""
        if packet is aten.logaddexp:
            a, b = (self._operand(argument, args[0]) for argument in args)
            if (b - a) in (X, X * -1.0):
                return a + (SOFTPLUS if b - a == X else SOFTPLUS - X)
            raise OpaqueError
        terms = [args[0], 1]
        total = self.replay.resolve(args[0])
        if packet is aten.log:
            if total.op is not aten.add.Tensor or total.kwargs:
                raise OpaqueError
            terms = list(total.args)
        exponents = {self._exponent(term) for term in terms}
        for positive in _POSITIVE:
            stable = {X - positive * 2.0, number(0)}, {X - positive, positive * -1.0}
            if exponents in stable:
                return SOFTPLUS - positive
        raise OpaqueError

    def _exponent(self, term: Any) -> Polynomial:
        """a, of a term exp(a), where 1 stands for exp(0)."""
        if not isinstance(term, Value):
            if term == 1:
                return number(0)
            raise OpaqueError
        term = self.replay.resolve(term)
        if term.op is not aten.exp.default:
            raise OpaqueError
        return self.of(term.args[0])

    def _bounded(self, packet: Any, value: Value) -> Polynomial:
        """max(x, 0) or min(x, 0), of x or -x."""
        sign = self._sign(value.args[0]) if value.args else 0
        if packet is aten.relu:
            return ZERO if sign > 0 else ONE - X
        low, high = (self._bound(packet, value, i) for i in (0, 1))
        extreme = packet in (aten.maximum, aten.minimum)
        if low == 0 and high is None:
            if extreme:
                return HALF if sign > 0 else HALF - X
            return ONE if sign > 0 else ZERO - X
        if high == 0 and low is None:
            if extreme:
                return X - HALF if sign > 0 else HALF * -1.0
            return X - ZERO if sign > 0 else ONE * -1.0
        raise OpaqueError

    def _bound(self, packet: Any, value: Value, which: int) -> Any:
        """The lower or upper bound of a call: a number, 0 for a tensor of zeros; None if it has
        none."""
        given: Any
        if packet is aten.clamp:
            given = (*value.args[1:], None, None)[which]
            given = value.kwargs.get(("min", "max")[which], given)
        elif packet in ((aten.clamp_min, aten.maximum), (aten.clamp_max, aten.minimum))[which]:
            given = value.args[1]
        else:
            return None
        if isinstance(given, Value):
            return 0 if self._is_zero(given) and packet in (aten.maximum, aten.minimum) else given
        return given

    def _where(self, condition: Any, chosen: Any, other: Any) -> Polynomial:
        """``where`` with a line on either side of 0."""
        compared = self.replay.resolve(condition)
        packet = packet_of(compared.op) if compared.op else None
        if packet in (aten.lt, aten.le):
            packet = aten.ge if packet is aten.lt else aten.gt
            chosen, other = other, chosen
        if packet not in (aten.ge, aten.gt) or self.of(compared.args[0]) != X:
            raise OpaqueError
        if isinstance(compared.args[1], Value) or compared.args[1] != 0:
            raise OpaqueError
        above, below = (self._operand(each, self.logit) for each in (chosen, other))
        slope = (above - below).ratio(X)
        if slope is None:
            raise OpaqueError
        return below + (ONE if packet is aten.ge else ZERO) * slope

    def _is_zero(self, value: Value) -> bool:
        """Whether a tensor holds zeros, and no parameter."""
        value = self.replay.resolve(value)
        if value.whole and getattr(example(value.node), "requires_grad", False):
            return False
        while value.op is aten.detach.default:
            value = self.replay.resolve(value.args[0])
        if value.op is None:  # torch.zeros(...), which has no tensor among its arguments
            return value.node.op == "call_function" and value.node.target is torch.zeros
        return value.op is aten.zeros_like.default or (
            value.op is aten.scalar_tensor.default and value.args[0] == 0
        )


def _merged(polynomial: Polynomial) -> Polynomial:
    """A polynomial in which all positive parts, which differ for a logit of 0 alone, are one."""
    result = Polynomial({})
    for monomial, coefficient in polynomial.items():
        term = number(coefficient)
        for found, power in monomial:
            for _ in range(power):
                term = term * (HALF if found[0] == "positive" else atom(found))
        result = result + term
    return result


def _without_factors(polynomial: Polynomial) -> tuple[Polynomial, list[Atom]]:
    """A polynomial without the tensors that are a factor of every term, and these tensors."""
    common: set[Any] = set.intersection(*map(set, polynomial)) if polynomial else set()
    factors = {factor for factor in common if factor[0][0] == "leaf" and factor[1] == 1}
    rest = Polynomial({monomial - factors: c for monomial, c in polynomial.items()})
    return rest, [factor for factor, _ in factors]
