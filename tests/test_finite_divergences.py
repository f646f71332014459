"""Distillation without the terms of infinite logits, of MiniLLM, DistiLLM and torchtune."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from tests.linear_problems import largest_allocation
from tests.test_row_gradients import IN_THE_FORWARD, LOGITS
from tests.test_shared_distillation import BOTH, STUDENT, hard, problem, taught
from tests.test_shared_logits import check as check_outcome
from tests.test_shared_logits import check_accuracy, sites_of
from tests.test_shared_logits import outcome as outcome_of

fused = torch.ops.fused
VALUES = (0.5, -0.25, -torch.inf, torch.inf, torch.nan)


def each_row(input, target, *, entropy, lowest=None):
    """MiniLLM's terms of each row, in which input is the student of the cross entropy, and the
    teacher of the reverse divergence.

    Args:
        lowest: a number in the place of -inf, with which no gradient has the product of 0 and an
            infinity.
    """
    mask = input.isinf() | target.isinf() if entropy else input.isinf()
    if lowest is not None:
        input, target = (x.masked_fill(x == -torch.inf, lowest) for x in (input, target))
    q, log_p, log_q = target.softmax(-1), input.log_softmax(-1), target.log_softmax(-1)
    cross = torch.masked_fill(q * log_p, mask, 0)
    return -((cross - torch.masked_fill(q * log_q, mask, 0)) if entropy else cross).sum(-1)


def all_rows(classes=3):
    """Every pair of two rows of the values."""
    rows = torch.tensor(list(product(VALUES, repeat=classes)), dtype=torch.float64)
    input = rows.repeat_interleave(len(rows), 0)
    return input + torch.tensor([0.0, 0.1, 0.3])[:classes], rows.repeat(len(rows), 1)


def has_softmax(rows):
    finite = rows.isfinite()
    return (finite | (rows == -torch.inf)).all(-1) & finite.any(-1)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [True, False])
def test_every_row_of_special_values(entropy, dtype, layout, device):
    """Losses are torch's. So are gradients, but for nan that 0 * inf makes of numbers."""
    input, target = (x.to(device, dtype) for x in all_rows())
    if layout == "columns":
        input, target = (x.t().contiguous().t() for x in (input, target))
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32

    def results(function, dtype):
        rows = [x.detach().to(dtype).requires_grad_() for x in (input, target)]
        losses = function(*rows)
        return losses.detach(), torch.autograd.grad(losses.sum(), rows)

    op = partial(fused.softmax_finite_kl_div, reduction=0, entropy=entropy, dtype=accumulated)
    losses, gradients = results(op, dtype)
    expected, torchs = results(partial(each_row, entropy=entropy), accumulated)
    _, finite = results(partial(each_row, entropy=entropy, lowest=-1e4), accumulated)
    close = partial(torch.testing.assert_close, equal_nan=True)
    if dtype == torch.float64:
        close = partial(close, rtol=1e-12, atol=1e-12)
    close(losses, expected)
    assert losses.isfinite().any()
    assert losses.isnan().any()
    valid = has_softmax(input) & has_softmax(target)
    for ours, theirs, exact in zip(gradients, torchs, finite, strict=True):
        close(ours[valid], exact[valid].to(dtype))
        assert ours[valid].isfinite().all()
        assert ours[~valid].isnan().all()
        assert theirs[~valid].isnan().all()
        known = theirs.isfinite().all(-1)
        assert known.any()
        close(ours[known], theirs[known].to(dtype))


@pytest.mark.parametrize("entropy", [True, False])
def test_gradcheck_beside_infinities(entropy, device):
    generator = torch.Generator().manual_seed(0)
    x, t = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    left_out = [torch.rand(4, 6, generator=generator) < 0.4 for _ in range(2)]
    for mask in left_out:
        mask[:, 3] = False

    def loss(*finite):
        rows = (
            row.masked_fill(mask.to(device), -torch.inf)
            for row, mask in zip(finite, left_out, strict=True)
        )
        return fused.softmax_finite_kl_div(*rows, 0, entropy=entropy, temperature=1.3)

    leaves = [tensor.to(device).requires_grad_() for tensor in (x, t)]
    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves)


