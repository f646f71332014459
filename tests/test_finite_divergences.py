"""Distillation without the terms of infinite logits, of MiniLLM, DistiLLM and torchtune."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import compile_losses

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
