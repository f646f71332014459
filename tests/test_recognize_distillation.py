"""From the linear layers of student and teacher and the divergence of their outputs to one op, and
when not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import compile_losses
from compile_losses.device_constants import constants_of
from compile_losses.report.explanation import explain_call
from tests.accuracy import assert_accurate
from tests.constants import set_constants
from tests.corpus.divergences import (
    BOTH,
    CLASSES,
    DIVERGENCE_ALONE,
    HIDDEN,
    JS,
    KL,
    MATCHES,
    OF_TEACHER,
    ROWS,
    STUDENT,
    detached_student,
    gkd,
    problem,
    question_answering,
    soft_targets,
    taught,
)
from tests.graphs import Compiled, recorded
from tests.heads import compare, step
from tests.heads import small_chunks as small_chunks  # a fixture of this file, too
from tests.linear_problems import largest_allocation


def only_site(function, inputs):
    (site,) = compile_losses.explain(function, *inputs).losses
    return site


#: Casts to float32 are no part of these in float64.
CAST = ("in float32", "autocast")
EXACT = [(name, torch.float64) for name in MATCHES if name not in CAST]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dtype"), [*EXACT, *((n, torch.float32) for n in MATCHES)])
def test_matches(name, dtype):
    function, op, layers = MATCHES[name]
    inputs = problem(dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 5e-2 if name == "autocast" else 5e-5
    (site,) = compare(function, inputs, rtol=tolerance, atol=tolerance)
    assert (site.op, site.status) == (op, "rewritten"), site
    assert f"absorbed {layers} and" in site.reason or site.reason.startswith(f"absorbed {layers}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in MATCHES if name != "autocast"])
def test_in_bfloat16(name):
    """As accurate as torch; a number that is rounded may keep the layers from being taken along."""
    function, op, _ = MATCHES[name]
    inputs = problem(torch.bfloat16)
    compiled = Compiled(function, inner_backend="aot_eager")
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    found = step(compiled, inputs), step(function, inputs), step(function, exact)
    (site,) = compiled.sites
    assert site.op in (op, op.removeprefix("linear_"))
    for i, results in enumerate(zip(*found, strict=True)):
        if results[0] is None:
            assert results == (None, None, None)
        else:
            assert_accurate(*results, f"{name}, result {i}")


def graph_of(function, inputs, *, lowers=True, verify=False):
    """What is left of a Dynamo graph."""
    found = []

    def backend(gm, _):
        compile_losses.rewrite(gm, lowers=lowers, verify=verify)
        found.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return found[0]


def test_options_of_the_op():
    def keywords(function):
        graph = graph_of(function, problem())
        (node,) = (n for n in graph.nodes if str(n.target).startswith("fused.linear_softmax"))
        return node.args[3], {k: v for k, v in node.kwargs.items() if k[:3] not in ("lin", "tar")}

    float32 = {"dtype": torch.float32}
    assert keywords(question_answering) == (3, {"temperature": 2.0, **float32})
    assert keywords(gkd(1)) == (3, {"reverse": True, "temperature": 0.9, **float32})
    reduction, options = keywords(gkd(0.3))
    assert math.isclose(options["beta"], 0.3)
    assert reduction == 3


@pytest.mark.parametrize("name", ["question answering", "GKD", "teacher of other readers"])
def test_no_layer_is_left(name):
    """But for a teacher's logits that something else reads."""
    function, _, layers = MATCHES[name]
    targets = [str(n.target) for n in graph_of(function, problem()).nodes]
    assert sum("linear" in t and "fused" not in t for t in targets) == (layers == STUDENT)


def check_alone(function, reason, inputs):
    (site,) = compare(function, inputs)
    assert (site.op, site.status) == ("softmax_kl_div", "rewritten"), site
    assert "without its linear layer: " in site.reason
    assert reason in site.reason, site.reason


@pytest.mark.parametrize("name", DIVERGENCE_ALONE)
def test_divergence_alone(name):
    check_alone(*DIVERGENCE_ALONE[name], problem())


def test_never_taken_along():
    inputs = problem(torch.float64)
    for site in compare(detached_student, inputs, rtol=1e-12, atol=1e-12):
        assert "linear" not in site.op


def test_a_sum_that_is_no_divergence():
    """Cross entropy with soft targets, as torchtune's forward divergence: it has another value,
    and is one of the statistics of a row that losses of one head share."""

    def loss(h, w, b, t, tw, tb):
        q = F.softmax(taught(t, tw), dim=-1, dtype=torch.float32)
        log_p = F.log_softmax(F.linear(h, w), dim=-1, dtype=torch.float32)
        return -(q * log_p).sum(-1).mean()

    inputs = problem()
    site = only_site(loss, inputs)
    assert site.op == "linear_row_statistics"
    assert f"absorbed {BOTH}; computes of each row: cross entropy" in site.reason
    compare(loss, inputs)


