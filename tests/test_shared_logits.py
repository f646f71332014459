"""Logits of a head that several losses and metrics read, under torch.compile: no logits."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import compile_losses
from compile_losses.report.explanation import explain_call
from compile_losses.sites import shorten
from tests.corpus.rows import CLASSES, problem
from tests.corpus.shared import (
    BY_ROW,
    NEAR_MISSES,
    another_temperature,
    entropy_of,
    grpo_with_logged_entropy,
    likelihoods_of_some_rows,
    logits_of,
    of_other_rows,
    of_scaled_hidden,
    ppo_with_entropy,
    token_accuracy,
    with_z_loss,
)
from tests.graphs import Compiled
from tests.heads import (
    AGAIN,
    IN_THE_FORWARD,
    LOGITS,
    SCALED,
    check,
    check_accuracy,
    outcome,
    sites_of,
)
from tests.linear_problems import largest_allocation

pytestmark = pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BY_ROW)
def test_gradients_in_the_forward(name):
    inputs = problem()
    (site,) = check(BY_ROW[name], inputs, verify=True)
    assert site.plan[0] == IN_THE_FORWARD
    assert site.reason.startswith("absorbed a linear layer")
    assert "not verified" not in site.notes


@pytest.mark.parametrize("name", ["grpo_in_loops", "two_cross_entropies", "token_accuracy"])
def test_explain_tells_of_the_compiled_step(name):
    inputs = problem()

    def told(sites):
        return [(s.op, s.status, s.reason, s.plan, s.details, s.notes) for s in sites]

    assert told(check(BY_ROW[name], inputs)) == told(sites_of(BY_ROW[name], inputs))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BY_ROW)
def test_frozen_heads(name):
    inputs = problem(frozen=True)
    (site,) = check(BY_ROW[name], inputs)
    assert site.plan[0] in (IN_THE_FORWARD, SCALED)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["ppo_with_entropy", "token_accuracy", "with_z_loss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accuracy(name, dtype):
    check_accuracy(BY_ROW[name], problem(dtype))


def test_without_gradients():
    """A metric beside a loss in evaluation."""
    inputs = [t.detach() for t in problem()]
    expected = token_accuracy(*inputs)
    compiled = torch.compile(token_accuracy, backend="compile_losses")
    torch.testing.assert_close(compiled(*inputs), expected)
    (site,) = sites_of(token_accuracy, inputs)
    assert site.plan[0] == "kernel"


@pytest.mark.parametrize("function", [of_other_rows, likelihoods_of_some_rows])
@pytest.mark.parametrize(("options", "plan"), [({}, LOGITS), ({"prefer_memory": True}, AGAIN)])
def test_gradients_of_other_rows(options, plan, function):
    inputs = problem()
    (site,) = check(function, inputs, **options)
    assert site.plan[0] == plan


def test_gradients_from_outside():
    """Several results that are differentiated together."""
    h, w, labels, *_ = problem()

    def step(h, w):
        logits = logits_of(h, w)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each, entropy_of(logits), torch.logsumexp(logits, -1)

    compiled = torch.compile(step, backend="compile_losses")
    results = [function(h, w) for function in (compiled, step)]
    gradients = [torch.autograd.grad([r.cos().sum() for r in result], (h, w)) for result in results]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)


def test_in_a_checkpoint():
    def step(h, w, *rest):
        return checkpoint(with_z_loss, h, w, *rest, use_reentrant=False)

    check(step, problem())


def test_two_symbols():
    """Of a batch and a length that are both symbols."""
    compiled = torch.compile(ppo_with_entropy, backend="compile_losses", dynamic=True)
    for tokens in (18, 25):
        inputs = problem(tokens=tokens)
        torch.testing.assert_close(outcome(compiled, inputs), outcome(ppo_with_entropy, inputs))


def test_no_logits_are_held():
    """Of 8000 classes a chunk of 16 rows at a time, where the logits of all are 144 rows."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(8, 18, 8, generator=generator, requires_grad=True)
    w = torch.randn(8000, 8, generator=generator, requires_grad=True)
    labels = torch.randint(8000, (8, 18), generator=generator)
    mask, advantages = torch.ones(8, 18), torch.randn(8, 1, generator=generator)
    old = torch.zeros(8, 18) - 9
    for function in (ppo_with_entropy, grpo_with_logged_entropy):
        compiled = torch.compile(function, backend="compile_losses")

        def train(compiled=compiled):
            result = compiled(h, w, labels, mask, advantages, old)
            (result[0] if isinstance(result, tuple) else result).backward()

        train()
        assert largest_allocation(train) < 2 * 16 * 8000 * 4


