"""verify: matches that are wrong are refused, those that can't be tried are said to be so."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses.recognize import rewrite
from compile_losses.recognize.small_sizes import Sizes
from tests.results import spellings
from tests.specs import SPECS


def report_of(function, inputs, *, dynamic=False, change=lambda match: None, verify=True):
    """The report on a function, with every match changed before it is verified."""
    reports = []
    module = sys.modules["compile_losses.recognize.rewriting"]
    original = module.refusal

    def refusal(match):
        change(match)
        return original(match)

    def backend(gm, example_inputs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "refusal", refusal)
            reports.append(rewrite(gm, verify=verify).meta["compile_losses"])
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    (report,) = reports
    return report


def replaced(place, value):
    def change(match):
        args = list(match.args)
        args[place] = value
        match.args = tuple(args)

    return change


def classes():
    return torch.randn(6, 10, requires_grad=True), torch.randint(10, (6,))


def pair():
    return torch.randn(6, 10, requires_grad=True), torch.randn(6, 10)


WRONG = [
    ("another reduction", lambda a, b: ((a - b) ** 2).mean(), pair, replaced(2, 2)),
    ("another beta", lambda a, b: F.smooth_l1_loss(a, b, beta=0.5), pair, replaced(3, 0.51)),
    ("smoothing", lambda x, t: F.cross_entropy(x, t), classes, replaced(5, 1e-3)),
    (
        "nothing ignored",
        lambda x, t: F.cross_entropy(x, t, ignore_index=3),
        classes,
        replaced(4, -(2**62)),
    ),
    (
        "another mixture",
        SPECS["softmax_js_div"].matches[0].function,
        pair,
        lambda match: match.kwargs.update(beta=0.11),
    ),
    (
        "a far threshold",
        lambda a, b: F.huber_loss(a, b, delta=1e4),
        pair,
        lambda match: (setattr(match, "op", "mse_loss"), setattr(match, "args", match.args[:3])),
    ),
]


@pytest.mark.parametrize(("name", "function", "inputs", "change"), WRONG, ids=[w[0] for w in WRONG])
def test_wrong_matches_are_refused(name, function, inputs, change):
    (right,) = report_of(function, inputs()).sites
    assert (right.status, right.reason) == ("rewritten", "")
    (wrong,) = report_of(function, inputs(), change=change).sites
    assert wrong.status == "declined"
    assert "verification" in wrong.reason
    (unverified,) = report_of(function, inputs(), change=change, verify=False).sites
    assert unverified.status == "rewritten"


def test_gradients_are_compared():
    """A detached factor has the loss of a weight, and another gradient."""

    def weighted(a, b):
        return (a.abs() * (a - b) ** 2).mean()

    def change(match):
        match.kwargs.pop("weight", None)

    (site,) = report_of(weighted, pair(), change=change).losses
    assert "verification" in site.reason


def test_large_and_symbolic_sizes():
    def loss(x, t):
        return F.cross_entropy(x.view(-1, x.size(-1)), t.view(-1), reduction="sum") / t.numel()

    inputs = (torch.randn(64, 32, 1000), torch.randint(1000, (64, 32)))
    for dynamic in (False, True):
        (site,) = report_of(loss, inputs, dynamic=dynamic).losses
        assert (site.status, site.reason) == ("rewritten", "")


def test_sizes_that_are_replaced():
    sizes = Sizes([torch.empty(4, 1000, 50_000, device="meta")])
    assert [sizes.of(n) for n in (4, 1000, 50_000)] == [4, 13, 17]
    assert sizes.of(50_000_000) == 13 * 17
    assert sizes.of(50_000.0) == 17.0
    assert sizes.of(0.5) == 0.5
    assert not Sizes([torch.empty(6, 10)]).smaller


def test_what_cannot_be_evaluated_is_rewritten_and_said(monkeypatch):
    module = sys.modules["compile_losses.recognize.verify"]

    def original(self, values):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(module._Comparison, "_original", original)
    (site,) = report_of(lambda a, b: ((a - b) ** 2).mean(), pair()).losses
    assert (site.status, site.reason) == ("rewritten", "not verified: no kernel")


def test_option_and_environment(monkeypatch):
    """The backend and enable() verify; random numbers outside are not touched."""
    module = sys.modules["compile_losses.recognize.rewriting"]
    monkeypatch.delenv("COMPILE_LOSSES_VERIFY", raising=False)
    calls = []
    original = module.compare
    monkeypatch.setattr(module, "compare", lambda match: calls.append(1) or original(match))
    inputs = pair()

    def compiled(**options):
        torch._dynamo.reset()
        inner = {"inner_backend": "aot_eager", **options}
        torch.manual_seed(3)
        torch.compile(F.mse_loss, backend="compile_losses", options=inner)(*inputs)
        return len(calls), float(torch.rand(()))

    assert compiled()[0] == 0
    assert compiled(verify=True)[0] == 1
    monkeypatch.setenv("COMPILE_LOSSES_VERIFY", "1")
    count, drawn = compiled()
    assert count == 2
    assert compiled(verify=False) == (2, drawn)
    torch._dynamo.reset()
    with compile_losses.enable(), torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(F.mse_loss)(*inputs)
    assert len(calls) == 3


@pytest.mark.sampled(3)
@spellings([(s.name, m) for s in SPECS.values() for m in s.matches[::4]])
def test_spellings_are_verified(name, spelling):
    """A sample of the spellings passes, and without a remark that it could not be tried."""
    for dynamic in (False, True):
        for site in report_of(spelling.function, spelling.inputs(), dynamic=dynamic).sites:
            assert "verif" not in site.reason, site