def test_float16_computes_its_logits_once():
    site = only_site(question_answering, problem(torch.float16))
    assert (site.op, site.status) == ("softmax_kl_div", "rewritten")
    assert "gradients in float16" in site.reason


@pytest.mark.kernels
def test_small_logits_stay(monkeypatch):
    monkeypatch.undo()
    check_alone(question_answering, "0.0 MiB of logits are one chunk", problem())


def test_memory_is_preferred(monkeypatch):
    set_constants(monkeypatch, least_rows=9)
    inputs = problem()
    assert only_site(question_answering, inputs).op == "softmax_kl_div"
    monkeypatch.setenv("COMPILE_LOSSES_PREFER_MEMORY", "1")
    assert only_site(question_answering, inputs).op == KL


def test_chosen_losses(monkeypatch):
    monkeypatch.setenv("COMPILE_LOSSES_EXCEPT", KL)
    assert only_site(question_answering, problem()).op == "softmax_kl_div"
    assert only_site(gkd(0.3), problem()).op == JS


def test_verification():
    """Torch's own nodes, run with the same numbers, agree."""
    options = {"inner_backend": "aot_eager", "verify": True}
    for name in ("question answering", "GKD, reverse", "GKD", "teacher of other readers"):
        function, op, _ = MATCHES[name]
        inputs = problem()
        graph = graph_of(function, inputs, verify=True)
        assert any(op in str(node.target) for node in graph.nodes)
        compare(function, inputs, options)


def test_dynamic_shapes():
    compiled = torch.compile(
        question_answering,
        backend="compile_losses",
        options={"inner_backend": "aot_eager"},
        dynamic=True,
    )
    for rows in (6, 9, 30):
        _, w, b, _, tw, tb = problem()
        h, t = torch.randn(2, rows, HIDDEN, requires_grad=True), torch.randn(2, rows, OF_TEACHER)
        inputs = (h, w, b, t, tw, tb)
        torch.testing.assert_close(step(compiled, inputs), step(question_answering, inputs))


class Distilled(nn.Module):
    """A student and a teacher of which nothing is frozen, as in the libraries' examples."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.teacher = nn.Sequential(nn.Linear(HIDDEN, OF_TEACHER), nn.Linear(OF_TEACHER, CLASSES))

    def forward(self, x):
        with torch.no_grad():
            teacher = self.teacher(x)
        return soft_targets(self.head(torch.tanh(self.trunk(x))), teacher)


@pytest.mark.parametrize("door", ["backend", "enable"])
def test_inductor(door):
    """Three steps that accumulate gradients, with a factor."""
    inputs, results = torch.randn(*ROWS, HIDDEN), []
    for compiles in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Distilled()
        if compiles and door == "backend":
            model.compile(backend="compile_losses")
        elif compiles:
            with compile_losses.enable():
                model.compile()
                model(inputs).backward()
                model.zero_grad()
        for factor in (1.0, 3.0, -0.5):
            (model(inputs) * factor).backward()
        results.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.kernels
def test_neither_logits_are_held(monkeypatch):
    """At sizes of its own choice, where either side's logits take 312 MiB."""
    monkeypatch.undo()
    rows, classes = 4096, 20_000
    h, t = torch.randn(rows, 16, requires_grad=True), torch.randn(rows, 24)
    w, tw = torch.randn(classes, 16, requires_grad=True), torch.randn(classes, 24)

    def loss(h, w, t, tw):
        return soft_targets(h @ w.t(), taught(t, tw))

    compiled = torch.compile(loss, backend="compile_losses")
    compiled(h, w, t, tw).backward()
    largest = largest_allocation(lambda: compiled(h, w, t, tw).backward())
    assert largest <= constants_of(torch.device("cpu")).logits_bytes < rows * classes * 4


def test_factors_go_into_the_forward(monkeypatch, no_code):
    """The backward multiplies by the tangent alone, which is 1."""

    def loss(h, w, b, t, tw, tb):
        return 0.5 * question_answering(h, w, b, t, tw, tb)

    inputs = problem(torch.float64)
    with recorded(monkeypatch) as graphs:
        compare(loss, inputs, {}, rtol=1e-12, atol=1e-12)
    forward, backward = graphs["post"]
    assert forward.count("fused.linear_softmax_kl_div_with_grad.default") == 1
    assert "grad_output: " in forward
    assert "linear_softmax" not in backward
    assert only_site(loss, inputs).plan[0] == "gradient in forward with its factor"


def masked(kind, reduce):
    """The divergence of each token, and what is made of it."""

    def loss(h, w, b, t, tw, tb):
        log_p, log_q = F.linear(h, w, b).log_softmax(-1), taught(t, tw, tb).log_softmax(-1)
        if kind == "reverse":
            log_p, log_q = log_q, log_p
        if kind == "mixture":
            log_m = torch.logaddexp(log_p, log_q) - math.log(2)
            each = log_q.exp() * (log_q - log_m) + log_p.exp() * (log_p - log_m)
            return reduce(each.sum(-1) / 2)
        return reduce(F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1))

    return loss


