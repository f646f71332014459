"""verify: matches that are wrong are refused, those that can't be tried are said to be so."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses.recognize import rewrite
from compile_losses.recognize.graph.small_sizes import Sizes
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


@pytest.mark.sampled(2)
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


SATURATED = [
    ("cross_entropy", lambda x, t: F.cross_entropy(x, t, reduction="none")),
    ("nll_loss", lambda x, t: F.nll_loss(x.log_softmax(1), t)),
    ("logsumexp", lambda x, t: (x.logsumexp(1, keepdim=True) - x.gather(1, t[:, None])).mean()),
    ("temperature", lambda x, t: F.cross_entropy(x * 100, t, reduction="sum")),
]


@pytest.fixture(params=[1e-6, 3e-10, 1e-12])
def saturated(request, monkeypatch):
    """Numbers of which the first of each row has a softmax that lies so far below one."""
    module = sys.modules["compile_losses.recognize.verify"]

    def draw(shape, generator):
        numbers = torch.rand(shape, generator=generator, dtype=torch.float64)
        numbers[..., 0] = 30 * numbers[..., 0] + 1
        numbers[..., 1:] += numbers[..., :1] + math.log(request.param)
        return numbers / scale

    def zeros(self, node, shape):
        return torch.zeros(shape, dtype=torch.int64)

    scale = 1.0
    monkeypatch.setattr(module, "_draws", lambda nodes: [("saturated softmaxes", draw)])
    monkeypatch.setattr(module._Comparison, "_classes", zeros)

    def report(function, **options):
        nonlocal scale
        scale = 100.0 if function is SATURATED[-1][1] else 1.0
        return report_of(function, classes(), **options).sites[0].reason

    return report


def another_gradient(result):
    return result * 1.01 - result.detach() * 0.01


def another_value(result):
    return result + result.detach() * 0.01


def infinite(result):
    return result / torch.zeros_like(result)


def not_a_number(result):
    return result + torch.zeros_like(result).log() * 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "function"), SATURATED, ids=[name for name, _ in SATURATED])
def test_what_rounding_leaves_of_large_numbers_is_no_difference(name, function, saturated):
    """The original has 1 - p where the rewritten loss has log(1 + q), or the other way round."""
    assert saturated(function) == ""


@pytest.mark.parametrize("step", [another_gradient, another_value, infinite, not_a_number])
def test_small_numbers_are_compared(step, saturated):
    """One per cent of a gradient of 1e-10 is more than rounding."""
    reason = saturated(SATURATED[0][1], change=lambda match: match.steps.append((step, ())))
    assert "differ from torch's on saturated softmaxes" in reason


def test_nan_and_infinity_are_not_compared():
    """Torch's own are no numbers to compare with; other draws are."""

    def logarithms(x, t):
        return F.nll_loss(x.softmax(1).log(), t)

    (site,) = report_of(logarithms, classes()).sites
    assert (site.status, site.reason) == ("rewritten", "")


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


@pytest.mark.sampled(6)
@spellings([(s.name, m) for s in SPECS.values() for m in s.matches[::4]])
def test_spellings_are_verified(name, spelling):
    """A sample of the spellings passes, and without a remark that it could not be tried."""
    for dynamic in (False, True):
        for site in report_of(spelling.function, spelling.inputs(), dynamic=dynamic).sites:
            assert "verif" not in site.reason, site
