"""What the report of a loss with held logits says that a user can do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses.report.explanation import explain_call
from tests.corpus.between import NEAR_MISSES
from tests.corpus.heads import CLASSES, flat, head
from tests.heads import small_chunks as small_chunks  # a fixture of this file, too

HINT = "{'prefer_memory': True} holds none of its logits"


def capped(z):
    return z * torch.rsqrt(z * z + 225)


TAKEN = {
    "a cap with a square root": (
        torch.bfloat16, lambda h, w, b, t: flat(capped(F.linear(h, w).float()), t),
    ),
    "the same, wide": (torch.float32, lambda h, w, b, t: flat(15 * capped(F.linear(h, w)), t)),
    "an offset after a cast": (
        torch.bfloat16,
        lambda h, w, b, t: flat(23 * torch.sigmoid((F.linear(h, w).float() + 5) / 7.5), t),
    ),
    "soft labels": (
        torch.float32,
        lambda h, w, b, t: F.kl_div(F.linear(h, w).log_softmax(-1), F.linear(
            h.detach(), w.detach()).softmax(-1).square(), reduction="batchmean"),
    ),
    "bounded": (torch.float32, lambda h, w, b, t: flat(F.linear(h, w).clamp(-1, 1), t)),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TAKEN)
def test_regions(name):
    """The hint is there if the option takes the loss, and only then."""
    dtype, function = TAKEN[name]
    inputs = head(dtype)
    (site,) = explain_call(function, inputs).losses
    assert site.reason.endswith(HINT)
    (taken,) = explain_call(function, inputs, options={"prefer_memory": True}).losses
    assert taken.plan[0].startswith("logits by chunks")
    assert HINT not in taken.reason


OTHERS = {
    "taken": lambda h, w, b, t: flat(F.linear(h, w), t),
    "a deviation is logged": lambda h, w, b, t: flat(x := F.linear(h, w), t) + x.detach().std(),
    "no layer": lambda h, w, b, t: flat((h @ w.t()).cumsum(1), t) + F.mse_loss(b, b * 2),
    "two layers": NEAR_MISSES["two layers"][0],
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_promise(name):
    sites = explain_call(OTHERS[name], head()).losses
    assert sites
    assert not any("prefer_memory" in site.reason for site in sites)


def test_by_the_door():
    def step(h, w, b, t):
        return F.cross_entropy(F.linear(h, w).clamp(-1, 1).view(-1, CLASSES), t.view(-1))

    try:
        compile_losses.enable()
        (site,) = compile_losses.explain(step, *head()).losses
    finally:
        compile_losses.disable()
    assert site.reason.endswith("enable(prefer_memory=True) holds none of its logits")


EVALUATED = {
    "unreduced": lambda h, w, b, t: F.cross_entropy(
        F.linear(h, w).view(-1, CLASSES), t.view(-1), reduction="none"
    ),
    "perplexity": lambda h, w, b, t: flat(F.linear(h, w), t).exp(),
    "the mean is logged": lambda h, w, b, t: flat(x := F.linear(h, w), t) + x.mean(),
    "the deviation is logged": lambda h, w, b, t: flat(x := F.linear(h, w), t) + x.std(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_holds_no_logits(name, dtype):
    with torch.no_grad():
        (site,) = explain_call(EVALUATED[name], head(dtype)).losses
    assert site.op in ("linear_cross_entropy", "linear_row_statistics")


def test_a_number_of_the_logits_is_none_of_them():
    def step(h, w, b, t):
        logits = F.linear(h, w)
        return flat(logits, t), logits.norm()

    with torch.no_grad():
        (site,) = explain_call(step, head()).losses
    assert "are returned" not in site.reason
    assert "norm (" in site.reason
