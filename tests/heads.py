"""Steps whose losses read the logits of a head, compared with torch's: helpers of many tests."""

from __future__ import annotations

import pytest
import torch

import compile_losses
from compile_losses.report.explanation import explain_call
from tests.accuracy import SIMILAR, assert_accurate, similar
from tests.constants import set_constants
from tests.graphs import Compiled

#: Plans.
IN_THE_FORWARD, SCALED = "gradient in forward by row", "gradient in forward, scaled by row"
LOGITS, AGAIN = "with its logits", "logits computed again"
#: Of heads whose logits several losses read.
OP = "linear_row_statistics"


def outcome(function, inputs, trained=None):
    """What a step returns, and its gradients.

    Args:
        trained: how many inputs, the first ones, have gradients that are looked at; by default all.
    """
    leaves = [t for t in inputs[:trained] if t.requires_grad]
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    return [*(r.detach() for r in results), *torch.autograd.grad(results[0], leaves)]


def sites_of(function, inputs, **options):
    report = explain_call(function, tuple(inputs), options=options)
    return [site for site in report.losses if site.op == OP]


def check(function, inputs, *, trained=None, tolerance=1e-11, **options):
    """Compares a compiled step with torch's; returns its sites of a head."""
    compiled = Compiled(function, **options)
    expected, found = (outcome(f, inputs, trained) for f in (function, compiled))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    return [site for site in compiled.sites if site.op == OP]


def check_accuracy(function, inputs, trained=None, like=None):
    """By the one accuracy rule, against float64.

    Args:
        like: the worst errors of torch's on inputs like these.
    """
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    wide = [t.detach().requires_grad_(i.requires_grad) for t, i in zip(wide, inputs, strict=True)]
    compiled = torch.compile(function, backend="compile_losses")
    ours, eager = (outcome(f, inputs, trained) for f in (compiled, function))
    found = zip(ours, eager, outcome(function, wide, trained), strict=True)
    for results, worst in zip(found, like or [0.0] * len(ours), strict=True):
        assert_accurate(*results, like=worst)


def errors_on_similar(function, inputs, outcome):
    """The worst error of torch's in each result, for numbers a few per cent away.

    Args:
        outcome: the results, of a function and its inputs.
    """
    generator, worst = torch.Generator().manual_seed(0), []
    for _ in range(SIMILAR):
        near = [similar(t.detach(), generator, t.dtype) for t in inputs]
        near = [n.requires_grad_(t.requires_grad) for n, t in zip(near, inputs, strict=True)]
        exact = [n.double() if n.is_floating_point() else n for n in near]
        exact = [
            e.detach().requires_grad_(n.requires_grad) for e, n in zip(exact, near, strict=True)
        ]
        results = zip(outcome(function, near), outcome(function, exact), strict=True)
        worst.append([(ours.double() - right).abs().max().item() for ours, right in results])
    return [max(errors) for errors in zip(*worst, strict=True)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of four rows, so that small logits are worth the op."""
    set_constants(monkeypatch, least_rows=4, logits_bytes=1)


def step(function, inputs):
    loss = function(*inputs)
    leaves = [t for t in inputs if t.requires_grad]
    if not loss.requires_grad:
        return (loss,)
    return loss, *torch.autograd.grad(loss.sum() * 3, leaves, allow_unused=True)


def compare(function, inputs, options=None, **tolerance):
    """Compares a compiled step with torch's; returns its sites."""
    # Nothing but recognition is to be tried.
    options = {"inner_backend": "eager"} if options is None else options
    compiled = Compiled(function, **options)
    torch.testing.assert_close(step(compiled, inputs), step(function, inputs), **tolerance)
    return compiled.sites


def only_site(function, inputs):
    (site,) = compile_losses.explain(function, *inputs).losses
    return site


def check_alone(function, reason, inputs, **tolerance):
    """The loss alone is fused; without a reason there is no layer that was seen."""
    (site,) = compare(function, inputs, **tolerance)
    assert (site.op, site.status) == ("cross_entropy", "rewritten"), site
    if reason is None:
        assert "without its linear layer" not in site.reason
    else:
        assert "without its linear layer: " in site.reason
        assert reason in site.reason, site.reason
