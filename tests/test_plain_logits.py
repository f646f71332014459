"""Entropies, and what else is read of the rows of logits that are held anyway: one call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from tests.accuracy import assert_accurate
from tests.constants import set_constants
from tests.corpus.plain import (
    BATCH,
    CLASSES,
    LEFT,
    OTHERS,
    TAKEN,
    TOKENS,
    entropy_alone,
    of_a_few_tokens,
    of_a_temperature,
    of_float32,
    problem,
    used_otherwise,
    without_loops,
)
from tests.corpus.shared import entropy_of
from tests.graphs import Compiled

OP = "row_statistics"

pytestmark = pytest.mark.usefixtures("no_code", "kernels_for_small_losses")


def outcome(function, *inputs):
    found = function(*inputs)
    loss, *others = found if isinstance(found, tuple) else (found,)
    leaves = [i for i in inputs if i.requires_grad]
    gradients = torch.autograd.grad(loss, leaves) if loss.requires_grad else []
    return [each.detach() for each in (loss, *others, *gradients)]


def check(function, inputs, **options):
    """Compares a compiled function with torch's; returns its sites by their ops."""
    compiled = Compiled(function, **options)
    ours, torchs = outcome(compiled, *inputs), outcome(function, *inputs)
    torch.testing.assert_close(ours, torchs, rtol=1e-9, atol=1e-11)
    return {site.op: site for site in compiled.sites}


def sites_of(function, inputs):
    return {s.op: s for s in compile_losses.explain(function, *inputs).losses}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TAKEN)
def test_one_call(name):
    inputs = problem()
    site = check(TAKEN[name], inputs, verify=True)[OP]
    assert site.status == "rewritten"
    assert site.plan[0] == "kernel"
    assert "not verified" not in site.notes


@pytest.mark.parametrize("name", LEFT)
def test_near_misses(name):
    inputs = problem()
    assert OP not in check(LEFT[name], inputs, inner_backend="eager")


@pytest.mark.parametrize("name", OTHERS)
def test_same_numbers(name):
    check(OTHERS[name], problem())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["in_loops", "without_loops", "regularised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", [False, True])
def test_accuracy(name, dtype, cast):
    def function(x, t):
        return TAKEN[name](x.float() if cast and x.dtype != torch.float64 else x, t)

    x, t = problem(dtype)
    compiled = torch.compile(function, backend="compile_losses")
    exact = outcome(function, x.detach().double().requires_grad_(), t)
    for ours, torchs, result in zip(
        outcome(compiled, x, t), outcome(function, x, t), exact, strict=True
    ):
        assert_accurate(ours, torchs, result)
    site = sites_of(function, (x, t))[OP]
    assert ("a cast from bfloat16" in site.reason) == (cast and dtype == torch.bfloat16)


def test_of_a_layer_whose_output_is_returned():
    def function(h, w, t):
        logits = F.linear(h, w)
        return without_loops(logits, t), logits

    h, w = (torch.randn(*s, 8, dtype=torch.float64) for s in ((BATCH, TOKENS), (CLASSES,)))
    inputs = h.requires_grad_(), w.requires_grad_(), torch.randint(CLASSES, (BATCH, TOKENS))
    assert OP not in check(function, inputs)
    with torch.no_grad():
        assert OP in check(function, inputs)


def test_the_gradient_lies_over_logits_that_nothing_else_needs():
    """As torch's own ops write it, where a layer is too small to be taken with its readers."""

    def function(h, w, t):
        return without_loops(F.linear(h, w), t)

    h, w = (torch.randn(*s, 8, dtype=torch.float64) for s in ((BATCH, TOKENS), (CLASSES,)))
    inputs = h.requires_grad_(), w.requires_grad_(), torch.randint(CLASSES, (BATCH, TOKENS))
    assert check(function, inputs)[OP].plan == ("kernel", "gradient in place")


@pytest.mark.parametrize("function", [entropy_alone, without_loops, of_float32])
def test_symbolic_sizes(function):
    """As verl compiles its entropy: no size is known."""
    compile_losses.counters().clear()
    compiled = torch.compile(function, backend="compile_losses", dynamic=True)
    for tokens in (TOKENS, TOKENS + 3):
        x = torch.randn(BATCH, tokens, CLASSES, dtype=torch.float64, requires_grad=True)
        t = torch.randint(CLASSES, (BATCH, tokens))
        torch.testing.assert_close(outcome(compiled, x, t), outcome(function, x, t))
    assert compile_losses.counters()["rewritten"][OP]


def test_symbolic_rows_are_taken():
    def function(x):
        return entropy_of(x).square().mean()

    x = torch.randn(24, CLASSES, dtype=torch.float64, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    assert OP in sites_of(function, (x,))


def test_inference():
    x, t = problem()
    with torch.no_grad():
        check(without_loops, (x, t))


def test_rows_that_do_not_lie_evenly():
    x = torch.randn(BATCH, TOKENS + 1, CLASSES, dtype=torch.float64)[:, :-1].requires_grad_()
    t = torch.randint(CLASSES, (BATCH, TOKENS))
    sites = check(without_loops, (x, t))
    assert OP not in sites
    assert "read apart: the logits would have to be copied" in sites["cross_entropy"].reason


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (of_a_temperature, "the logits are scaled"),
        (of_a_few_tokens, "only some of the rows"),
        (used_otherwise, "the logits have a gradient from"),
    ],
)
def test_reasons(function, reason):
    site = sites_of(function, problem())["cross_entropy"]
    assert "the entropy of its logits is read apart: " in site.reason
    assert reason in site.reason


@pytest.mark.parametrize(
    ("constants", "reason"),
    [
        ({"statistics_classes": CLASSES + 1}, f"of {CLASSES} classes all is read in one loop"),
        ({"statistics_bytes": 1 << 20}, "the logits are few"),
    ],
)
def test_few_logits(constants, reason, monkeypatch):
    set_constants(monkeypatch, **constants)
    sites = sites_of(without_loops, problem())
    assert OP not in sites
    assert reason in sites["cross_entropy"].reason


#: torch takes 0 and -1 as dimensions of a number, too.
READERS_OF_A_NUMBER = {
    "sum": lambda x: x.log_softmax(0).sum(0),
    "mean": lambda x: x.log_softmax(-1).mean(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "max": lambda x: x.max(-1)[0],
    "argmax": lambda x: x.argmax(0) + x,
    "amax": lambda x: x.amax(0),
    "gather": lambda x: x.log_softmax(0).gather(0, torch.tensor(0)),
    "entropy": entropy_of,
    "expected logit": lambda x: (x.softmax(0) * x).sum(0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("of_a_layer", [False, True])
@pytest.mark.parametrize("name", READERS_OF_A_NUMBER)
def test_numbers_have_no_classes(name, of_a_layer):
    def function(*inputs):
        return READERS_OF_A_NUMBER[name](F.linear(*inputs) if of_a_layer else inputs[0])

    shapes = [(5,), (5,)] if of_a_layer else [()]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert check(function, inputs) == {}


def test_switched_off(monkeypatch):
    monkeypatch.setenv("COMPILE_LOSSES_EXCEPT", "cross_entropy")
    assert OP not in sites_of(without_loops, problem())