# Over heads. Labels are below 30: a student's classes above may be impossible.


def of_tokens(each, labels):
    """The mean over the tokens that have a label, as all three libraries write it."""
    x, mask = each.view(-1), (labels != -100).int()
    return torch.sum(x * mask.view(-1), dim=0) / torch.sum(mask.view(-1), dim=0)


def possible(classes, first=30):
    """A bias of -inf for the classes from ``first`` on that are no multiples of 3."""
    c = torch.arange(classes)
    return torch.where((c >= first) & (c % 3 > 0), -torch.inf, 0.0).double()


def with_padding(h, w, t, tw, first=30):
    """Logits of a student and a teacher with impossible classes, other ones in each."""
    student = F.linear(h, w, possible(len(w)).to(w.dtype))
    with torch.no_grad():
        return student, F.linear(t, tw, possible(len(tw), first).roll(1).to(w.dtype))


def forward_terms(student, teacher):
    terms = teacher.softmax(-1) * student.log_softmax(-1)
    return -torch.masked_fill(terms, student.isinf(), 0).sum(-1)


def forward(h, w, t, tw, labels):
    student, teacher = F.linear(h, w), taught(t, tw)
    return of_tokens(forward_terms(student, teacher), labels)


def forward_of_padding(h, w, t, tw, labels):
    return of_tokens(forward_terms(*with_padding(h, w, t, tw)), labels)


def forward_beside_labels(h, w, t, tw, labels):
    """As of torchtune's recipes of distillation."""
    labels = labels.clamp(max=29)
    student, teacher = with_padding(h, w, t, tw)
    soft = of_tokens(forward_terms(student, teacher), labels)
    return 0.5 * soft + 0.5 * hard(student, labels)


def reverse_in_place(student, teacher):
    """MiniLLM's and torchtune's."""
    mask = torch.isinf(student) | torch.isinf(teacher)
    p = F.softmax(student, dim=-1)
    log_q, log_p = F.log_softmax(teacher, dim=-1), F.log_softmax(student, dim=-1)
    terms = torch.masked_fill(p * log_q, mask, 0)
    terms -= torch.masked_fill(p * log_p, mask, 0)
    return -torch.sum(terms, dim=-1)


def reverse(h, w, t, tw, labels):
    return of_tokens(reverse_in_place(F.linear(h, w), taught(t, tw)), labels)


def reverse_beside_labels(h, w, t, tw, labels):
    student = F.linear(h, w)
    soft = of_tokens(reverse_in_place(student, taught(t, tw)), labels)
    return 0.1 * soft + 0.9 * hard(student, labels)


def reverse_mean(h, w, t, tw, labels):
    """DistiLLM's, over all tokens."""
    student, teacher = F.linear(h, w).flatten(0, 1), taught(t, tw).flatten(0, 1)
    mask = student.isinf() | teacher.isinf()
    p, log_p, log_q = student.softmax(-1), student.log_softmax(-1), teacher.log_softmax(-1)
    cross = torch.masked_fill(p * log_q, mask, 0)
    return -torch.sum(cross - torch.masked_fill(p * log_p, mask, 0), dim=-1).mean()


def temperature_beside_z_loss(h, w, t, tw, labels):
    student, teacher = F.linear(h, w), taught(t, tw)
    terms = (teacher / 2).softmax(-1) * (student / 2).log_softmax(-1)
    soft = -torch.masked_fill(terms, student.isinf(), 0).sum(-1).mean() * 4
    return soft + 1e-3 * torch.logsumexp(student, -1).square().mean()


def divergence_of_both(h, w, t, tw, labels):
    """The divergence from the teacher, less the teacher's entropy."""
    student, teacher = F.linear(h, w), taught(t, tw)
    mask = student.isinf() | teacher.isinf()
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    each = torch.masked_fill(log_q.exp() * (log_q - log_p), mask, 0).sum(-1)
    return of_tokens(each, labels)


