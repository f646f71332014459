"""Calls that torch refuses when they run, though its fakes do not: compiled they raise, too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import compile_losses
from compile_losses import functional, linear
from tests.graphs import Compiled

pytestmark = pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")

ROWS, HIDDEN, CLASSES = 72, 8, 37
MIXED = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
]
HEADS = {
    "linear": lambda h, w: F.linear(h, w),
    "matmul": lambda h, w: h @ w.t(),
    "mm": lambda h, w: torch.mm(h, w.t()),
    "addmm": lambda h, w: torch.addmm(w.new_zeros(CLASSES), h, w.t()),
    "addmm, bias like input": lambda h, w: torch.addmm(h.new_zeros(CLASSES), h, w.t()),
    "inner": lambda h, w: torch.inner(h, w),
    "bias": lambda h, w: F.linear(h, w.to(h.dtype), w[:, 0]),
}
LOSSES = {
    "mean": lambda x, t: F.cross_entropy(x, t),
    "by row": lambda x, t: F.cross_entropy(x, t, reduction="none").square().sum(),
    "statistics": lambda x, t: F.cross_entropy(x, t) + x.logsumexp(-1).square().mean(),
    "entropy": lambda x, t: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
}


def problem(of_input, of_weight):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(ROWS, HIDDEN, generator=generator).to(of_input).requires_grad_()
    w = torch.randn(CLASSES, HIDDEN, generator=generator).to(of_weight).requires_grad_()
    return h, w, torch.randint(CLASSES, (ROWS,), generator=generator)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("by_backend", [True, False], ids=["backend", "enable"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("head", HEADS)
def test_mixed_dtypes(head, loss, by_backend):
    def step(h, w, t):
        return LOSSES[loss](HEADS[head](h, w), t)

    for dtypes in MIXED:
        inputs = problem(*dtypes)
        with pytest.raises(RuntimeError):
            step(*inputs)
        torch._dynamo.reset()
        if by_backend:
            with pytest.raises(RuntimeError):
                Compiled(step)(*inputs)
        else:
            with compile_losses.enable(), pytest.raises(RuntimeError):
                torch.compile(step)(*inputs)


def test_the_reason():
    """A part whose head torch refuses is declined with its dtypes."""
    h, w, t = problem(torch.float32, torch.bfloat16)
    compiled = Compiled(lambda h, w, t: F.cross_entropy(F.linear(h, w), t))
    with pytest.raises(RuntimeError):
        compiled(h, w, t)
    (site,) = compiled.sites
    assert "a linear layer of float32 and bfloat16 without autocast" in site.reason


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("where", ["around", "inside", "inside a checkpoint", "around one"])
def test_autocast_casts(where, loss):
    """What autocast casts is taken as before: the head's logits are not held."""

    def head_and_loss(h, w, t):
        return LOSSES[loss](F.linear(h, w), t)

    def under_autocast(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return head_and_loss(*inputs)

    def in_checkpoint(*inputs):
        return checkpoint(under_autocast, *inputs, use_reentrant=False)

    def around_checkpoint(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(head_and_loss, *inputs, use_reentrant=False)

    steps = {
        "around": head_and_loss,
        "inside": under_autocast,
        "inside a checkpoint": in_checkpoint,
        "around one": around_checkpoint,
    }
    step, inputs = steps[where], problem(torch.float32, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
        compiled = Compiled(step)
        found, expected = compiled(*inputs), step(*inputs)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert any(s.op.startswith("linear_") and s.status == "rewritten" for s in compiled.sites)


def test_autocast_that_has_ended():
    def step(h, w, t):
        with torch.autocast("cpu", torch.bfloat16):
            other = F.linear(h, w).sum()
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            return F.cross_entropy(F.linear(h, w), t) + other

    inputs = problem(torch.float32, torch.bfloat16)
    for function in (step, Compiled(step)):
        with pytest.raises(RuntimeError):
            function(*inputs)


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
def test_lazy_logits(dtypes):
    h, w, t = problem(*dtypes)

    def model(h, w, t):
        logits = F.linear(h, w)
        return F.cross_entropy(logits, t), logits

    with pytest.raises(RuntimeError):
        Compiled(model, lazy_logits=True)(h, w, t)


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
@pytest.mark.parametrize(
    "function",
    [linear.linear_cross_entropy, torch.ops.fused.linear_cross_entropy],
    ids=["linear", "op"],
)
def test_called_heads(function, dtypes):
    h, w, t = problem(*dtypes)
    with pytest.raises(RuntimeError):
        function(h, w, t)


#: Losses whose arguments torch refuses: a function of F or of ours, and its arguments.
REFUSED = {
    "cross_entropy, weight": lambda f: f.cross_entropy(
        torch.randn(4, 5), torch.arange(4), torch.ones(5, dtype=torch.float64)
    ),
    "cross_entropy, int32 target": lambda f: f.cross_entropy(
        torch.randn(4, 5), torch.arange(4, dtype=torch.int32)
    ),
    "cross_entropy, out of range": lambda f: f.cross_entropy(
        torch.randn(4, 5), torch.arange(4) + 3
    ),
    "nll_loss, weight": lambda f: f.nll_loss(
        torch.randn(4, 5), torch.arange(4), torch.ones(5, dtype=torch.float64)
    ),
    "nll_loss, int32 target": lambda f: f.nll_loss(
        torch.randn(4, 5), torch.arange(4, dtype=torch.int32)
    ),
    "binary, int target": lambda f: f.binary_cross_entropy_with_logits(
        torch.randn(4), torch.ones(4, dtype=torch.int64)
    ),
    "binary, sizes": lambda f: f.binary_cross_entropy_with_logits(torch.randn(4), torch.ones(3)),
    "mse, sizes": lambda f: f.mse_loss(torch.randn(4), torch.randn(3)),
    "smooth_l1, sizes": lambda f: f.smooth_l1_loss(torch.randn(4), torch.randn(3)),
    "kl_div, sizes": lambda f: f.kl_div(torch.randn(4), torch.randn(3), reduction="sum"),
}


def raises(function):
    try:
        function()
    except (RuntimeError, ValueError, IndexError):
        return True
    return False


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REFUSED)
def test_losses(name):
    """Inductor's code of some of these losses does not check what torch's kernels check."""
    call = REFUSED[name]
    assert raises(lambda: call(F))
    assert raises(lambda: call(functional))
    by_stock = raises(torch.compile(lambda: call(F)))
    assert raises(Compiled(lambda: call(F))) >= by_stock
