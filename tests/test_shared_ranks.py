"""Ranks, largest logits and squares that are read beside a head's loss, under torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.accuracy import assert_accurate
from tests.corpus.ranks import (
    BY_ROW,
    NEAR_MISSES,
    margins,
    of_two_classes,
    ranks,
    several_of_the_likeliest,
    sorted_classes,
    weighted_by_a_margin,
    with_gradients,
)
from tests.corpus.rows import problem
from tests.graphs import Compiled
from tests.heads import AGAIN, IN_THE_FORWARD, LOGITS, check, outcome
from tests.linear_problems import largest_allocation

pytestmark = pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BY_ROW)
def test_gradients_in_the_forward(name):
    (site,) = check(BY_ROW[name], problem(), verify=True)
    assert site.plan[0] == IN_THE_FORWARD
    assert "not verified" not in site.notes


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "function", [*BY_ROW.values(), weighted_by_a_margin], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("options", [{"prefer_memory": True}, {"lazy_logits": True}], ids=str)
def test_options(function, options):
    (site,) = check(function, problem(), **options)
    assert site.reason.startswith("absorbed a linear layer")


@pytest.mark.parametrize(("options", "plan"), [({}, LOGITS), ({"prefer_memory": True}, AGAIN)])
def test_gradients_that_depend_on_other_rows(options, plan):
    """Numbers of logits that are held, or computed again."""

    def of_other_rows(h, w, labels, mask, advantages, old):
        logits = F.linear(h, w)
        log_probs = logits.log_softmax(-1)
        picked = log_probs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        given = logits.detach()
        rank = (given > given.gather(-1, labels.clamp(min=0)[..., None])).sum(-1)
        loss = -torch.sigmoid((picked * mask).sum(-1)).mean()
        return loss, rank, *given.topk(3), given.softmax(-1).square().sum(-1)

    (site,) = check(of_other_rows, problem(), **options)
    assert site.plan[0] == plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [margins, several_of_the_likeliest], ids=lambda f: f.__name__)
def test_accuracy(function, dtype):
    inputs = problem(dtype)
    wide = [t.detach().double() if t.is_floating_point() else t for t in inputs]
    wide = [t.requires_grad_(i.requires_grad) for t, i in zip(wide, inputs, strict=True)]
    compiled = Compiled(function)
    found = zip(outcome(compiled, inputs), outcome(function, inputs), outcome(function, wide),
                strict=True)  # fmt: skip
    for results in found:
        if results[0].is_floating_point():
            assert_accurate(*results)
    assert any("absorbed" in site.reason for site in compiled.sites)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_of_narrow_logits(dtype):
    """Of the same rounded logits they are torch's, equal logits included."""
    h, w, *others = problem(dtype)
    with torch.no_grad():  # products without a rounding
        h.copy_((4 * h).round().clamp(-3, 3))
        w.copy_((4 * w).round().clamp(-3, 3))
    found = outcome(Compiled(ranks), (h, w, *others))
    expected = outcome(ranks, (h, w, *others))
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[3], expected[3])


@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(function):
    assert check(function, problem()) == []


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (sorted_classes, "reads something else than rows of the logits"),
        (of_two_classes, "ranks of several classes, or with and without equal ones"),
        (with_gradients, "has a gradient that goes to single logits"),
    ],
)
def test_reasons(function, reason):
    compiled = Compiled(function)
    compiled(*problem())
    assert any(reason in site.reason for site in compiled.sites), compiled.sites


def test_no_logits_are_held(no_code):
    h = torch.randn(4, 18, 8, requires_grad=True)
    w = torch.randn(8000, 8)
    labels = torch.randint(8000, (4, 18))
    compiled = Compiled(several_of_the_likeliest)

    def train():
        compiled(h, w, labels, None, None, None)[0].backward()

    train()
    assert largest_allocation(train) < 72 * 8000 * 4 / 2
