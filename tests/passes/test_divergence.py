"""Divergences of two softmaxes: their arguments, temperature, dimension and reduction."""

from __future__ import annotations

import pytest
import torch

from compile_losses.recognize.spellings.divergence import softmax_divergences
from compile_losses.recognize.spellings.normal_form import normal_forms
from tests.passes.graphs import dynamo, recognizer, words


def given():
    return torch.randn(4, 6, requires_grad=True), torch.randn(4, 6), torch.rand(4) > 0.5


def scale(form):
    return round(form.constant * form.numerator / form.denominator, 6)


def written(function):
    found_by, root = recognizer(dynamo(function, *given()).gm)
    return [
        (one.op, words(one.args), one.kwargs, one.each, scale(one.form), len(one.last))
        for form in normal_forms(root, found_by.replay)
        for one in softmax_divergences(form, found_by.algebra.of(form.body), found_by.algebra)
    ]


def kl(x, y, dim=1):
    return y.softmax(dim) * (y.log_softmax(dim) - x.log_softmax(dim))


def js(x, y, b):
    p, q = x.softmax(1), y.softmax(1)
    m = (1 - b) * p + b * q
    return b * q * (q.log() - m.log()) + (1 - b) * p * (p.log() - m.log())


KL, JS = "softmax_kl_div", "softmax_js_div"
ORDER, TURNED = "[l_x_, l_y_, reduction]", "[l_y_, l_x_, reduction]"
FORMS = {
    "sum": (lambda x, y, m: kl(x, y).sum(), [(KL, ORDER, {}, False, 1.0, 0)]),
    "scaled": (lambda x, y, m: 4 * kl(x, y).sum(), [(KL, ORDER, {}, False, 4.0, 0)]),
    "reverse": (lambda x, y, m: kl(y, x).sum(), [(KL, TURNED, {}, False, 1.0, 0)]),
    "of rows": (lambda x, y, m: kl(x, y).sum(1), [(KL, ORDER, {}, True, 1.0, 0)]),
    "temperature": (
        lambda x, y, m: kl(x / 2, y / 2).sum(),
        [(KL, ORDER, {"temperature": 2.0}, False, 1.0, 0)],
    ),
    "two temperatures": (
        lambda x, y, m: kl(x / 2, y / 3).sum(), [(KL, "[truediv, truediv_1, reduction]", {}, False, 1.0, 0)],
    ),
    "dimension": (
        lambda x, y, m: kl(x, y, 0).sum(), [(KL, ORDER, {"dim": 0}, False, 1.0, 0)]
    ),
    "selected rows": (lambda x, y, m: kl(x, y)[m].sum(), [(KL, ORDER, {}, True, 1.0, 2)]),
    "mean of selected rows": (
        lambda x, y, m: kl(x, y)[m].sum(1).mean(), [(KL, ORDER, {}, True, 1.0, 3)],
    ),
    "mixture": (lambda x, y, m: js(x, y, 0.5).sum(), [(JS, ORDER, {}, False, 1.0, 0)]),
    "uneven mixture": (
        lambda x, y, m: js(x, y, 0.3).sum(), [(JS, ORDER, {"beta": 0.3}, False, 1.0, 0)],
    ),
    "the one with a gradient first": (
        lambda x, y, m: js(y, x, 0.3).sum(), [(JS, ORDER, {"beta": 0.7}, False, 1.0, 0)],
    ),
    "two dimensions": (
        lambda x, y, m: (y.softmax(0) * (y.log_softmax(0) - x.log_softmax(1))).sum(), [],
    ),
    "not summed": (lambda x, y, m: kl(x, y), []),
    "of the other dimension": (lambda x, y, m: kl(x, y).sum(0), []),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    function, expected = FORMS[name]
    assert written(function) == expected
