"""Reasons not to rewrite a match, each on a graph that has no other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.recognize import guards
from compile_losses.recognize.match import Match
from compile_losses.recognize.verify import verify
from tests.passes.graphs import dynamo, recognizer


def match_of(function, *inputs):
    found_by, root = recognizer(dynamo(function, *inputs).gm)
    return next(c for c in found_by.candidates(root) if isinstance(c, Match))


def pair():
    return torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)


def written_between(x, t):
    d = x - t
    t.add_(1)
    return (d * d).mean()


def written_before(x, t):
    t.add_(1)
    return ((x - t) ** 2).mean()


def test_mutated():
    match = match_of(written_between, *pair())
    assert "is changed in place by add_" in guards.mutated(match)
    assert guards.refusal(match) == guards.mutated(match)
    assert guards.mutated(match_of(written_before, *pair())) is None


def test_written_after_a_loss_with_gradients():
    def after(x, t):
        loss = ((x - t) ** 2).mean()
        t.add_(1)
        return loss

    assert "after the loss" in guards.mutated(match_of(after, *pair()))
    x, t = pair()
    assert guards.mutated(match_of(after, x.detach(), t)) is None


def test_gradients_that_are_cut():
    match = match_of(
        lambda x, t: F.cross_entropy(x, t),
        torch.randn(4, 5, requires_grad=True),
        torch.zeros(4).long(),
    )
    assert guards.gradient_cut(match) is None

    def cut_off(x, t):
        with torch.no_grad():
            p = x.log_softmax(1)
        return -p.gather(1, t[:, None]).mean()

    match = match_of(cut_off, torch.randn(4, 5, requires_grad=True), torch.zeros(4).long())
    assert "computed without gradients" in guards.gradient_cut(match)


def test_grad_mode():
    def step(x, t):
        a = x.sin()
        with torch.no_grad():
            b = a.cos()
        return b + a

    graph = dynamo(step, *pair()).gm.graph
    named = {n.name: n for n in graph.nodes}
    assert guards.changes_grad_mode(named["a"], named["b"])
    assert not guards.changes_grad_mode(named["b"], named["b"])


def test_other_results():
    x, t = pair()
    match = match_of(lambda x, t: F.mse_loss(x, t), x, t)
    assert guards.different_result(match) is None
    match.args = (match.args[0], match.args[1], 0)
    assert "would change its shape" in guards.different_result(match)
    match.args = (match.args[0], match.args[1], 1)
    match.kwargs["dtype"] = torch.float64
    assert "would change its dtype" in guards.different_result(match)


def test_nothing_computes():
    match = match_of(lambda x, t: F.mse_loss(x, t), *pair())
    assert guards.nothing_computes(match) is None
    assert guards.unknown_values(match) is None
    assert guards.not_strided(match) is None
    assert guards.tensor_subclass(match) is None
    assert guards.inside_functorch(match) is None
    assert guards.symbols(match) is None
    assert guards.refusal(match) is None
    del match.args[0].meta["example_value"]
    assert guards.unknown_values(match) is not None


def test_gradients_that_are_lost():
    """A tensor that torch's loss gives a gradient and that the op would read without one."""
    match = match_of(lambda x, t: ((x - t) ** 2).mean(), *pair())
    assert guards.gradient_lost(match) is None
    source = match.interior[-1].all_input_nodes[0]
    with source.meta["example_value"].fake_mode:
        detached = source.meta["example_value"].detach()
    graph = source.graph
    with graph.inserting_after(source):
        argument = graph.call_method("detach", (source,))
    argument.meta["example_value"] = detached
    match.args = (argument, *match.args[1:])
    assert guards.gradient_lost(match) == f"{argument.name} is computed without gradients"


VERIFIED = {
    "right": (lambda match: None, None),
    "reduction": (lambda match: setattr(match, "args", (*match.args[:2], 2)), "differ"),
    "sides": (lambda match: setattr(match, "args", (match.args[0], match.args[0], 1)), "differ"),
}


@pytest.mark.parametrize("name", VERIFIED)
def test_verified(name):
    change, words = VERIFIED[name]
    match = match_of(lambda x, t: ((x - t) ** 2).mean(), *pair())
    change(match)
    reason, note = verify(match)
    assert note == ""
    assert reason is None if words is None else words in reason


def test_what_can_not_be_verified():
    match = match_of(lambda x, t: ((x - t) ** 2).mean(), *pair())
    match.interior[-1].target = lambda *_: 1 / 0
    reason, note = verify(match)
    assert reason is None
    assert note.startswith("not verified: ")
