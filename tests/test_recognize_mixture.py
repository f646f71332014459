"""Mixtures of two softmaxes in calls of kl_div: what is one divergence, and what stays two."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from tests.results import compile_with, run
from tests.specs.inputs import distillation, learned_distillation, square_logits


def divergence(
    student, teacher, *, outer=0.3, inner=0.3, dim=-1, mixed=lambda x: x, shift=0.0, sign=1
):
    """The generalised divergence, with something of it replaced."""
    log_p, log_q = student.log_softmax(dim), teacher.log_softmax(dim)
    log_m = torch.logaddexp(mixed(log_p) + math.log1p(-inner), log_q + math.log(inner) + shift)
    kl_q = F.kl_div(log_m, log_q, reduction="batchmean", log_target=True)
    kl_p = F.kl_div(log_m, log_p, reduction="batchmean", log_target=True)
    return outer * kl_q + sign * (1 - outer) * kl_p


def different_softmaxes(student, teacher):
    log_p, log_q = student.log_softmax(0), teacher.log_softmax(1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    kl_q = F.kl_div(log_m, log_q, reduction="sum", log_target=True)
    return 0.5 * (kl_q + F.kl_div(log_m, log_p, reduction="sum", log_target=True))


def different_reductions(student, teacher):
    log_p, log_q = student.log_softmax(1), teacher.log_softmax(1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    kl_q = F.kl_div(log_m, log_q, reduction="sum", log_target=True)
    return 0.5 * (kl_q + F.kl_div(log_m, log_p, reduction="batchmean", log_target=True))


def another_target(student, teacher):
    log_p, log_q = student.log_softmax(1), teacher.log_softmax(1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    kl_q = F.kl_div(log_m, log_q, reduction="sum", log_target=True)
    return 0.5 * (kl_q + F.kl_div(log_m, log_q.flip(0), reduction="sum", log_target=True))


def three_softmaxes(student, teacher):
    log_p, log_q = student.log_softmax(1), teacher.log_softmax(1)
    parts = torch.stack([log_p, log_q, student.flip(0).log_softmax(1)])
    log_m = parts.logsumexp(0) - math.log(3)
    kl_q = F.kl_div(log_m, log_q, reduction="sum", log_target=True)
    return 0.5 * (kl_q + F.kl_div(log_m, log_p, reduction="sum", log_target=True))


DIFFERENT = {
    "weights": lambda s, t: divergence(s, t, outer=0.4),
    "exchanged weights": lambda s, t: divergence(s, t, outer=0.7),
    "nearly the same weights": lambda s, t: divergence(s, t, outer=0.3001),
    "a mixture that does not add up": lambda s, t: divergence(s, t, shift=-0.1),
    "a detached part": lambda s, t: divergence(s, t, mixed=torch.Tensor.detach),
    "another temperature": lambda s, t: divergence(s, t, mixed=lambda p: (p / 2).log_softmax(-1)),
    "a difference": lambda s, t: divergence(s, t, sign=-1),
    "two dimensions": different_softmaxes,
    "two reductions": different_reductions,
    "another target": another_target,
    "three softmaxes": three_softmaxes,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("inputs", [distillation, learned_distillation, square_logits])
@pytest.mark.parametrize("case", DIFFERENT)
def test_other_mixtures_stay(case, inputs):
    """Their parts are kl_div's, and nothing more is claimed."""
    if case == "two dimensions" and inputs is not square_logits:
        inputs = square_logits
    arguments = inputs()
    report = compile_losses.explain(DIFFERENT[case], *arguments)
    assert [site.op for site in report.sites] == ["kl_div", "kl_div"], str(report)
    torch._dynamo.reset()
    ours = run(compile_with(DIFFERENT[case], "aot_eager", False), arguments)
    torch.testing.assert_close(ours, run(DIFFERENT[case], arguments))


def sites_of(function, inputs):
    """What the report says, after loss and gradients were compared with eager mode."""
    torch._dynamo.reset()
    ours = run(compile_with(function, "aot_eager", False), inputs)
    torch.testing.assert_close(ours, run(function, inputs), rtol=1e-5, atol=1e-6)
    return [(s.op, s.status, s.reason) for s in compile_losses.explain(function, *inputs).losses]


def test_mixture_without_gradients():
    """The op's gradient would go through the mixture, too."""

    def loss(student, teacher):
        log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
        with torch.no_grad():
            log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        each = log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)
        return each.sum(-1).mean() / 2

    sites = sites_of(loss, distillation())
    assert all(op != "softmax_js_div" or status == "declined" for op, status, _ in sites)
    assert any("without gradients" in reason for _, _, reason in sites)


def weighted(student, teacher, beta):
    """With weights in tensors."""
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    log_m = torch.logaddexp(log_p + torch.log1p(-beta), log_q + beta.log())
    each = beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)
    return each.sum(-1).mean()


