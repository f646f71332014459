"""Losses of probabilities: which arguments a body's tensors are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.ops.checks import NOTHING_IGNORED
from compile_losses.recognize.spellings.normal_form import normal_forms
from compile_losses.recognize.spellings.probabilities import named_values, written_probabilities
from tests.passes.graphs import dynamo, recognizer, words


def written(function, *inputs):
    found_by, root = recognizer(dynamo(function, *inputs).gm)
    return [
        (one.op, [words(a) for a in one.args], one.each)
        for form in normal_forms(root, found_by.replay)
        for one in written_probabilities(form, found_by.algebra)
    ]


def classes():
    return torch.randn(4, 6, requires_grad=True), torch.randint(6, (4,))


def rows():
    return torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)


INDICES = ["l_x_", "l_t_", "None", "reduction", str(NOTHING_IGNORED), "0"]
SOFT = ["l_x_", "softmax", "None", "reduction", "-100", "0"]
LOSSES = {
    "picked": (
        lambda x, t: -x.log_softmax(1).gather(1, t[:, None]).squeeze(1).sum(), classes,
        [("cross_entropy", INDICES, False)],
    ),
    "of each row": (
        lambda x, t: x.logsumexp(1) - x.gather(1, t[:, None]).squeeze(1), classes,
        [("cross_entropy", INDICES, True)],
    ),
    "one-hot": (
        lambda x, t: -(F.one_hot(t, 6) * x.log_softmax(1)).sum(), classes,
        [("cross_entropy", INDICES, False)],
    ),
    "soft": (
        lambda x, t: -(t.softmax(1) * x.log_softmax(1)).sum(), rows,
        [("cross_entropy", SOFT, False)],
    ),
    "an entropy": (lambda x, t: -(x.softmax(1) * x.log_softmax(1)).sum(), rows, []),
    "of another dimension": (lambda x, t: -x.log_softmax(0).gather(1, t[:, None]).sum(), classes, []),
    "two dimensions": (
        lambda x, t: x.logsumexp(0) - x.gather(1, t[:, None]).squeeze(1),
        lambda: (torch.randn(4, 4), torch.randint(4, (4,))), [],
    ),
    "less than a logit": (lambda x, t: (x.logsumexp(1) - x[:, 0] * 2).sum(), classes, []),
    "a sum of logits": (lambda x, t: x.sum(), rows, []),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    function, inputs, expected = LOSSES[name]
    assert written(function, *inputs())[:1] == expected


DIVERGENCES = {
    "as they are": (lambda p, q: (q * (q.log() - p.log())).sum(), ["l_p_", "l_q_"]),
    "logarithms": (lambda p, q: (q.exp() * (q - p)).sum(), ["l_p_", "l_q_"]),
    "in turn": (lambda p, q: (p * (p.log() - q.log())).sum(), ["l_q_", "l_p_"]),
    "kept from 0": (lambda p, q: (q * (q.log() - (p + 1e-8).log())).sum(), None),
    "another factor": (lambda p, q: (p * (q.log() - p.log()) * q).sum(), None),
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences(name):
    function, expected = DIVERGENCES[name]
    found = written(function, torch.rand(4, 6, requires_grad=True), torch.rand(4, 6))
    if expected is None:
        assert found == []
    else:
        assert [(op, args[:2]) for op, args, _ in found][:1] == [("kl_div", expected)]


def test_named_values_are_of_the_bodys_shape():
    def function(x, t):
        return (x.exp() * t.sum(1, keepdim=True)).log() + t.sum()

    found_by, root = recognizer(dynamo(function, *rows()).gm)
    values = named_values(found_by.replay.of(root), found_by.replay)
    assert [str(value.node) for value in values] == ["log", "mul", "l_t_", "exp", "l_x_"]
