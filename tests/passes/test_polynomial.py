"""Sums of products of atoms, compared by value."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_losses.recognize.spellings import polynomial as p

X, Y = p.atom(("leaf", "x")), p.atom(("leaf", "y"))
LSE = p.atom(("lse", "x", 1))

small = st.integers(-3, 3).map(float)
polynomials = st.lists(st.tuples(small, st.integers(0, 2), st.integers(0, 2)), max_size=4).map(
    lambda terms: p.sum_of([_power(X, i) * _power(Y, j) * c for c, i, j in terms])
)


def _power(one, exponent):
    result = p.number(1)
    for _ in range(exponent):
        result = result * one
    return result


def _at(polynomial, x, y):
    known = {("leaf", "x"): x, ("leaf", "y"): y}
    return sum(c * math.prod(known[a] ** n for a, n in m) for m, c in polynomial.items())


@settings(max_examples=40, deadline=None)
@given(polynomials, polynomials)
def test_arithmetic(one, other):
    a, b = _at(one, 1.5, -0.75), _at(other, 1.5, -0.75)
    assert _at(one + other, 1.5, -0.75) == pytest.approx(a + b)
    assert _at(one - other, 1.5, -0.75) == pytest.approx(a - b)
    assert _at(one * other, 1.5, -0.75) == pytest.approx(a * b)
    assert one + other == other + one
    assert hash(one + other) == hash(other + one)
    assert one - one == p.Polynomial({})


def test_ratio():
    one = X * 2 + Y * 3
    assert (one * 1.5).ratio(one) == 1.5
    assert (one * -1).ratio(one) == -1
    assert (X * 2 + Y * 4).ratio(one) is None
    assert X.ratio(one) is None
    assert p.Polynomial({}).ratio(one) is None


def test_what_cancels_but_for_rounding():
    assert p.Polynomial({}) == X * 0.1 + X * 0.2 - X * 0.3
    assert X * 0.1 + X * 0.2 == X * 0.3
    assert X * 1.0 != X * 1.000001


def test_exponentials():
    assert p.exp(p.log(X)) == X
    assert p.exp(p.number(2)) == p.number(math.exp(2))
    assert p.log(p.exp(X) * p.exp(Y)) == X + Y
    assert p.log(X * Y) == p.log(X) + p.log(Y)
    assert p.log(p.exp(X)) == X
    assert p.exp(X + p.number(2)).ratio(p.exp(X)) == pytest.approx(math.exp(2))
    with pytest.raises(p.OpaqueError):
        p.exp(X + p.number(1000))


def test_logarithms_that_are_none():
    for argument in (X * 2, X * X, X - Y, p.number(1)):
        with pytest.raises(p.OpaqueError):
            p.log(argument)


SOFTMAX_X, SOFTMAX_Y = (p.exp(p.log_softmax(key, 1)) for key in "xy")


def test_softmaxes():
    assert p.log_softmax("x", 1) == X - LSE
    ((monomial, _),) = SOFTMAX_X.items()
    (factor,) = monomial
    assert p.softmax_of(factor) == ("x", 1)
    assert p.softmax_of((factor[0], 2)) is None
    ((monomial, _),) = p.exp(X).items()
    assert p.softmax_of(*monomial) is None
    product = SOFTMAX_Y * p.log_softmax("x", 1)
    assert set(p.softmax_pairs(product)) == {("x", "y", 1)}
    other = SOFTMAX_Y * p.log_softmax("x", 0)
    assert set(p.softmax_pairs(other)) == set()


def test_mixtures():
    half = p.log(SOFTMAX_X * 0.5 + SOFTMAX_Y * 0.5)
    whole = p.log(SOFTMAX_X + SOFTMAX_Y)
    assert whole == half + p.number(math.log(2))
    for argument in (SOFTMAX_X - SOFTMAX_Y, SOFTMAX_X + X):
        with pytest.raises(p.OpaqueError):
            p.log(argument)


def test_rows():
    assert p.row_dim(("lse", "x", 1)) == 1
    assert p.row_dim(("pick", "x", "t", 2)) == 2
    assert p.row_dim(("leaf", "x")) is None
    ((monomial, _),) = p.exp(LSE).items()
    ((of_rows, _),) = monomial
    assert p.row_dim(of_rows) == 1


def test_picks():
    pick = p.atom(("pick", "x", "t", 1))
    assert p.picked(X * 2 - LSE, "t", 1) == pick * 2 - LSE
    assert p.picked(p.exp(X - LSE), "t", 1) == p.exp(pick - LSE)
    for other in (X * X, p.atom(("lse", "x", 0))):
        with pytest.raises(p.OpaqueError):
            p.picked(other, "t", 1)
    hot = p.atom(("one_hot", "t", 1))
    assert p.selected(hot * (X - LSE) * -1, 1) == (pick - LSE) * -1
    assert p.selected(hot * X + Y, 1) is None
    assert p.selected(hot * X, 0) is None


def test_combined():
    aten = torch.ops.aten

    assert p.combined(aten.add, X, Y) == X + Y
    assert p.combined(aten.sub, X, Y) == X - Y
    assert p.combined(aten.rsub, X, Y) == Y - X
    assert p.combined(aten.mul, X, Y) == X * Y
    assert p.combined(aten.div, X, Y) is None


def test_too_many_terms():
    many = p.sum_of([p.atom(("leaf", i)) for i in range(9)])
    with pytest.raises(p.OpaqueError):
        many * many


def test_unrounded():
    assert p.unrounded(0.1 + 0.2) == 0.3
    assert p.unrounded(1 / 3) == 1 / 3
    assert p.unrounded(0.30000001) == 0.30000001
