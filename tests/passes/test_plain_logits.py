"""Entropies of logits that are held anyway."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize.heads.plain_logits import take_plain_logits
from compile_losses.recognize.heads.shared_logits import Kept, Rewritten
from compile_losses.request import Request
from tests.constants import set_constants
from tests.corpus.capture import SMALL
from tests.passes.graphs import dynamo, name_of, put_ops, recognizer
from tests.passes.outcomes import assert_same, with_gradients

CLASSES = 7


def given():
    x = torch.randn(3, 4, CLASSES, dtype=torch.float64, requires_grad=True)
    return x, torch.randint(CLASSES, (3, 4))


def entropy(x):
    return x.logsumexp(-1) - (x.softmax(-1) * x).sum(-1)


TAKEN = {
    "alone": lambda x, t: entropy(x).square().sum(),
    "beside a loss": lambda x, t: (
        F.cross_entropy(x.view(-1, CLASSES), t.view(-1)) + entropy(x).sum()
    ),
    "capped": lambda x, t: entropy(2 * torch.tanh(x / 2)).sum(),
    "of a layer": lambda x, t: entropy(F.linear(x, torch.eye(CLASSES).double())).sum(),
}
LEFT = {
    "read otherwise": lambda x, t: entropy(x).sum() + x.square().sum(),
    "no entropy": lambda x, t: x.logsumexp(-1).sum(),
    "scaled": lambda x, t: entropy(x / 0.7).sum(),
    "of a function": lambda x, t: entropy(x.sin()).sum(),
    "some classes": lambda x, t: entropy(x[..., 1:]).sum(),
    "of the tokens": lambda x, t: (x.logsumexp(1) - (x.softmax(1) * x).sum(1)).sum(),
}


def taken(function):
    found = dynamo(function, *given())
    put_ops(found.gm)
    found_by, _ = recognizer(found.gm)
    results = list(take_plain_logits(found.gm.graph, found_by.replay, Request.of(verify=True)))
    found.gm.graph.lint()
    found.gm.recompile()
    return found, results


@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
def test_calls(name):
    function = {**TAKEN, **LEFT}[name]
    found, results = taken(function)
    calls = [n for n in found.gm.graph.nodes if "fused.row_statistics" in name_of(n.target)]
    assert len(calls) == (name in TAKEN)
    assert any(isinstance(r, Rewritten) for r in results) == (name in TAKEN)
    before = dynamo(function, *given())
    assert_same(with_gradients(found.gm, found.inputs), with_gradients(before.gm, found.inputs))


def test_few_logits(monkeypatch):
    for changes, words in (
        ({"statistics_classes": 100}, "classes"),
        ({"statistics_bytes": 1 << 20}, ""),
    ):
        set_constants(monkeypatch, **{**SMALL, **changes})
        _, (result,) = taken(TAKEN["alone"])
        assert isinstance(result, Kept)
        assert words in result.reason
