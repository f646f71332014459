"""Logits of a head that a divergence from a teacher shares with other losses: one op for all."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compile_losses
from compile_losses.ops.linear.chunk_size import held_rows
from compile_losses.ops.linear.row_function import Operand, encode
from compile_losses.ops.linear.row_statistics import COUNT
from compile_losses.ops.linear_row_statistics import in_order
from tests.linear_problems import most_allocated
from tests.test_row_gradients import IN_THE_FORWARD, LOGITS, SCALED
from tests.test_shared_logits import OP, check_accuracy, sites_of
from tests.test_shared_logits import check as check_outcome
from tests.test_shared_logits import outcome as outcome_of

fused = torch.ops.fused
ROWS, HIDDEN, OF_TEACHER, CLASSES = (4, 18), 8, 12, 37
BOTH, STUDENT = "absorbed the linear layers of student and teacher", "absorbed a linear layer"


def problem(dtype=torch.float64, *, frozen=False, rows=ROWS, device="cpu"):
    """Hidden states and weight of a student and of a teacher, which is not frozen, and labels of
    which some are ignored."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    h, w, t, tw = draw(*rows, HIDDEN), draw(CLASSES, HIDDEN), draw(*rows, OF_TEACHER), None
    tw = draw(CLASSES, OF_TEACHER).requires_grad_()
    labels = torch.randint(CLASSES, rows, generator=generator).to(device)
    labels[:, ::7] = -100
    return h.requires_grad_(), w.requires_grad_(not frozen), t, tw, labels


def taught(t, tw):
    with torch.no_grad():
        return F.linear(t, tw)


def soft(student, teacher, temperature=2.0, reduction="batchmean"):
    """Of Hinton et al., 2015."""
    log_p, q = F.log_softmax(student / temperature, -1), F.softmax(teacher / temperature, -1)
    return F.kl_div(log_p, q, reduction=reduction) * temperature**2


def hard(student, labels, **options):
    return F.cross_entropy(student.view(-1, student.shape[-1]), labels.reshape(-1), **options)


def hard_and_soft(h, w, t, tw, labels):
    """As of transformers' examples of distillation."""
    student = F.linear(h, w)
    return 0.3 * hard(student, labels) + 0.7 * soft(student, taught(t, tw))


def of_given_logits(h, w, t, tw, labels):
    """Of a teacher whose logits another loss reads, too."""
    student, teacher = F.linear(h, w), taught(t, tw)
    return hard(student, labels) + soft(student, teacher), hard(teacher, labels)


def distil_bert(h, w, t, tw, labels):
    """All tokens in one dimension, with the labels' cross entropy of the same rows."""
    student, teacher = F.linear(h, w).view(-1, CLASSES), taught(t, tw).view(-1, CLASSES)
    return 5 * soft(student, teacher) + 2 * F.cross_entropy(student, labels.view(-1))


def of_shifted_logits(h, w, t, tw, labels):
    student, teacher = (x[:, :-1].contiguous() for x in (F.linear(h, w), taught(t, tw)))
    return hard(student, labels[:, 1:]) + soft(student, teacher, 1.0)


def minitron(h, w, t, tw, labels):
    """The reverse divergence of masked tokens, with a metric beside it."""
    student, teacher = F.linear(h, w), taught(t, tw)
    log_p, log_q = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    each = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    mask = (labels != -100).to(each.dtype)
    with torch.no_grad():
        hits = (student.argmax(-1) == labels).to(each.dtype).sum()
    return (each * mask).sum() / mask.sum() + 0.5 * hard(student, labels), hits


