"""Spellings that must match, near misses that must not, and graphs before and after."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import compile_losses
from compile_losses import recognize
from compile_losses.recognize import rewriting
from compile_losses.recognize.guards import GUARDS
from compile_losses.recognize.spellings.written_out import Recognizer
from tests import patterns
from tests.graphs import Compiled
from tests.results import compile_with, run, spellings
from tests.specs import SPECS
from tests.specs.written.cross_entropy import OTHER_LIKELIHOODS

MATCHES = [(s.public or s.name, m) for s in SPECS.values() for m in s.matches]
NEAR_MISSES = [(s.public or s.name, m) for s in SPECS.values() for m in s.near_misses]


#: A backend: aot_eager, which keeps what the rewritten graph calls.
CALLS = "calls_then_aot_eager"
CALLED = []


@torch._dynamo.register_backend(name=CALLS)
def calls_then_aot_eager(gm, example_inputs):
    # Torch 2.11 traces some functions of a float twice; the last graph counts.
    CALLED[:] = [node.target for node in gm.graph.nodes]
    return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)


@pytest.mark.sampled(10)
@spellings(MATCHES)
def test_match(name, spelling):
    """One site, rewritten to this op; under three inner backends torch's loss and gradients."""
    inputs = spelling.inputs()
    for inner, dynamic in (("eager", False), ("aot_eager", False), (CALLS, True)):
        CALLED.clear()
        sites = check_result(spelling, inputs, inner, dynamic)
        if not dynamic:
            assert [(s.op, s.status) for s in sites] == [(name, "rewritten")], sites
            if sites[0].line == 0:  # no line of the function's own; explain finds its definition
                sites = compile_losses.explain(spelling.function, *inputs).losses
            assert sites[0].file.endswith(".py")
            assert sites[0].line > 0
    rewritten = sum(str(target).startswith("fused.") for target in CALLED)
    assert rewritten == (1 if spelling.dynamic else 0)


@pytest.mark.usefixtures("kernels_for_small_losses")
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@spellings(MATCHES)
def test_match_inductor(name, spelling, dynamic):
    check_result(spelling, spelling.inputs(), "inductor", dynamic)


def check_result(spelling, inputs, inner, dynamic):
    compiled = Compiled(spelling.function, fullgraph=True, dynamic=dynamic, inner_backend=inner)
    actual = run(compiled, inputs)
    narrow = any(t.dtype == torch.bfloat16 for t in inputs if isinstance(t, torch.Tensor))
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if narrow else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(actual, run(spelling.function, inputs), **tolerance)
    return compiled.sites


def test_collection():
    """Enough spellings, of which nearly all are rewritten with symbolic sizes, too."""
    assert len(MATCHES) >= 100
    assert len(NEAR_MISSES) >= 60
    assert sum(spelling.dynamic for _, spelling in MATCHES) >= 0.95 * len(MATCHES)
    for spec in SPECS.values():
        files = [getattr(m.function, "__module__", "") for m in spec.matches]
        named = list(zip(files, (m.name for m in spec.matches), strict=True))
        assert len(named) == len(set(named)), f"two spellings of {spec.name} have one name"


@pytest.mark.sampled(4)
@spellings(NEAR_MISSES)
def test_near_miss(name, spelling):
    """Nothing is rewritten, a reason is given where the loss was seen, and results are torch's."""
    inputs = spelling.inputs()
    compiled = Compiled(spelling.function, fullgraph=True, dynamic=False, inner_backend="aot_eager")
    actual = run(compiled, inputs)
    torch.testing.assert_close(actual, run(spelling.function, inputs), equal_nan=True)
    assert [s for s in compiled.sites if s.status != "declined"] == []
    if spelling.reason:
        assert any(spelling.reason in s.reason for s in compiled.sites), compiled.sites
    else:
        assert compiled.sites == []


@pytest.mark.parametrize("spelling", OTHER_LIKELIHOODS, ids=lambda spelling: spelling.name)
def test_other_likelihoods(spelling):
    inputs = spelling.inputs()
    report = compile_losses.explain(spelling.function, *inputs)
    assert [site.op for site in report.sites] == ["nll_loss"]
    check_result(spelling, inputs, "aot_eager", False)


def captured(function, *inputs):
    """The graph that Dynamo captures, and the same graph rewritten."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm.print_readable(print_output=False))
        graphs.append(compile_losses.rewrite(gm).print_readable(print_output=False))
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return [
        "\n".join(
            re.sub(r";  .*= None$", "", line.rstrip())  # when a value is last used
            for line in graph.splitlines()
            if "#" not in line and line.strip()
        )
        for graph in graphs
    ]


def test_snapshot_hand_written():
    def loss(predictions, targets):
        difference = predictions - targets
        return (difference**2).mean(), difference

    before, after = captured(loss, torch.rand(3, 4), torch.rand(3, 4))
    assert "pow" in before
    assert_expected_inline(
        after,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_predictions_: "f32[3, 4]", L_targets_: "f32[3, 4]"):
        l_predictions_ = L_predictions_
        l_targets_ = L_targets_
        difference: "f32[3, 4]" = l_predictions_ - l_targets_
        mse_loss_default: "f32[]" = torch.ops.fused.mse_loss.default(l_predictions_, l_targets_, 1)
        return (mse_loss_default, difference)""",
    )


