"""Distillation without the terms of infinite logits, of MiniLLM, DistiLLM and torchtune."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from tests.corpus.distilled import BOTH, STUDENT, hard, problem, taught
from tests.corpus.finite import (
    CHUNKED,
    FORMS,
    NEAR_MISSES,
    both_directions,
    forward,
    forward_terms,
    mask_of_the_teacher,
    mask_that_is_read,
    of_tokens,
    other_masks,
    reverse_beside_labels,
    reverse_in_place,
    with_padding,
)
from tests.heads import IN_THE_FORWARD, LOGITS, check_accuracy, sites_of
from tests.heads import check as check_outcome
from tests.heads import outcome as outcome_of
from tests.linear_problems import largest_allocation

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


outcome = partial(outcome_of, trained=2)
check = partial(check_outcome, trained=2, tolerance=1e-12)


@pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")
class TestHeads:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("name", FORMS)
    def test_gradients_in_the_forward(self, name):
        inputs = problem()
        (site,) = check(FORMS[name], inputs, verify=True)
        assert site.plan[0] == IN_THE_FORWARD
        assert "not verified" not in site.notes
        assert site.reason.startswith(BOTH)
        assert "finite logits" in site.reason

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
        assert "the teacher's logits are held: something else reads them" in site.reason


@pytest.mark.usefixtures("no_code", "chunks")
@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(function):
    """Their heads stay, and results are torch's."""
    inputs = problem()
    assert check(function, inputs, inner_backend="eager") == []


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


@pytest.mark.sampled(2)
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