def test_weights_in_tensors():
    def constant(student, teacher):
        return weighted(student, teacher, torch.tensor(0.3))

    def of_another_dtype(student, teacher):
        return weighted(student, teacher, torch.tensor(0.3, dtype=torch.bfloat16).float())

    def quotient(student, teacher):
        return weighted(student, teacher, 1 / torch.tensor(4.0))

    inputs = distillation()
    for function in (constant, quotient):
        assert sites_of(function, inputs) == [("softmax_js_div", "rewritten", "")]
    assert sites_of(of_another_dtype, inputs) == []  # rounded to bfloat16 it is another weight


def test_weights_that_are_no_constants():
    def changed(student, teacher):
        beta = torch.tensor(0.3)
        beta.add_(0.2)
        return weighted(student, teacher, beta)

    inputs = distillation()
    assert all(status == "declined" for _, status, _ in sites_of(changed, inputs))
    assert sites_of(weighted, (*inputs, torch.tensor(0.3))) == []
    assert sites_of(weighted, (*inputs, torch.tensor(0.3, requires_grad=True))) == []


def test_input_is_what_is_learned():
    """The op computes input's gradient in one read: a learned tensor takes that role."""

    def loss(teacher, student):
        return divergence(teacher, student)

    student, teacher = distillation()
    found = []

    def backend(gm, example_inputs):
        compile_losses.rewrite(gm)
        found.extend(n for n in gm.graph.nodes if "softmax_js_div" in str(n.target))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(loss, backend=backend)(teacher, student)
    (node,) = found
    assert node.args[0].meta["example_value"].requires_grad
    assert node.kwargs["beta"] == pytest.approx(0.7, abs=0)


LOG_SOFTMAXES = [
    lambda x, dim: (x / 2.0).log_softmax(dim),
    lambda x, dim: (x * 3).softmax(dim).log(),
    lambda x, dim: x - x.logsumexp(dim, keepdim=True),
]
MIXTURES = [
    lambda p, q, a, b: torch.logaddexp(p + math.log(a), q + math.log(b)),
    lambda p, q, a, b: torch.stack([q + math.log(b), p + math.log(a)]).logsumexp(0),
    lambda p, q, a, b: (a * p.exp() + b * q.exp()).log(),
    lambda p, q, a, b: ((a / b * p.exp() + q.exp()) * b).log(),
    lambda p, q, a, b: torch.logaddexp(p + math.log(a / b), q) + math.log(b),
]
TERMS = [
    lambda p, m: p.exp() * (p - m),
    lambda p, m: F.kl_div(m, p, reduction="none", log_target=True),
    lambda p, m: F.kl_div(m, p.exp(), reduction="none"),
    lambda p, m: p.exp() * p - p.exp() * m,
]
REDUCTIONS = [
    lambda p, q, dim: (p + q).sum(),
    lambda p, q, dim: (p + q).mean(),
    lambda p, q, dim: (p + q).sum(dim).mean(),
    lambda p, q, dim: p.sum() + q.sum(),
    lambda p, q, dim: p.sum(dim) + q.sum(dim),
    lambda p, q, dim: (p.mean() + q.mean()) * 4,
    lambda p, q, dim: q.sum(dim).mean() + p.sum(dim).mean(),
    lambda p, q, dim: (p.sum() + q.sum()) / len(p),
]


def program(seed):
    """A divergence from a mixture, written somehow, and whether it is Jensen and Shannon's."""
    rng = random.Random(seed)
    log_softmax, mixture, of_p, of_q, reduce = (
        rng.choice(choices) for choices in (LOG_SOFTMAXES, MIXTURES, TERMS, TERMS, REDUCTIONS)
    )
    beta, dim = rng.choice([0.1, 0.5, 0.7]), rng.choice([1, 0])
    wrong = rng.choice([None, None, "weight", "mixture", "temperature", "dim", "detached", "eps"])
    outer, inner = (beta + 0.05 if wrong == name else beta for name in ("weight", "mixture"))

    def function(student, teacher):
        p, q = (log_softmax(x, dim) for x in (student, teacher))
        in_mixture = p
        if wrong == "temperature":
            in_mixture = log_softmax(student / 3, dim)
        if wrong == "dim":
            in_mixture = log_softmax(student, 1 - dim)
        if wrong == "detached":
            in_mixture = p.detach()
        m = mixture(in_mixture, q, 1 - inner, inner)
        if wrong == "eps":
            m = m + 1e-3
        return reduce((1 - beta) * of_p(p, m), outer * of_q(q, m), dim)

    return function, wrong is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(60))
def test_drawn_mixtures(seed):
    """Whatever is drawn, results are eager mode's, and what is right is found."""
    function, right = program(seed)
    inputs = random.Random(seed).choice([distillation, learned_distillation, square_logits])()
    torch._dynamo.reset()
    sites = []

    def backend(gm, example_inputs):
        sites.extend(compile_losses.rewrite(gm).meta["compile_losses"].sites)
        return gm.forward

    ours = run(torch.compile(function, backend=backend, fullgraph=True), inputs)
    torch.testing.assert_close(ours, run(function, inputs), rtol=1e-4, atol=1e-6)
    found = [site.op for site in sites if site.status == "rewritten"]
    assert (found == ["softmax_js_div"]) == right, found
