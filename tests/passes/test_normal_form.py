"""``scale * sum(weights * body)``: what is peeled off a loss."""

from __future__ import annotations

import pytest
import torch

from compile_losses.recognize.spellings.normal_form import added_forms, normal_forms, sums_classes
from tests.passes.graphs import dynamo, evaluate, numbers, recognizer, words


def given():
    return torch.randn(4, 6, dtype=torch.float64), torch.rand(4, 6, dtype=torch.float64)


WHOLE = {
    "sum": lambda x, w: x.sin().sum(),
    "mean": lambda x, w: x.sin().mean(),
    "mean of sums": lambda x, w: x.sin().sum(1).mean(),
    "sum of means": lambda x, w: x.sin().mean(0).sum(),
    "mean of means": lambda x, w: x.sin().mean(-1, keepdim=True).mean(),
    "factor": lambda x, w: 0.5 * x.sin().mean(),
    "divisor": lambda x, w: x.sin().sum() / 7,
    "negative": lambda x, w: -x.sin().sum(),
    "factor inside": lambda x, w: (3 * x.sin()).sum(),
    "view": lambda x, w: x.sin().view(-1).mean(),
    "transposed": lambda x, w: x.sin().t().sum(1).sum(),
    "weights": lambda x, w: (w * x.sin()).sum(),
    "weights of rows": lambda x, w: (w[:, :1] * x.sin()).mean(),
    "weights of sums": lambda x, w: (w[:, 0] * x.sin().mean(1)).sum(),
    "weights twice": lambda x, w: (w[0] * (x.sin() * w)).mean(),
    "size": lambda x, w: x.sin().sum() / x.size(0),
    "numel": lambda x, w: x.sin().sum() / x.numel(),
    "selection": lambda x, w: x.sin()[w > 0.5].mean(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_form_is_the_loss(name):
    found = dynamo(WHOLE[name], *given())
    found_by, root = recognizer(found.gm)
    known = numbers(found)
    forms = list(normal_forms(root, found_by.replay))
    assert any(words(form.body).startswith("sin") for form in forms)
    for form in forms:
        if form.selection is not None or form.body.op is torch.ops.aten.index.Tensor:
            continue  # only data say how many
        product = evaluate(form.body, known)
        expanded = [evaluate(w, known) for w in form.weights]
        for weight in expanded:
            product = product * weight
        scale = form.constant * form.numerator / form.denominator
        torch.testing.assert_close(scale * product.sum(), known[root])


def forms_of(function):
    found_by, root = recognizer(dynamo(function, *given()).gm)
    return list(normal_forms(root, found_by.replay)), found_by.replay


def test_scales():
    *_, form = forms_of(lambda x, w: x.sin().sum() / 8)[0]
    counts = {"sum": 1, "mean": 24}
    assert form.scale(counts, []) == ("sum", [(torch.mul, (0.125,))])
    *_, form = forms_of(lambda x, w: -x.sin().mean())[0]
    assert form.scale(counts, []) == ("mean", [(torch.neg, ())])
    *_, form = forms_of(lambda x, w: 3 * x.sin().sum(1).mean())[0]
    assert form.scale(counts, []) == ("sum", [(torch.mul, (0.75,))])
    *_, form = forms_of(lambda x, w: 2.5 * x.sin().sum(1).mean())[0]
    assert form.scale(counts | {"batchmean": 4}, []) == ("batchmean", [(torch.mul, (2.5,))])


@pytest.mark.parametrize(
    ("function", "dims"),
    [
        (lambda x, w: x.sin().sum(1).mean(), (1,)),
        (lambda x, w: x.sin().sum(0).mean(), (0,)),
        (lambda x, w: x.sin().sum(), (0, 1)),
        (lambda x, w: x.sin().sum(1), (1,)),
        (lambda x, w: x.sin().sum(1, keepdim=True), None),
    ],
)
def test_classes_that_are_summed_up(function, dims):
    assert sums_classes(forms_of(function)[0][-1]) == dims


def test_parts_of_a_sum():
    (form, *_), replay = forms_of(lambda x, w: x.sin().mean() - 2.5 * w.cos().mean())
    (one, other), *_ = list(added_forms(form, replay))[::-1]
    assert (words(one.body)[:3], words(other.body)[:3]) == ("sin", "cos")
    assert other.constant / one.constant == -2.5
    (form, *_), replay = forms_of(lambda x, w: x.sin().mean() - w.cos().sum())
    assert list(added_forms(form, replay)) == []