def mask_before_the_teacher(h, w, t, tw, labels):
    """Gradients are off and on again between the mask and its terms."""
    student = F.linear(h, w)
    mask = student.isinf()
    terms = taught(t, tw).softmax(-1) * student.log_softmax(-1)
    return -torch.masked_fill(terms, mask, 0).sum(-1).mean()


def in_chunks(each, step=None):
    """torchtune's losses of chunked outputs: a head for each chunk of the tokens."""

    def loss(h, w, t, tw, labels, chunks=2):
        student = [F.linear(chunk, w) for chunk in h.chunk(chunks, dim=1)]
        with torch.no_grad():
            teacher = [F.linear(chunk, tw) for chunk in t.chunk(chunks, dim=1)]
        student, teacher = (
            [chunk.reshape(-1, chunk.size(-1)) for chunk in of_one] for of_one in (student, teacher)
        )
        mask = (labels != -100).int()
        total = 0.0
        parts = [chunk.reshape(-1) for chunk in labels.chunk(chunks, dim=1)]
        for s, q, part in zip(student, teacher, parts, strict=True):
            total += torch.sum(each(s, q).view(-1) * (part != -100).int().view(-1), dim=0)
        return total / torch.sum(mask.view(-1), dim=0)

    return loss


FORMS = {
    f.__name__: f
    for f in (
        forward, forward_of_padding, forward_beside_labels, reverse, reverse_beside_labels,
        reverse_mean, temperature_beside_z_loss, divergence_of_both, mask_before_the_teacher,
    )
}  # fmt: skip
CHUNKED = {"forward": in_chunks(forward_terms), "reverse": in_chunks(reverse_in_place)}

outcome = partial(outcome_of, trained=2)
check = partial(check_outcome, trained=2, tolerance=1e-12)


@pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")
class TestHeads:
    @pytest.mark.parametrize("name", FORMS)
    def test_gradients_in_the_forward(self, name):
        inputs = problem()
        (site,) = check(FORMS[name], inputs)
        assert site.plan[0] == IN_THE_FORWARD
        assert site.reason.startswith(BOTH)
        assert "finite logits" in site.reason

    @pytest.mark.parametrize("name", FORMS)
    def test_verified(self, name):
        (site,) = check(FORMS[name], problem(), verify=True)
        assert "not verified" not in site.notes

    @pytest.mark.parametrize("name", CHUNKED)
    def test_chunks_of_tokens(self, name):
        """Each is a head of its own."""
        inputs = problem()
        sites = check(CHUNKED[name], inputs)
        assert [site.plan[0] for site in sites] == [IN_THE_FORWARD] * 2

    def test_infinities_of_the_reverse_divergence(self):
        """Of student and teacher, as the formula without 0 * inf, which makes torch's nan."""

        def loss(h, w, t, tw, labels):
            return of_tokens(reverse_in_place(*with_padding(h, w, t, tw, first=12)), labels)

        def safe(h, w, t, tw, labels):
            student, teacher = with_padding(h, w, t, tw, first=12)
            return of_tokens(each_row(teacher, student, entropy=True, lowest=-1e4), labels)

        inputs = problem()
        compiled = torch.compile(loss, backend="compile_losses")
        found, expected = outcome(compiled, inputs), outcome(safe, inputs)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[0], loss(*inputs).detach(), rtol=1e-12, atol=1e-12)
        assert outcome(loss, inputs)[1].isnan().any()
        (site,) = sites_of(loss, inputs)
        assert site.plan[0] == IN_THE_FORWARD

    @pytest.mark.parametrize("name", ["forward_of_padding", "reverse_beside_labels"])
    def test_two_symbols(self, name):
        compiled = torch.compile(FORMS[name], backend="compile_losses", dynamic=True)
        for rows in ((4, 18), (5, 25)):
            inputs = problem(rows=rows)
            torch.testing.assert_close(outcome(compiled, inputs), outcome(FORMS[name], inputs))

    @pytest.mark.parametrize("name", ["forward_of_padding", "reverse_beside_labels"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_accuracy(self, name, dtype):
        check_accuracy(FORMS[name], problem(dtype), trained=2)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_softmaxes_in_float32(self, dtype):
        """As the libraries write them; masks test the logits before the cast."""

        def loss(h, w, t, tw, labels):
            student, teacher = with_padding(h, w, t, tw)
            q = F.softmax(teacher, dim=-1, dtype=torch.float32)
            log_p = F.log_softmax(student, dim=-1, dtype=torch.float32)
            each = torch.masked_fill(q * log_p, torch.isinf(student), 0).sum(-1)
            return -of_tokens(each, labels)

        inputs = problem(dtype)
        compiled = torch.compile(loss, backend="compile_losses")
        tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
        torch.testing.assert_close(outcome(compiled, inputs), outcome(loss, inputs), **tolerance)
        (site,) = sites_of(loss, inputs)
        assert site.plan[0] == IN_THE_FORWARD

    def test_gradients_of_other_rows(self):
        """Not by row: the logits are taken back."""

        def step(h, w, t, tw, labels):
            each = forward_terms(*with_padding(h, w, t, tw))
            return (each - each.mean()).square().mean()

        inputs = problem()
        (site,) = check(step, inputs)
        assert site.plan[0] == LOGITS

    def test_no_logits_are_held(self):
        """A chunk of 16 rows at a time of student and teacher, where all are 144 rows."""
        generator = torch.Generator().manual_seed(0)
        h, t = (torch.randn(8, 18, 8, generator=generator) for _ in range(2))
        w, tw = (torch.randn(8000, 8, generator=generator) for _ in range(2))
        labels = torch.randint(8000, (8, 18), generator=generator)
        h.requires_grad_(), w.requires_grad_()
        for function in (forward, reverse_beside_labels):
            torch._dynamo.reset()
            compiled = torch.compile(function, backend="compile_losses")

            def train(compiled=compiled):
                compiled(h, w, t, tw, labels).backward()

            train()
            assert largest_allocation(train) < 2 * 16 * 8000 * 4

    def test_given_teacher(self):
        """Its logits have another reader, and are held."""

        def loss(h, w, t, tw, labels):
            student, teacher = F.linear(h, w), taught(t, tw)
            return forward_terms(student, teacher).mean() + hard(teacher, labels)

        (site,) = check(loss, problem())
        assert site.reason.startswith(STUDENT)
        assert "the teacher's logits are held: they have other readers" in site.reason


def both_directions(h, w, t, tw, labels):
    student, teacher = F.linear(h, w), taught(t, tw)
    each = 0.1 * forward_terms(student, teacher) + 0.9 * reverse_in_place(student, teacher)
    return of_tokens(each, labels)


def cross_entropy_from_the_student(h, w, t, tw, labels):
    """Its probabilities with the teacher's logarithms."""
    student, teacher = F.linear(h, w), taught(t, tw)
    return forward_terms(teacher, student).mean() + hard(student, labels)


def mask_of_the_teacher(h, w, t, tw, labels):
    student, teacher = F.linear(h, w), taught(t, tw)
    terms = teacher.softmax(-1) * student.log_softmax(-1)
    return -torch.masked_fill(terms, teacher.isinf(), 0).sum(-1).mean() + hard(student, labels)


def mask_that_is_read(h, w, t, tw, labels):
    student, teacher = F.linear(h, w), taught(t, tw)
    mask = student.isinf()
    terms = teacher.softmax(-1) * student.log_softmax(-1)
    return -torch.masked_fill(terms, mask, 0).sum(-1).mean() + mask.sum()


def other_masks(h, w, t, tw, labels):
    """Of the logits before they are multiplied, which may make them infinite."""
    student, teacher = F.linear(h, w), taught(t, tw)
    terms = teacher.softmax(-1) * (student * 7).log_softmax(-1)
    return -torch.masked_fill(terms, student.isinf(), 0).sum(-1).mean()


NEAR_MISSES = (
    both_directions, cross_entropy_from_the_student, mask_of_the_teacher, mask_that_is_read,
    other_masks,
)  # fmt: skip


@pytest.mark.usefixtures("no_code", "chunks")
@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(function):
    """Their heads stay, and results are torch's."""
    inputs = problem()
    assert check(function, inputs) == []


@pytest.mark.usefixtures("no_code", "chunks")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (both_directions, "without its linear layer: it has more than one divergence"),
        (mask_that_is_read, "without its linear layer: "),
        (mask_of_the_teacher, "its mask of infinities makes it another loss"),
        # A factor above 1 may make logits infinite that the mask does not test.
        (other_masks, "its mask of infinities makes it another loss"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_reasons(function, reason):
    reasons = [site.reason for site in compile_losses.explain(function, *problem()).losses]
    assert any(reason in found for found in reasons), reasons


# Sums that are written over their first term.


def read_before(s, t):
    terms = F.softmax(t, -1) * F.log_softmax(s, -1)
    largest = terms.detach().amax()
    terms -= 1
    return -terms.sum(-1).mean() + largest


def view_written(s, t):
    terms = F.softmax(t, -1) * F.log_softmax(s, -1)
    rows = terms[:2]
    rows -= 1
    return -terms.sum(-1).mean()


def argument_written(s, t):
    t -= t.mean()
    return -(F.softmax(t, -1) * F.log_softmax(s, -1)).sum(-1).mean()


def written_twice(s, t):
    q, log_q, log_p = F.softmax(t, -1), F.log_softmax(t, -1), F.log_softmax(s, -1)
    terms = q * log_p * -0.5
    terms -= q * log_p * 0.5
    terms += q * log_q
    return terms.sum(-1).mean()


def wider_term(s, t):
    """The result has the dtype of the first term."""
    q, log_q, log_p = F.softmax(t, -1), F.log_softmax(t, -1), F.log_softmax(s, -1)
    terms = (q * -log_p).bfloat16()
    terms += q * log_q
    return terms.sum(-1).mean()


def difference(s, t):
    """The first term would be an argument of the op."""
    d = s * 1.0
    d -= t
    return (d * d).mean()


def difference_that_is_read(s, t):
    d = s * 1.0
    d -= t
    return (d * d).mean() + d.detach().abs().amax()


def changed_after_the_sum(s, t):
    q, log_p = F.softmax(t, -1), F.log_softmax(s, -1)
    terms = q * log_p
    terms -= q * F.log_softmax(t, -1)
    terms.mul_(2)
    return -terms.sum(-1).mean()


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (difference, None),
        (difference_that_is_read, None),
        (changed_after_the_sum, None),
        (read_before, None),
        (view_written, None),
        (argument_written, "cross_entropy"),
        (written_twice, "softmax_kl_div"),
        (wider_term, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_sums_over_their_first_term(function, op):
    def leaves():
        return torch.linspace(-2, 2, 60).view(6, 10).sin().requires_grad_(), torch.eye(6, 10)

    report = compile_losses.explain(function, *leaves())
    rewritten = [site.op for site in report.losses if site.status == "rewritten"]
    assert rewritten == ([] if op is None else [op]), str(report)
    torch._dynamo.reset()
    compiled = torch.compile(
        function, backend="compile_losses", options={"inner_backend": "aot_eager"}
    )
    results = []
    for each in (compiled, function):
        s, t = leaves()
        loss = each(s, t)
        results.append((loss.detach(), *torch.autograd.grad(loss, s), t))
    torch.testing.assert_close(*results)


@pytest.mark.usefixtures("no_code", "chunks")
def test_bias_that_is_added_in_place():
    """It is the layer's, unless something else reads the layer's output."""

    def loss(h, w, t, tw, labels):
        logits = F.linear(h, w)
        logits += t.mean((0, 1)).mean() * w.detach().sum(1)
        return hard(logits, labels)

    def read_before(h, w, t, tw, labels):
        logits = F.linear(h, w)
        largest = logits.detach().amax()
        logits += w.detach().sum(1)
        return hard(logits, labels) + largest

    inputs = problem()
    for function, op in (loss, "linear_cross_entropy"), (read_before, "cross_entropy"):
        check(function, inputs)
        found = [site.op for site in compile_losses.explain(function, *inputs).losses]
        assert found == [op]
