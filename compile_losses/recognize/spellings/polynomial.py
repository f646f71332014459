"""Polynomials of tensors, their logarithms and exponentials, and quantities of a row.

An *atom* is a tuple: its kind, then its operands.

``("leaf", key)``               a tensor taken as it is
``("log", key)``                the logarithm of a tensor
``("log_mixture", polynomial)`` the logarithm of softmaxes' mixture, whose weights add up to 1
``("exp", polynomial)``         an exponential
``("lse", key, dim)``           logsumexp, one number for each row
``("sumexp", key, dim)``        the sum of exponentials of a row
``("pick", key, index, dim)``   the entry at an index of each row
``("one_hot", index, dim)``     1 there, 0 elsewhere
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten

Atom = tuple[Any, ...]
#: A product of powers of atoms.
Monomial = frozenset[tuple[Atom, int]]
_ONE: Monomial = frozenset()


class Polynomial(Mapping[Monomial, float]):
    """A sum of monomials with coefficients, compared by value."""

    def __init__(self, terms: Mapping[Monomial, float]) -> None:
        self._terms = {m: c for m, c in terms.items() if c != 0.0}
        # Coefficients that differ by rounding alone are to hash alike.
        self._key = frozenset((m, float(f"{c:.12g}")) for m, c in self._terms.items())

    def __getitem__(self, monomial: Monomial) -> float:
        return self._terms[monomial]

    def __iter__(self) -> Iterator[Monomial]:
        return iter(self._terms)

    def __len__(self) -> int:
        return len(self._terms)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Polynomial) and self._key == other._key

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self._terms)
        for monomial, coefficient in other.items():
            _add(terms, monomial, coefficient)
        return Polynomial(terms)

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + other * -1.0

    def __mul__(self, other: Polynomial | float) -> Polynomial:
        if isinstance(other, float | int):
            return Polynomial({m: c * other for m, c in self.items()})
        if len(self) * len(other) > _MOST_TERMS:
            raise OpaqueError
        terms: dict[Monomial, float] = {}
        for m, c in self.items():
            for n, d in other.items():
                _add(terms, _times(m, n), c * d)
        return Polynomial(terms)

    def atoms(self) -> set[Atom]:
        return {atom for monomial in self for atom, _ in monomial}

    def ratio(self, other: Polynomial) -> float | None:
        """c if this is c times the other; None if it is no multiple."""
        if not self or self.keys() != other.keys():
            return None
        monomial = next(iter(self))
        ratio = self[monomial] / other[monomial]
        return ratio if other * ratio == self else None


_MOST_TERMS = 64
#: The largest number in an exponent, whose exponential is far from overflow.
_LARGEST_SHIFT = 100.0
#: The relative difference of numbers that differ through rounding alone.
_ROUNDING = 1e-12


def unrounded(value: float) -> float:
    """A number of few digits in the place of one that differs from it by rounding alone."""
    short = float(f"{value:.12g}")
    return short if math.isclose(short, value, rel_tol=8 * sys.float_info.epsilon) else value


class OpaqueError(Exception):
    """A Value that the algebra takes as it is."""


def _add(terms: dict[Monomial, float], monomial: Monomial, coefficient: float) -> None:
    """Adds to a coefficient. A term that cancels but for rounding becomes 0."""
    total = terms.get(monomial, 0.0) + coefficient
    terms[monomial] = 0.0 if abs(total) <= _ROUNDING * abs(coefficient) else total


def _times(left: Monomial, right: Monomial) -> Monomial:
    powers = dict(left)
    for atom, power in right:
        powers[atom] = powers.get(atom, 0) + power
    return frozenset((atom, power) for atom, power in powers.items() if power != 0)


def number(value: float) -> Polynomial:
    return Polynomial({_ONE: float(value)})


def atom(name: Atom) -> Polynomial:
    return Polynomial({frozenset({(name, 1)}): 1.0})


def sum_of(polynomials: Sequence[Polynomial]) -> Polynomial:
    result = Polynomial({})
    for polynomial in polynomials:
        result = result + polynomial
    return result


def combined(packet: Any, left: Polynomial, right: Polynomial) -> Polynomial | None:
    """The result of an ATen op on two polynomials; None if it is no sum, difference or product."""
    if packet is aten.add:
        return left + right
    if packet is aten.sub:
        return left - right
    if packet is aten.rsub:
        return right - left
    return left * right if packet is aten.mul else None


def exp(exponent: Polynomial) -> Polynomial:
    """The exponential of a polynomial. A number in the exponent becomes a factor."""
    if _ONE in exponent:
        shift = exponent[_ONE]
        if not -_LARGEST_SHIFT < shift < _LARGEST_SHIFT:
            raise OpaqueError
        rest = exponent - number(shift)
        return (exp(rest) if rest else number(1.0)) * math.exp(shift)
    if len(exponent) == 1:
        (monomial, coefficient) = next(iter(exponent.items()))
        if coefficient == 1.0 and len(monomial) == 1:
            (inner, power) = next(iter(monomial))
            if power == 1 and inner[0] == "log":
                return atom(("leaf", inner[1]))
    return atom(("exp", exponent))


def log(argument: Polynomial) -> Polynomial:
    """The logarithm of a product or quotient, whose factors but exponentials occur once, or of a
    mixture."""
    if len(argument) > 1:
        return log_mixture(argument)
    if len(argument) != 1 or next(iter(argument.values())) != 1.0:
        raise OpaqueError
    result = Polynomial({})
    for inner, power in next(iter(argument)):
        if inner[0] == "exp":
            result = result + inner[1] * float(power)
        elif inner[0] == "leaf" and abs(power) == 1:
            result = result + atom(("log", inner[1])) * float(power)
        elif inner[0] == "sumexp" and abs(power) == 1:
            result = result + atom(("lse", *inner[1:])) * float(power)
        else:
            raise OpaqueError
    if not result:
        raise OpaqueError
    return result


def log_mixture(argument: Polynomial) -> Polynomial:
    """The logarithm of a weighted sum of softmaxes. The sum of its weights becomes an addend."""
    if len(argument) < 2:
        raise OpaqueError
    for monomial, weight in argument.items():
        if weight < 0 or len(monomial) != 1 or softmax_of(next(iter(monomial))) is None:
            raise OpaqueError
    total = sum(argument.values())
    if abs(total - 1) <= _ROUNDING:
        return atom(("log_mixture", argument))
    return atom(("log_mixture", argument * (1 / total))) + number(math.log(total))


def softmax_of(factor: tuple[Atom, int]) -> tuple[Hashable, int] | None:
    """The logits and the dimension of the classes, if a power of an atom is a softmax; else
    None."""
    found, power = factor
    if found[0] != "exp" or power != 1:
        return None
    for inner in found[1].atoms():
        if inner[0] == "lse" and found[1] == log_softmax(*inner[1:]):
            return inner[1], inner[2]
    return None


def log_softmax(key: Hashable, dim: int) -> Polynomial:
    return atom(("leaf", key)) - atom(("lse", key, dim))


def softmax_pairs(polynomial: Polynomial) -> Iterator[tuple[Hashable, Hashable, int]]:
    """Two tensors along one dimension, of which a polynomial has the log_softmax of the first and
    the softmax of the second; in every way."""
    atoms = polynomial.atoms()
    softmaxes = [softmax for found in atoms if (softmax := softmax_of((found, 1))) is not None]
    for x, dim in (found[1:] for found in atoms if found[0] == "lse"):
        for z, other_dim in softmaxes:
            if x != z and dim == other_dim:
                yield x, z, dim


def row_dim(found: Atom) -> int | None:
    """The class dimension of an atom that is one number for each row; None of another."""
    if found[0] in ("lse", "sumexp"):
        return int(found[2])
    if found[0] == "pick":
        return int(found[3])
    if found[0] == "exp":
        dims = {row_dim(inner) for inner in found[1].atoms()}
        return dims.pop() if len(dims) == 1 else None
    return None


def picked(polynomial: Polynomial, target: Hashable, dim: int) -> Polynomial:
    """A polynomial's entry at an index of each row: picking commutes with elementwise ops."""
    result = Polynomial({})
    for monomial, coefficient in polynomial.items():
        term = number(coefficient)
        for found, power in monomial:
            if found[0] in ("lse", "sumexp") and found[2] == dim:
                term = term * Polynomial({frozenset({(found, power)}): 1.0})
            elif power == 1:
                term = term * _picked_atom(found, target, dim)
            else:
                raise OpaqueError
        result = result + term
    return result


def _picked_atom(found: Atom, target: Hashable, dim: int) -> Polynomial:
    """What an atom's entry at an index of each row is.

    Raises:
        OpaqueError: it is not known.
    """
    if found[0] == "leaf":
        return atom(("pick", found[1], target, dim))
    if found[0] == "exp":
        return exp(picked(found[1], target, dim))
    raise OpaqueError


def selected(polynomial: Polynomial, dim: int) -> Polynomial | None:
    """The sum over classes of a one-hot target times a polynomial, as picked entries; None if it is
    no such product."""
    hot = [found for found in polynomial.atoms() if found[0] == "one_hot" and found[2] == dim]
    if len(hot) != 1 or not all((hot[0], 1) in monomial for monomial in polynomial):
        return None
    rest = Polynomial({m - {(hot[0], 1)}: c for m, c in polynomial.items()})
    try:
        return picked(rest, hot[0][1], dim)
    except OpaqueError:
        return None
