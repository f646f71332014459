"""Terms that are left out by their value: at which tensors' infinities, and which losses remain."""

from __future__ import annotations

import pytest
import torch

from compile_losses.recognize.graph.symbolic_tensors import whole
from compile_losses.recognize.spellings.masked_terms import (
    finite_divergences,
    without_infinities,
    without_nan,
)
from compile_losses.recognize.spellings.normal_form import normal_forms
from tests.passes.graphs import dynamo, recognizer, words


def written(function):
    inputs = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    found_by, root = recognizer(dynamo(function, *inputs).gm)
    forms = [without_infinities(f, found_by.replay) for f in normal_forms(root, found_by.replay)]
    forms = [form for form in forms if form is not None]
    losses = [one for form in forms for one in finite_divergences(form, found_by.algebra)]
    return bool(forms), [(one.op, words(one.args), one.kwargs) for one in losses]


def cross_entropy(x, y):
    return y.softmax(1) * -x.log_softmax(1)


def divergence(x, y):
    return y.softmax(1) * (y.log_softmax(1) - x.log_softmax(1))


ARGUMENTS = "[l_x_, l_y_, reduction]"
WITHOUT = [("softmax_finite_kl_div", ARGUMENTS, {"entropy": False})]
WITH = [("softmax_finite_kl_div", ARGUMENTS, {})]
MASKS = {
    "of the input": (lambda x, y: cross_entropy(x, y).masked_fill(x.isinf(), 0).sum(), WITHOUT),
    "of a copy": (lambda x, y: cross_entropy(x, y).masked_fill((x.clone() / 2).isinf(), 0).sum(), WITHOUT),
    "of both": (
        lambda x, y: divergence(x, y).masked_fill(x.isinf() | y.isinf(), 0).sum(), WITH,
    ),
    "of each term": (
        lambda x, y: -torch.masked_fill(y.softmax(1) * x.log_softmax(1), x.isinf(), 0).sum(),
        WITHOUT,
    ),
    "of the target alone": (
        lambda x, y: cross_entropy(x, y).masked_fill(y.isinf(), 0).sum(), [],
    ),
    "of one of two": (lambda x, y: divergence(x, y).masked_fill(x.isinf(), 0).sum(), []),
    "of both at once": (
        lambda x, y: divergence(x, y).masked_fill(x.isinf() & y.isinf(), 0).sum(), [],
    ),
    "of what may overflow": (
        lambda x, y: cross_entropy(x, y).masked_fill((x * 2).isinf(), 0).sum(), [],
    ),
    "of a quotient that may overflow": (
        lambda x, y: cross_entropy(x, y).masked_fill((x / 0.5).isinf(), 0).sum(), [],
    ),
    "of one sign": (lambda x, y: cross_entropy(x, y).masked_fill(x.isneginf(), 0).sum(), []),
}  # fmt: skip
OTHERS = {
    "filled with one": lambda x, y: cross_entropy(x, y).masked_fill(x.isinf(), 1).sum(),
    "another test": lambda x, y: cross_entropy(x, y).masked_fill(x > 3, 0).sum(),
    "no mask": lambda x, y: cross_entropy(x, y).sum(),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    function, expected = MASKS[name]
    assert written(function) == (True, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks(name):
    assert written(OTHERS[name]) == (False, [])


def test_sums_without_nan():
    found_by, root = recognizer(dynamo(lambda x: (x**2).nansum(), torch.randn(3, 4)).gm)
    form = without_nan(whole(root), found_by.replay)
    assert (str(form.body.node), form.reduced) == ("pow_1", ((None, False),))
    found_by, root = recognizer(dynamo(lambda x: (x**2).nansum(1), torch.randn(3, 4)).gm)
    assert without_nan(whole(root), found_by.replay) is None
