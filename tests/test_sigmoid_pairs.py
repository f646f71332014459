"""The binary cross entropies of all numbers of a matrix, and their gradient in its place."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from compile_losses import library
from tests.accuracy import assert_accurate

fused = torch.ops.fused
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
#: Tiles of 64 rows and of 256 to 1024 columns, and what is left beside them.
SHAPES = [(1, 1), (5, 3), (70, 530), (33, 1031), (3, 1100), (128, 512)]
IMPLEMENTATIONS = {
    "kernel": fused.sigmoid_pairs_,
    "body": library.BODIES[fused.sigmoid_pairs_.default],
}


def problem(shape, dtype, device, *, labels, bias):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows, columns = shape
    x = (6 * torch.randn(shape, device=device)).to(dtype)
    target = torch.randint(-1, columns, (rows,), device=device)
    if labels:
        target = torch.rand(shape, device=device) > 0.7
    given = torch.randn(columns, dtype=wide, device=device) if bias else None
    return x, target, given, torch.tensor(0.3, dtype=wide, device=device)


def reference(x, target, bias, factor):
    x = x.detach().requires_grad_()
    own = target
    if target.dim() == 1:
        own = target.unsqueeze(1) == torch.arange(x.shape[1], device=x.device)
    biased = x if bias is None else x + bias
    loss = -F.logsigmoid(torch.where(own, biased, -biased)).sum()
    (gradient,) = torch.autograd.grad(loss, x, factor.to(loss.dtype))
    return loss.detach(), gradient


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers(shape, dtype, labels, bias, name, device):
    x, target, given, factor = problem(shape, dtype, device, labels=labels, bias=bias)
    exact = reference(x.double(), target, None if given is None else given.double(), factor)
    eager = reference(x.to(factor.dtype), target, given, factor)
    written = x.clone()
    loss = IMPLEMENTATIONS[name](written, target, given, factor)
    assert_accurate(loss, eager[0], exact[0], "loss")
    like = torch.finfo(dtype).eps * factor.item()  # of the smallest gradients torch rounds as much
    assert_accurate(written, eager[1].to(dtype), exact[1], "gradient", like=like)
    again = x.clone()
    assert torch.equal(IMPLEMENTATIONS[name](again, target, given, factor), loss)
    assert torch.equal(again, written)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e4, -1e4])
def test_special_values(value, name, device):
    x, target, _, factor = problem((5, 70), torch.float32, device, labels=False, bias=False)
    target[:] = torch.arange(5, device=device)
    x[2, 2], x[3, 40] = value, value
    right = reference(x, target, None, factor)
    loss = IMPLEMENTATIONS[name](x, target, None, factor)
    torch.testing.assert_close(loss, right[0], equal_nan=True)
    torch.testing.assert_close(x, right[1], equal_nan=True)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rows_that_do_not_begin_at_a_packet(name, device):
    x, target, _, factor = problem((70, 530), torch.bfloat16, device, labels=False, bias=False)
    whole = torch.zeros(70, 601, dtype=torch.bfloat16, device=device)
    part = whole[:, 3:533]
    part.copy_(x)
    loss = IMPLEMENTATIONS[name](part, target, None, factor)
    assert torch.equal(loss, IMPLEMENTATIONS[name](x, target, None, factor))
    assert torch.equal(part, x)
    assert whole[:, :3].count_nonzero() == whole[:, 533:].count_nonzero() == 0


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_no_numbers(shape, device):
    x, _, _, factor = problem((1, 1), torch.float32, device, labels=False, bias=False)
    target = torch.full(shape[:1], -1, device=device)
    assert fused.sigmoid_pairs_(x.new_empty(shape), target, None, factor) == 0


@pytest.mark.parametrize("labels", [False, True])
def test_op(labels, device):
    arguments = problem((20, 30), torch.float32, device, labels=labels, bias=True)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(fused.sigmoid_pairs_.default, arguments, test_utils=utils)


def test_errors():
    x, target, bias, factor = problem((5, 7), torch.float32, "cpu", labels=False, bias=True)
    for change, text in (
        ({0: x[0]}, r"expected input of shape \[rows, columns\]"),
        ({0: x.t()}, "dense|expected target"),
        ({1: target[:2]}, r"expected target to be.*int64 \[5\]"),
        ({1: target.float()}, r"expected target to be.*bool \[5, 7\]"),
        ({1: target + 7}, "out of bounds for 7 columns"),
        ({2: bias[:3]}, r"expected bias to be"),
        ({3: bias}, "expected factor to hold one number|one number"),
    ):
        arguments = [change.get(i, a) for i, a in enumerate((x, target, bias, factor))]
        with pytest.raises(RuntimeError, match=text):
            fused.sigmoid_pairs_(*arguments)
