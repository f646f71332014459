"""Logits of a head that a divergence from a teacher shares with other losses: one op for all."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compile_losses
from compile_losses.ops.linear.chunk_size import held_rows
from compile_losses.ops.linear.row_function import encode
from compile_losses.ops.linear.row_statistics import COUNT
from compile_losses.ops.linear.steps import Operand
from compile_losses.ops.linear_row_statistics import in_order
from tests.corpus.distilled import (
    BOTH,
    CLASSES,
    FORMS,
    NEAR_MISSES,
    OF_TEACHER,
    ROWS,
    STUDENT,
    hard,
    itself,
    minitron,
    of_given_logits,
    problem,
    soft,
    some_rows,
    taught,
    two_teachers,
)
from tests.heads import IN_THE_FORWARD, LOGITS, OP, SCALED, check_accuracy, sites_of
from tests.heads import check as check_outcome
from tests.heads import outcome as outcome_of
from tests.linear_problems import most_allocated

fused = torch.ops.fused


#: The teacher's weight has gradients that nothing asks for.
outcome = partial(outcome_of, trained=2)
check = partial(check_outcome, trained=2, tolerance=1e-12)


@pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")
class TestRecognition:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("name", FORMS)
    def test_gradients_in_the_forward(self, name):
        inputs = problem()
        (site,) = check(FORMS[name], inputs, verify=True)
        assert site.plan[0] == IN_THE_FORWARD
        assert "not verified" not in site.notes
        assert site.reason.startswith(STUDENT if name == "of_given_logits" else BOTH)

    @pytest.mark.parametrize("name", ["hard_and_soft", "minitron"])
    def test_frozen_heads(self, name):
        inputs = problem(frozen=True)
        (site,) = check(FORMS[name], inputs)
        assert site.plan[0] in (IN_THE_FORWARD, SCALED)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("name", ["hard_and_soft", "minitron", "jensen_shannon", "soft_caps"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_accuracy(self, name, dtype):
        check_accuracy(FORMS[name], problem(dtype), trained=2)

    def test_the_reason_why_a_teacher_is_held(self):
        (site,) = sites_of(of_given_logits, problem())
        assert "the teacher's logits are held: something else reads them" in site.reason

    def test_without_gradients(self):
        inputs = [t.detach() for t in problem()]
        compiled = torch.compile(minitron, backend="compile_losses")
        torch.testing.assert_close(compiled(*inputs), minitron(*inputs))

    @pytest.mark.parametrize("name", ["hard_and_soft", "minitron"])
    def test_two_symbols(self, name):
        compiled = torch.compile(FORMS[name], backend="compile_losses", dynamic=True)
        for rows in ((4, 18), (5, 25)):
            inputs = problem(rows=rows)
            torch.testing.assert_close(outcome(compiled, inputs), outcome(FORMS[name], inputs))

    def test_gradients_of_other_rows(self):
        """Not by row: the logits are taken back, and the divergence is one of them."""

        def step(h, w, t, tw, labels):
            student = F.linear(h, w)
            log_p, log_q = F.log_softmax(student, -1), F.log_softmax(taught(t, tw), -1)
            each = (log_q.exp() * (log_q - log_p)).sum(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            return (each - each.mean()).square().mean() + hard(student, labels) + entropy.mean()

        inputs = problem()
        (site,) = check(step, inputs)
        assert site.plan[0] == LOGITS

    def test_soft_caps_of_other_rows(self):
        def step(h, w, t, tw, labels):
            student, teacher = (5 * torch.tanh(x / 5) for x in (F.linear(h, w), taught(t, tw)))
            log_p, log_q = F.log_softmax(student / 2, -1), F.log_softmax(teacher / 2, -1)
            each = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
            return (each - each.mean()).square().mean() + hard(student, labels)

        inputs = problem()
        (site,) = check(step, inputs)
        assert site.plan[0] == LOGITS

    def test_soft_targets_of_other_rows(self):
        """The entropy of the teacher's row is part of what the logits are taken back for."""

        def step(h, w, t, tw, labels):
            student, q = F.linear(h, w).flatten(0, 1), F.softmax(taught(t, tw), -1).flatten(0, 1)
            each = F.cross_entropy(student, q, reduction="none")
            return (each - each.mean()).square().mean() + each.mean()

        inputs = problem()
        (site,) = check(step, inputs)
        assert site.plan[0] == LOGITS
        assert BOTH in site.reason

    def test_a_divergence_beside_what_needs_no_class(self):
        """Only the divergence has a gradient; and no statistic of the logits has."""

        def step(h, w, t, tw, labels):
            student = F.linear(h, w)
            with torch.no_grad():
                entropy = torch.distributions.Categorical(
                    logits=student, validate_args=False
                ).entropy()
            return soft(student, taught(t, tw)), entropy.mean()

        assert len(check(step, problem())) == 1

    @pytest.mark.kernels
    def test_no_logits_are_held(self):
        """16 rows of the student's 144 and 8 of the teacher's at a time."""
        generator = torch.Generator().manual_seed(0)
        h, t = (torch.randn(8, 18, 8, generator=generator) for _ in range(2))
        w, tw = (torch.randn(8000, 8, generator=generator) for _ in range(2))
        labels = torch.randint(8000, (8, 18), generator=generator)
        h.requires_grad_(), w.requires_grad_()

        def loss(h, w, t, tw, labels):
            student = F.linear(h, w)
            return hard(student, labels) + soft(student, taught(t, tw))

        compiled = torch.compile(loss, backend="compile_losses")

        def train():
            compiled(h, w, t, tw, labels).backward()

        train()
        held = held_rows(16, h.device, 1) * 8000 * 4  # half a chunk of the teacher's
        assert held <= most_allocated(train) <= held + 2 * (h.nbytes + w.nbytes)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("no_code", "chunks")