MASK = torch.tensor([[1.0, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 1]], dtype=torch.float64)
#: What is made of each token's divergence, and the plan.
TOKENS = {
    "a masked mean": (lambda each: (each * MASK).sum() / MASK.sum(), "gradient in forward by row"),
    "a weight of each": (
        lambda each: (each * MASK.softmax(-1)).sum(),
        "gradient in forward by row",
    ),
    "a bound": (lambda each: each.clamp(max=3.0).mean(), "gradient in forward by row"),
    "squares": (lambda each: each.square().sum(), "gradient in forward by row"),
    "their softmax": (lambda each: (each * each.softmax(-1)).sum(), "with its logits"),
    "all of them": (lambda each: each * MASK, "with its logits"),
}


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("kind", ["forward", "reverse", "mixture"])
@pytest.mark.parametrize("name", TOKENS)
def test_divergences_of_tokens(name, kind):
    reduce, plan = TOKENS[name]
    inputs, function = problem(torch.float64), masked(kind, reduce)
    (site,) = compare(function, inputs, {}, rtol=1e-12, atol=1e-12)
    assert site.op == (JS if kind == "mixture" else KL), site
    assert site.plan[0] == plan, site.plan
    # Without the passes on AOTAutograd's graphs the logits would be computed twice.
    site = next(
        n for n in graph_of(function, inputs, lowers=False).nodes if "fused" in str(n.target)
    )
    assert "linear" not in str(site.target)


@pytest.mark.usefixtures("no_code")
def test_divergences_of_tokens_of_a_frozen_head():
    """Any function of them will do."""

    def loss(h, w, b, t, tw, tb):
        return masked("forward", TOKENS["their softmax"][0])(h, w.detach(), b.detach(), t, tw, tb)

    inputs = problem(torch.float64)
    (site,) = compare(loss, inputs, {}, rtol=1e-12, atol=1e-12)
    assert site.plan[0] == "gradient in forward, scaled by row"


@pytest.mark.usefixtures("no_code")
def test_divergences_of_tokens_with_memory_preferred():
    function, inputs = masked("forward", TOKENS["their softmax"][0]), problem(torch.float64)
    options = {"prefer_memory": True}
    (site,) = compare(function, inputs, options, rtol=1e-12, atol=1e-12)
    assert site.plan[0] == "logits computed again"


@pytest.mark.parametrize("read", [False, True])
def test_returned_logits(read):
    """The student's may be lazy, as beside cross entropy; a teacher's are then held."""

    def both(h, w, b, t, tw, tb):
        student = F.linear(h, w, b)
        return soft_targets(student, taught(t, tw, tb)), student

    def total(function):
        def whole(*inputs):
            loss, logits = function(*inputs)
            return loss + (logits * 0.1).sum() if read else loss

        return whole

    inputs = problem(torch.float64)
    expected = step(total(both), inputs)
    for options, op in ({"lazy_logits": False}, "softmax_kl_div"), ({"lazy_logits": True}, KL):
        torch._dynamo.reset()
        (site,) = explain_call(both, inputs, options=options).losses
        assert site.op == op, site
        options = {"inner_backend": "aot_eager", **options}
        compiled = torch.compile(both, backend="compile_losses", options=options)
        torch.testing.assert_close(step(total(compiled), inputs), expected, rtol=1e-12, atol=1e-12)

    def with_teacher(h, w, b, t, tw, tb):
        teacher = taught(t, tw, tb)
        return soft_targets(F.linear(h, w, b), teacher), teacher

    (site,) = explain_call(with_teacher, inputs, options={"lazy_logits": True}).losses
    assert (site.op, "they are returned" in site.reason) == (KL, True), site


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_memory_budget(budget, monkeypatch):
    """Where nothing is saved the backward computes both logits again; otherwise nothing twice."""
    inputs = problem(torch.float64)
    with (
        recorded(monkeypatch) as graphs,
        torch._functorch.config.patch(activation_memory_budget=budget),
    ):
        compare(gkd(1), inputs, {}, rtol=1e-12, atol=1e-12)
    both = [
        graph.count("fused.linear_softmax_kl_div_with_grad.default") for graph in graphs["post"]
    ]
    again = "linear_softmax_kl_div_backward.default" in graphs["post"][1]
    assert (both, again) == (([0, 0], True) if budget == 0 else ([1, 0], False))


def test_checkpointed():
    """The loss's own gradients are saved; only the trunk is computed twice."""

    def loss(*inputs):
        return checkpoint(question_answering, *inputs, use_reentrant=False)

    inputs = problem(torch.float64)
    (site,) = compare(loss, inputs, rtol=1e-12, atol=1e-12)
    assert site.op == KL
