"""Losses that pick different classes of the rows of one head, under torch.compile: no logits.

ORPO and CPO are such steps. Both have log-probabilities of the answers of all sequences, and a
cross entropy of the chosen ones, with other labels.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from tests.corpus.classes import (
    BY_ROW,
    CHOSEN,
    LABELS_MADE_TWICE,
    NEAR_MISSES,
    PREFERENCES,
    cross_entropy,
    drawn,
    drawn_by_probabilities,
    orpo,
    orpo_of_pairs,
    orpo_of_two_forwards,
    other,
    policy_and_chosen,
    policy_and_next,
    two_policies,
    without_an_order,
)
from tests.corpus.rows import CLASSES, problem
from tests.corpus.shared import entropy_of
from tests.heads import AGAIN, IN_THE_FORWARD, LOGITS, check, check_accuracy, outcome, sites_of
from tests.linear_problems import largest_allocation

pytestmark = pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BY_ROW)
def test_gradients_in_the_forward(name):
    inputs = problem()
    (site,) = check(BY_ROW[name], inputs, verify=True, tolerance=1e-12)
    assert site.plan[0] == IN_THE_FORWARD
    assert "not verified" not in site.notes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BY_ROW)
def test_frozen_heads(name):
    inputs = problem(frozen=True)
    (site,) = check(BY_ROW[name], inputs, tolerance=1e-12)
    assert site.plan[0] == IN_THE_FORWARD


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("options", "plan"), [({}, LOGITS), ({"prefer_memory": True}, AGAIN)])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences(options, plan, frozen, name):
    """The gradient of a row depends on its whole sequence, so that no forward can compute it."""
    function, inputs = PREFERENCES[name], problem(frozen=frozen)
    (site,) = check(function, inputs, tolerance=1e-12, **options)
    assert site.plan[0] == plan


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PREFERENCES)
def test_verified_preferences(name):
    inputs = problem()
    (site,) = sites_of(PREFERENCES[name], inputs, verify=True)
    assert "not verified" not in site.notes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["two_sets", "policy_and_chosen", "orpo", "several_classes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accuracy(name, dtype):
    check_accuracy({**BY_ROW, **PREFERENCES}[name], problem(dtype))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", [policy_and_chosen, policy_and_next, orpo_of_pairs])
def test_symbols(function):
    compiled = torch.compile(function, backend="compile_losses", dynamic=True)
    for tokens in (18, 25):
        inputs = problem(tokens=tokens)
        torch.testing.assert_close(outcome(compiled, inputs), outcome(function, inputs))


def test_symbols_of_rows_alone():
    """The class's number is known: one compilation is for all lengths."""
    compiled = torch.compile(policy_and_next, backend="compile_losses")
    compile_losses.counters().clear()
    for tokens in (18, 25, 31):
        inputs = problem(tokens=tokens)
        for tensor in (inputs[0], *inputs[2:4], inputs[5]):
            torch._dynamo.mark_dynamic(tensor, 1)
        torch.testing.assert_close(outcome(compiled, inputs), outcome(policy_and_next, inputs))
    assert compile_losses.counters()["rewritten"]["linear_row_statistics"] == 1


def test_all_rows_ignored():
    """Of the second set. A mean of no rows is nan, as torch's is; a sum is 0."""
    h, w, labels, *_ = problem()
    nothing = torch.full_like(labels, -100)

    def step(h, w, labels, reduction):
        logits = F.linear(h, w)
        return cross_entropy(logits, labels) + cross_entropy(logits, nothing, reduction=reduction)

    compiled = torch.compile(step, backend="compile_losses")
    for reduction in ("sum", "mean"):
        results = [f(h, w, labels, reduction) for f in (step, compiled)]
        torch.testing.assert_close(*results, equal_nan=True)
        gradients = [torch.autograd.grad(result, (h, w)) for result in results]
        torch.testing.assert_close(*gradients, equal_nan=True)


def test_masked_classes():
    """A bias of -inf masks class 0, in whose place ignored rows have no class."""
    h, w, labels, *_ = problem()
    bias = torch.zeros(CLASSES, dtype=h.dtype)
    bias[0] = -torch.inf
    labels, others = (torch.where(x == 0, 1, x) for x in (labels, other(labels)))

    def step(h, w):
        logits = F.linear(h, w, bias)
        return cross_entropy(logits, labels) + cross_entropy(logits[1:], others[1:])

    (site,) = check(step, [h, w], tolerance=1e-12)
    assert site.plan[0] == IN_THE_FORWARD


def test_gradients_from_outside():
    h, w, labels, *_ = problem()

    def step(h, w):
        logits = F.linear(h, w)
        one = cross_entropy(logits, labels, reduction="none")
        return one, cross_entropy(logits[:CHOSEN], other(labels)[:CHOSEN], reduction="none")

    for options in ({}, {"prefer_memory": True}):
        compiled = torch.compile(step, backend="compile_losses", options=options)
        results = [function(h, w) for function in (compiled, step)]
        torch.testing.assert_close(*results)
        totals = [sum(r.cos().sum() for r in result) for result in results]
        torch.testing.assert_close(*(torch.autograd.grad(total, (h, w)) for total in totals))