def test_returned_lazily():
    inputs = problem()

    def step(h, w, labels, *rest):
        logits = logits_of(h, w)
        loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
        with torch.no_grad():
            hits = (logits.argmax(-1) == labels).sum()
        return loss, hits, logits

    compiled = torch.compile(step, backend="compile_losses", options={"lazy_logits": True})
    loss, hits, logits = compiled(*inputs)
    assert type(logits) is not torch.Tensor
    expected = step(*inputs)
    torch.testing.assert_close((loss, hits, logits + 0), expected)
    (site,) = explain_call(step, inputs, options={"lazy_logits": False}).losses
    assert "its logits are returned" in site.reason


# Near misses: what must stay as it is, or be right.


@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(function):
    inputs = problem()
    assert check(function, inputs, inner_backend="eager") == []


def test_a_scaled_layer():
    """A number for all logits that is known only when the step runs is a shift, too."""
    check(of_scaled_hidden, problem())


def test_reasons():
    report = compile_losses.explain(another_temperature, *problem())
    reasons = {site.reason for site in report.losses}
    assert any("reads other rows than the rest, or scales" in reason for reason in reasons)


def test_without_the_op_that_heads_need(monkeypatch):
    """Who leaves out heads leaves out these as well."""
    options = {"losses": ["cross_entropy"]}
    assert sites_of(token_accuracy, problem(), **options) == []


#: Of the statistics of each row.
STATISTICS = {
    "log-probability": lambda logits, labels: (
        -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
            labels.shape
        )
    ),
    "entropy": lambda logits, labels: entropy_of(logits),
    "logsumexp": lambda logits, labels: torch.logsumexp(logits, -1),
    "sum": lambda logits, labels: F.log_softmax(logits, -1).sum(-1),
    "argmax": lambda logits, labels: (logits.argmax(-1) == labels).to(logits.dtype),
    "maximum": lambda logits, labels: logits.detach().amax(-1),
}
UNARY = (torch.exp, torch.tanh, torch.square, torch.neg, lambda x: x.clamp(-3, 2), F.softplus)
BINARY = (torch.add, torch.mul, torch.minimum, torch.sub, lambda a, b: torch.where(a > b, a, b))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_drawn_functions(seed):
    """Of two to four statistics, by row or across rows."""
    draw = random.Random(seed)
    names = draw.sample(list(STATISTICS), draw.randint(2, 4))
    if not {"log-probability", "entropy", "logsumexp", "sum"} & set(names):
        names.append("entropy")
    unary = [draw.choice(UNARY) for _ in names]
    binary = [draw.choice(BINARY) for _ in names]
    across = draw.random() < 0.3

    def step(h, w, labels, mask, advantages, old):
        logits, labels = logits_of(h, w), labels.clamp(min=0)
        total = old
        for name, one, two in zip(names, unary, binary, strict=True):
            statistic = one(STATISTICS[name](logits, labels) / 8)
            if across:
                statistic = statistic - statistic.mean()
            total = two(total, statistic)
        return (total * mask).sum() / mask.sum() + 0.1 * entropy_of(logits).mean()

    inputs = problem()
    assert len(check(step, inputs)) == 1


@pytest.mark.parametrize(
    ("reader", "why"), [("median", "needs the logits"), ("std", "has a gradient")]
)
def test_each_reason_once(reader, why):
    """Readers of logits that stay: the reason says who needs them, with the line, and once."""

    def step(h, w, labels, *_):
        logits = logits_of(h, w)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        second = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten())
        return loss + second + entropy_of(logits).mean(), getattr(logits, reader)()

    compiled, inputs = Compiled(step), problem()
    torch.testing.assert_close(outcome(compiled, inputs), outcome(step, inputs))
    line = f"{reader} ({shorten(__file__)}:{step.__code__.co_firstlineno + 4}) {why}"
    losses = [site for site in compiled.sites if site.op == "cross_entropy"]
    assert len(losses) == 2
    for site in losses:
        clauses = site.reason.split("; ")
        assert len(set(clauses)) == len(clauses), site.reason
        assert site.reason.count(line) == 1, site.reason