def test_snapshot_absorbed():
    def loss(predictions, targets):
        return F.kl_div(torch.log(predictions.float()), targets, reduction="batchmean")

    _, after = captured(loss, torch.rand(3, 4).bfloat16(), torch.rand(3, 4))
    assert_expected_inline(
        after,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_predictions_: "bf16[3, 4]", L_targets_: "f32[3, 4]"):
        l_predictions_ = L_predictions_
        l_targets_ = L_targets_
        kl_div_default: "f32[]" = torch.ops.fused.kl_div.default(l_predictions_, l_targets_, 3, log_input = False, dtype = torch.float32)
        return (kl_div_default,)""",
    )


def test_snapshot_module():
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(logits, labels):
        return criterion(logits.view(-1, 4), labels.view(-1))

    _, after = captured(loss, torch.rand(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
    assert_expected_inline(
        after,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_logits_: "f32[2, 3, 4]", L_labels_: "i64[2, 3]"):
        l_logits_ = L_logits_
        l_labels_ = L_labels_
        view: "f32[6, 4]" = l_logits_.view(-1, 4)
        view_1: "i64[6]" = l_labels_.view(-1)
        cross_entropy_default: "f32[]" = torch.ops.fused.cross_entropy.default(view, view_1, None, 1, -100, 0.1)
        return (cross_entropy_default,)""",
    )


def test_several_losses_in_one_graph():
    def step(a, b, logits, classes):
        difference = a - b
        first = (difference * difference).sum() / difference.numel()
        second = F.cross_entropy(logits, classes)
        return first + 0.5 * second + F.smooth_l1_loss(a, b) + F.l1_loss(a, b)

    inputs = (
        torch.rand(3, 4, requires_grad=True),
        torch.rand(3, 4),
        torch.rand(5, 7, requires_grad=True),
        torch.randint(7, (5,)),
    )
    report = compile_losses.explain(step, *inputs)
    assert [(s.op, s.status) for s in report.sites] == [
        ("mse_loss", "rewritten"),
        ("cross_entropy", "rewritten"),
        ("smooth_l1_loss", "rewritten"),
        ("l1_loss", "rewritten"),
    ]
    torch.testing.assert_close(
        run(compile_with(step, "aot_eager", None), inputs), run(step, inputs)
    )


def test_the_same_tensor_computed_twice():
    """Either loss reads what is there ahead of it."""

    def step(x, t):
        first = -x.t().log_softmax(1).gather(1, t[:, None]).mean()
        second = -x.t().log_softmax(1).gather(1, t[:, None]).sum()
        return first + second

    inputs = (torch.rand(10, 6, requires_grad=True), torch.randint(10, (6,)))
    report = compile_losses.explain(step, *inputs)
    assert [site.status for site in report.sites] == ["rewritten", "rewritten"]
    torch.testing.assert_close(
        run(compile_with(step, "aot_eager", False), inputs), run(step, inputs)
    )


def test_symbolic_sizes_are_compared_as_symbols():
    """Under dynamic shapes only the right count makes a mean."""

    def right(a, b):
        return ((a - b) ** 2).sum() / (a.shape[0] * a.shape[1])

    def wrong(a, b):
        return ((a - b) ** 2).sum() / (a.shape[0] + a.shape[1])

    for function, reduction in ((right, 1), (wrong, 2)):
        arguments = []

        def backend(gm, example_inputs, arguments=arguments):
            compile_losses.rewrite(gm)
            arguments += [
                n.args[2] for n in gm.graph.nodes if n.target is torch.ops.fused.mse_loss.default
            ]
            return gm.forward

        compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
        for shape in ((3, 4), (5, 6), (2, 2)):
            a, b = torch.rand(shape), torch.rand(shape)
            torch.testing.assert_close(compiled(a, b), function(a, b))
        assert set(arguments) == {reduction}


def test_guards_are_documented():
    """A guard is a function of a match that returns its reason; each has a name that says what."""
    assert len(GUARDS) == len({guard.__name__ for guard in GUARDS})
    for guard in GUARDS:
        assert list(inspect.signature(guard).parameters) == ["match"]


def test_patterns_page_is_current():
    """docs/patterns.md is generated: python -m tests.patterns."""
    assert patterns.PATH.read_text() == patterns.page()


def test_work_on_a_large_graph(monkeypatch):
    """Recognition replays few of the nodes of a large graph: benchmarks/recognition.py times it."""

    def model(x, target):
        for _ in range(200):
            normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            scores = (normal @ normal.transpose(-1, -2)).softmax(-1)
            x = x + F.silu(scores @ normal)
        return F.cross_entropy(x.view(-1, 8), target) + (x - 1).abs().mean()

    recognizers, sizes = [], []

    def recorded(graph):
        recognizers.append(Recognizer(graph))
        sizes.append(len(graph.nodes))
        return recognizers[-1]

    monkeypatch.setattr(rewriting, "Recognizer", recorded)
    torch.compile(model, backend=lambda gm, _: recognize.rewrite(gm).forward, fullgraph=True)(
        torch.randn(2, 4, 8), torch.randint(8, (8,))
    )
    assert sizes[0] > 2000
    assert sum(recognizer.replay.replayed for recognizer in recognizers) < 100