def test_no_logits_are_held():
    """Of 8000 classes a chunk of 16 rows at a time, where the logits of all are 144 rows."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(8, 18, 8, generator=generator, requires_grad=True)
    w = torch.randn(8000, 8, generator=generator, requires_grad=True)
    labels = torch.randint(CLASSES, (8, 18), generator=generator)
    mask, advantages = torch.ones(8, 18), torch.randn(8, 1, generator=generator)
    old = torch.zeros(8, 18) - 9
    for function, options in (
        (policy_and_chosen, {}),
        (policy_and_next, {}),
        (two_policies, {}),
        (orpo_of_pairs, {"prefer_memory": True}),
    ):
        compiled = torch.compile(function, backend="compile_losses", options=options)

        def train(compiled=compiled):
            compiled(h, w, labels, mask, advantages, old).backward()

        train()
        assert largest_allocation(train) < 2 * 16 * 8000 * 4


def test_the_report():
    (site,) = sites_of(orpo, problem())
    assert "computes of each row: cross entropy, sum of the logits" in site.reason


# Near misses: what must stay as it is, or be right.


@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(function):
    inputs = problem()
    sites = check(function, inputs, tolerance=1e-12, inner_backend="eager")
    assert not any(site.status == "rewritten" for site in sites)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", [drawn, drawn_by_probabilities, without_an_order])
def test_what_is_not_computed_earlier(function):
    inputs = problem()
    assert sites_of(function, inputs) == []
    report = compile_losses.explain(function, *inputs)
    reasons = [site.reason for site in report.losses]
    assert any("is used before all of it is known" in reason for reason in reasons), reasons


def test_labels_are_computed_earlier():
    """Those of the second loss, which has its place behind uses of the first."""
    for function in (policy_and_chosen, orpo_of_two_forwards):
        (site,) = sites_of(function, problem())
        assert site.status == "rewritten"


SETS = (
    lambda labels: labels,
    other,
    lambda labels: labels.flip(0),
    lambda labels: other(labels).flip(1),
)
SOME = (
    lambda x: x,
    lambda x: x[:CHOSEN],
    lambda x: x[1:],
    lambda x: x[:, :-1],
    lambda x: x[::2, 3:],
    lambda x: x.transpose(0, 1),
)
UNARY = (torch.exp, torch.tanh, torch.square, torch.neg, lambda x: x.clamp(-3, 2), F.softplus)


def drawn_reader(generator):
    """A function of some rows of logits and labels, whose result is one number."""
    classes, some, unary = map(generator.choice, (SETS, SOME, UNARY))
    kind = generator.choice(["mean", "sum", "none", "gather", "several", "smoothed"])
    options = {"ignore_index": generator.choice([-100, -100, 3])}
    factor = generator.uniform(0.1, 1)

    def read(logits, labels, mask):
        found = some(classes(labels))
        if options["ignore_index"] == 3:
            found = found.clamp(min=0)
        rows, mask = some(logits), some(mask)
        if kind == "gather":
            picked = rows.log_softmax(-1).gather(-1, found.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return factor * (unary(picked) * mask).mean()
        if kind == "several":
            index = torch.stack([found, found.flip(0)], -1).clamp(min=0)
            picked = rows.log_softmax(-1).gather(-1, index)
            return factor * (unary(picked).sum(-1) * mask).mean()
        rows, found, mask = rows.flatten(0, 1), found.flatten(), mask.flatten()
        if kind == "none":
            each = F.cross_entropy(rows, found, reduction="none", **options)
            return factor * (unary(each) * mask).sum() / mask.sum()
        if kind == "smoothed":
            return factor * F.cross_entropy(rows, found, label_smoothing=0.1, **options)
        return 1e-2 * factor * F.cross_entropy(rows, found, reduction=kind, **options)

    return read


@pytest.mark.sampled(12)
@pytest.mark.parametrize("options", [{}, {"prefer_memory": True}], ids=str)
@pytest.mark.parametrize("seed", range(16))
def test_drawn_functions(seed, options):
    generator = random.Random(seed)
    readers = [drawn_reader(generator) for _ in range(generator.randint(2, 5))]

    def step(h, w, labels, mask, advantages, old):
        logits = F.linear(h, w)
        whole = cross_entropy(logits, labels)
        return whole + sum(read(logits, labels, mask) for read in readers)

    inputs = problem(frozen=seed % 4 == 3)
    (site,) = check(step, inputs, **options)
    assert site.status == "rewritten"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", LABELS_MADE_TWICE, ids=lambda f: f.__name__)
def test_equal_labels_of_two_nodes(function):
    """The second node comes after the place of the call, which reads the first alone."""

    def step(h, w, labels, mask, advantages, old):
        return function(F.linear(h, w), labels, mask)

    (site,) = check(step, problem(), tolerance=1e-12)
    assert site.plan[0] == IN_THE_FORWARD


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", LABELS_MADE_TWICE, ids=lambda f: f.__name__)
def test_equal_labels_of_two_nodes_over_held_logits(function):
    """Something needs the logits, or they are given: what is read of their rows is one call."""

    def step(h, w, labels, mask, advantages, old):
        logits = F.linear(h, w)
        return function(logits, labels, mask) + entropy_of(logits).mean(), logits.detach()

    def of_given(logits, labels, mask):
        return function(logits, labels, mask) + entropy_of(logits).mean()

    inputs = problem()
    assert not check(step, inputs, tolerance=1e-12)
    logits = F.linear(*inputs[:2]).detach().requires_grad_()
    check(of_given, (logits, *inputs[2:4]), tolerance=1e-12)