@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(function):
    """Left as they are, or right."""
    check(function, problem())


@pytest.mark.usefixtures("no_code", "chunks")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (two_teachers, "more than one divergence from a teacher"),
        (some_rows, "has a teacher of some of the rows alone"),
        (itself, "is made of its logits"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_reasons(function, reason):
    reasons = [site.reason for site in compile_losses.explain(function, *problem()).losses]
    assert any(reason in found for found in reasons), reasons


class Distilled(nn.Module):
    """A student that computes its own losses, with Inductor's code."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(16, 64), nn.Linear(16, 64)

    def forward(self, x, labels):
        student = self.student(x)
        with torch.no_grad():
            teacher = self.teacher(x)
        return F.cross_entropy(student, labels) + soft(student, teacher)


@pytest.mark.usefixtures("chunks")
def test_inductor():
    torch.manual_seed(0)
    model, x, labels = Distilled(), torch.randn(300, 16), torch.randint(64, (300,))
    expected = model(x, labels)
    gradients = torch.autograd.grad(expected, [*model.student.parameters()])
    (site,) = [s for s in compile_losses.explain(model, x, labels).losses if s.op == OP]
    assert site.reason.startswith(BOTH)
    loss = torch.compile(model, backend="compile_losses")(x, labels)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, [*model.student.parameters()])
    torch.testing.assert_close(found, gradients)


# The ops.

FINITE = ("finite_kl", "finite_reverse_kl", "finite_cross_entropy")
KINDS = ("kl", "reverse_kl", "js", "cross_entropy", *FINITE)


def arguments(kind, device, dtype=torch.float64, *, layer=True, with_target=True, softcap=None):
    h, w, t, tw, labels = problem(dtype, device=device)
    bias = torch.linspace(-1, 1, CLASSES, dtype=dtype, device=device).requires_grad_()
    t, tw = t.flatten(0, 1), tw.detach()
    of_teacher = bias.detach().flip(0)
    if kind in FINITE and softcap is None:  # after which no logit is infinite
        of_teacher[3:9] = -torch.inf
    teacher = (t, tw, of_teacher) if layer else (t @ tw.t() + of_teacher, None, None)
    given = (
        h.detach().flatten(0, 1).requires_grad_(),
        w,
        labels.flatten() if with_target else None,
    )
    temperature = 1.0 if kind == "cross_entropy" else 1.7
    options = (teacher, kind, 0.3, temperature, softcap if layer else None)
    return in_order(*given, bias, -100, softcap, *options)


def torchs(given):
    """The statistics of each row with gradients, in torch's own ops."""
    h, w, labels, b, _, t, tw, tb, _, _, softcap, kind, beta, temperature, of_teacher, *_ = given
    logits, teacher = F.linear(h, w, b), t if tw is None else F.linear(t, tw, tb)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    teacher = teacher if of_teacher is None else of_teacher * torch.tanh(teacher / of_teacher)
    log_p, log_q = (F.log_softmax(x / temperature, -1) for x in (logits, teacher))
    if kind in FINITE:
        log_p, log_q = (x[:, teacher.isfinite().all(0)] for x in (log_p, log_q))
    if kind.endswith("reverse_kl"):
        log_p, log_q = log_q, log_p
    divergence = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    if kind == "js":
        log_m = ((1 - beta) * log_p.exp() + beta * log_q.exp()).log()
        of_teacher, of_student = (
            F.kl_div(log_m, x, reduction="none", log_target=True).sum(-1) for x in (log_q, log_p)
        )
        divergence = beta * of_teacher + (1 - beta) * of_student
    if kind.endswith("cross_entropy"):
        divergence = -(log_q.exp() * log_p).sum(-1)
    probabilities = logits.softmax(-1)
    entropy = torch.logsumexp(logits, -1) - (probabilities * logits).sum(-1)
    nll = F.cross_entropy(logits, labels, reduction="none")
    return nll, torch.logsumexp(logits, -1), entropy, logits.sum(-1), divergence


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("layer", [True, False], ids=["layer", "logits"])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_and_gradients(kind, layer, softcap, device):
    given = arguments(kind, device, layer=layer, softcap=softcap)
    found, expected = fused.linear_row_statistics_forward(*given), torchs(given)
    torch.testing.assert_close(found[:5], expected)
    factors = [torch.rand_like(each) for each in expected]
    leaves = (given[0], given[1], given[3])
    gradients = torch.autograd.grad(expected, leaves, factors, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(found[:5], leaves, factors), gradients)
    # As the passes call it: a function of all statistics.
    mul = torch.ops.aten.mul.Tensor
    text = encode([(mul, (Operand(4), Operand(0)), {})], [COUNT + 1, None, None, None, COUNT, None])
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in given]
    needs = (True, True, True)
    both = fused.linear_row_statistics_rows_with_grad(*detached, *needs, text, [factors[0]])
    product = (expected[4] * expected[0]).detach()
    gradients = torch.autograd.grad((expected[0], expected[4]), leaves, (product, factors[0]))
    torch.testing.assert_close(both[COUNT:], gradients)
    torch.testing.assert_close(both[:5], tuple(each.detach() for each in expected))


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind, device, opcheck):
    each = torch.rand(ROWS[0] * ROWS[1], device=device)
    for layer, with_target in ((True, True), (False, False)):
        given = arguments(kind, device, torch.float32, layer=layer, with_target=with_target)
        opcheck(fused.linear_row_statistics_forward.default, given)
        gradients = (each if with_target else None, None, each, None, each, None)
        for needs in ((True, True, True), (True, False, False)):
            opcheck(fused.linear_row_statistics_backward.default, (*gradients, *given, *needs))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, device):
    given = arguments(kind, device)
    few = [t[:3] if isinstance(t, torch.Tensor) and len(t) == 72 else t for t in given]
    few = [t.detach().requires_grad_(i in (0, 1, 3)) if isinstance(t, torch.Tensor)
           and t.is_floating_point() else t for i, t in enumerate(few)]  # fmt: skip

    def function(h, w, b):
        changed = [h, w, few[2], b, *few[4:]]
        return fused.linear_row_statistics_forward(*changed)[:5]

    leaves = (few[0], few[1], few[3])
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({5: None, 6: None, 7: None}, RuntimeError, "a teacher and a divergence or neither, got"),
        ({11: None}, RuntimeError, "a teacher and a divergence or neither, got torch.float64"),
        ({11: "hellinger"}, ValueError, "kl, cross_entropy, reverse_kl, js, "
         "finite_kl, finite_cross_entropy, finite_reverse_kl, got hellinger"),
        ({11: "cross_entropy"}, RuntimeError, "a temperature of 1 with cross_entropy, got 1.7"),
        ({14: -3.0}, RuntimeError, "softcap to be positive, got -3.0"),
        ({5: torch.zeros(72, 37).double(), 6: None, 7: None, 14: 3.0}, RuntimeError,
         "teacher_softcap only with teacher_weight"),
        ({13: 0.0}, RuntimeError, "temperature to be positive, got 0.0"),
        ({11: "js", 12: 1.0}, RuntimeError, "beta to be between 0 and 1, without these, got 1.0"),
        ({6: torch.zeros(5, OF_TEACHER).double(), 7: None}, RuntimeError,
         r"\[72, 37\], got \[72, 5\]"),
        ({5: torch.zeros(3, OF_TEACHER).double()}, RuntimeError, r"\[72, 37\], got \[3, 37\]"),
        ({5: torch.zeros(72, 37).double(), 6: None}, RuntimeError,
         "teacher_bias only with teacher_weight"),
        ({7: torch.zeros(3).double()}, RuntimeError, r"teacher_bias shape \(37,\), got \(3,\)"),
        ({5: torch.zeros(72, OF_TEACHER).long()}, NotImplementedError, "teacher"),
    ],
)  # fmt: skip
def test_errors(change, error, message):
    given = [change.get(i, value) for i, value in enumerate(arguments("kl", "cpu"))]
    with pytest.raises(error, match=message):
        fused.linear_row_statistics_forward(*given)