def jensen_shannon(h, w, t, tw, labels, beta=0.3):
    """TRL's GKD, with a bonus for entropy."""
    student, teacher = F.linear(h, w), taught(t, tw)
    log_p, log_q = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    beta = torch.tensor(beta, dtype=log_p.dtype)
    mixed = torch.stack([log_p + torch.log(1 - beta), log_q + torch.log(beta)])
    log_m = torch.logsumexp(mixed, dim=0)
    of_teacher = F.kl_div(log_m, log_q, reduction="none", log_target=True)
    of_student = F.kl_div(log_m, log_p, reduction="none", log_target=True)
    each = beta * of_teacher + (1 - beta) * of_student
    entropy = -(log_p.exp() * log_p).sum(-1)
    return each.sum() / each.size(0) - 0.01 * entropy.mean()


def mean_over_classes(h, w, t, tw, labels):
    student = F.linear(h, w)
    z_loss = torch.logsumexp(student, -1).square().mean()
    return soft(student, taught(t, tw), 0.5, "mean") + 1e-2 * z_loss


def classes_in_the_middle(h, w, t, tw, labels):
    student, teacher = (x.transpose(1, 2) for x in (F.linear(h, w), taught(t, tw)))
    divergence = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="sum")
    return divergence + F.cross_entropy(student, labels, label_smoothing=0.1)


def scaled_and_biased(h, w, t, tw, labels):
    bias, of_teacher = w.sum(1), tw.sum(1)
    student, teacher = F.linear(h, w, bias) * 0.5, taught(t, tw) * 2 + of_teacher.detach()
    return hard(student, labels, reduction="sum") + soft(student, teacher)


def soft_targets(h, w, t, tw, labels):
    """Cross entropy with the teacher's probabilities, alone."""
    student, q = F.linear(h, w).flatten(0, 1), F.softmax(taught(t, tw), -1).flatten(0, 1)
    return F.cross_entropy(student, q)


def soft_targets_by_hand(h, w, t, tw, labels):
    """Of masked tokens, beside labels."""
    student = F.linear(h, w)
    q, log_p = F.softmax(taught(t, tw), -1), F.log_softmax(student, -1)
    each, mask = -(q * log_p).sum(-1), (labels != -100).to(q.dtype)
    return (each * mask).sum() / mask.sum() + hard(student, labels)


def sharpened(h, w, t, tw, labels):
    """As of DINO: another temperature, and a centre that is taken off the teacher's logits."""
    q = ((taught(t, tw) - tw.detach().mean(1)) / 0.25).softmax(-1)
    return F.cross_entropy((F.linear(h, w) / 0.5).flatten(0, 1), q.flatten(0, 1), reduction="sum")


def soft_caps(h, w, t, tw, labels):
    """As of a student and a teacher of Gemma 2."""
    student, teacher = (c * torch.tanh(x / c) for c, x in ((5, F.linear(h, w)), (7, taught(t, tw))))
    return hard(student, labels) + soft(student, teacher)


def a_soft_cap(h, w, t, tw, labels):
    """A divergence alone."""
    return soft(5 * torch.tanh(F.linear(h, w) / 5), taught(t, tw))


FORMS = {
    f.__name__: f
    for f in (
        hard_and_soft, of_given_logits, distil_bert, of_shifted_logits, minitron, jensen_shannon,
        mean_over_classes, classes_in_the_middle, scaled_and_biased, soft_targets,
        soft_targets_by_hand, sharpened, soft_caps, a_soft_cap,
    )
}  # fmt: skip


#: The teacher's weight has gradients that nothing asks for.
outcome = partial(outcome_of, trained=2)
check = partial(check_outcome, trained=2, tolerance=1e-12)


@pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")
class TestRecognition:
    @pytest.mark.parametrize("name", FORMS)
    def test_gradients_in_the_forward(self, name):
        inputs = problem()
        (site,) = check(FORMS[name], inputs)
        assert site.plan[0] == IN_THE_FORWARD
        assert site.reason.startswith(STUDENT if name == "of_given_logits" else BOTH)

    @pytest.mark.parametrize("name", FORMS)
    def test_verified(self, name):
        (site,) = check(FORMS[name], problem(), verify=True)
        assert "not verified" not in site.notes

    @pytest.mark.parametrize("name", ["hard_and_soft", "minitron"])
    def test_frozen_heads(self, name):
        inputs = problem(frozen=True)
        (site,) = check(FORMS[name], inputs)
        assert site.plan[0] in (IN_THE_FORWARD, SCALED)

    @pytest.mark.parametrize("name", ["hard_and_soft", "minitron", "jensen_shannon", "soft_caps"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_accuracy(self, name, dtype):
        check_accuracy(FORMS[name], problem(dtype), trained=2)

    def test_the_reason_why_a_teacher_is_held(self):
        (site,) = sites_of(of_given_logits, problem())
        assert "the teacher's logits are held: they have other readers" in site.reason

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


def a_trained_teacher(h, w, t, tw, labels):
    student = F.linear(h, w)
    return hard(student, labels) + soft(student, F.linear(t, tw))


def itself(h, w, t, tw, labels):
    student = F.linear(h, w)
    return hard(student, labels) + soft(student, student.detach() * 2)


def two_teachers(h, w, t, tw, labels):
    student = F.linear(h, w)
    return soft(student, taught(t, tw)) + soft(student, taught(t.flip(0), tw))


def some_rows(h, w, t, tw, labels):
    student = F.linear(h, w)
    of_some = soft(student[:, :9], taught(t, tw)[:, :9])
    return hard(student, labels) + of_some


def written_teacher(h, w, t, tw, labels):
    student, t = F.linear(h, w), t * 1
    teacher = taught(t, tw)
    divergence = soft(student, teacher)
    t.add_(1)
    return hard(student, labels) + divergence + soft(student, taught(t, tw))


def targets_of_another_kind(h, w, t, tw, labels):
    """Probabilities that are no softmax of logits, and smoothed ones."""
    student, q = F.linear(h, w).flatten(0, 1), taught(t, tw).softmax(-1).flatten(0, 1)
    mixed = F.cross_entropy(student, 0.5 * q + 0.5 / CLASSES)
    return mixed + F.cross_entropy(F.linear(h, 2 * w).flatten(0, 1), q, label_smoothing=0.1)


def trained_targets(h, w, t, tw, labels):
    student, q = F.linear(h, w).flatten(0, 1), F.linear(t, tw).softmax(-1).flatten(0, 1)
    return F.cross_entropy(student, q)


def a_soft_cap_of_a_temperature_of_1(h, w, t, tw, labels):
    """The factor of the soft-cap is taken for a temperature, which cross entropy has not."""
    student, teacher = (5 * torch.tanh(x / 5) for x in (F.linear(h, w), taught(t, tw)))
    return hard(student, labels) + soft(student, teacher, 1.0)


def a_detached_student(h, w, t, tw, labels):
    student = F.linear(h, w)
    return hard(student, labels) + soft(student.detach(), taught(t, tw))


NEAR_MISSES = (
    a_trained_teacher, itself, two_teachers, some_rows, written_teacher,
    a_soft_cap_of_a_temperature_of_1, a_detached_student, targets_of_another_kind, trained_targets,
)  # fmt: skip


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
    h, w, labels, b, _, t, tw, tb, _, softcap, kind, beta, temperature, of_teacher, *_ = given
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
        ({10: None}, RuntimeError, "a teacher and a divergence or neither, got torch.float64"),
        ({10: "hellinger"}, ValueError, "kl, cross_entropy, reverse_kl, js, "
         "finite_kl, finite_cross_entropy, finite_reverse_kl, got hellinger"),
        ({10: "cross_entropy"}, RuntimeError, "a temperature of 1 with cross_entropy, got 1.7"),
        ({13: -3.0}, RuntimeError, "softcap to be positive, got -3.0"),
        ({5: torch.zeros(72, 37).double(), 6: None, 7: None, 13: 3.0}, RuntimeError,
         "teacher_softcap only with teacher_weight"),
        ({12: 0.0}, RuntimeError, "temperature to be positive, got 0.0"),
        ({10: "js", 11: 1.0}, RuntimeError, "beta to be between 0 and 1, without these, got 1.0"),
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
