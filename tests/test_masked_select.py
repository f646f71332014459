"""Logits and losses of tokens of which a mask selects some, as many as only data say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from tests.constants import set_constants

HIDDEN, CLASSES = 8, 50


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, no_code):
    set_constants(monkeypatch, least_rows=4, logits_bytes=1)


def selected_losses(h, w, y, mask):
    return torch.masked_select(F.cross_entropy(F.linear(h, w), y, reduction="none"), mask).mean()


def indexed_losses(h, w, y, mask):
    return F.cross_entropy(F.linear(h, w), y, reduction="none")[mask].sum() / mask.sum()


def selected_log_probs(h, w, y, mask):
    log_probs = F.linear(h, w).log_softmax(-1).gather(-1, y[:, None])
    return -torch.masked_select(log_probs, mask[:, None]).mean()


def selected_logits(h, w, y, mask):
    logits = torch.masked_select(F.linear(h, w), mask[:, None]).view(-1, w.shape[0])
    return F.cross_entropy(logits, y[mask])


OF_LOSSES = (selected_losses, indexed_losses, selected_log_probs)


def problem(rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    h, w = (torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in (rows, CLASSES))
    mask = torch.arange(rows) % 3 != 0
    return h.requires_grad_(), w.requires_grad_(), torch.arange(rows) * 7 % CLASSES, mask


def outcome(step, given):
    loss = step(*given)
    return [loss.detach(), *torch.autograd.grad(loss, given[:2])]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("whole", [False, True], ids=["broken", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [*OF_LOSSES, selected_logits], ids=lambda f: f.__name__)
def test_numbers(step, dtype, whole):
    """With a graph break at the selection, and without; later lengths are symbols."""
    close = {} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-3}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=whole):
        torch._dynamo.reset()
        compiled = torch.compile(step, backend="compile_losses")
        for rows in (24, 36, 48):
            given = problem(rows, dtype)
            torch.testing.assert_close(outcome(compiled, given), outcome(step, given), **close)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("whole", [False, True], ids=["broken", "whole"])
@pytest.mark.parametrize("step", OF_LOSSES, ids=lambda f: f.__name__)
def test_selected_losses_keep_their_head(step, whole):
    """Their gradients come from another graph, or depend on how many are selected."""
    given = problem(24, torch.float32)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=whole):
        for options, plan in (({}, "with its logits"), ({"prefer_memory": True}, "computed again")):
            compiled = torch.compile(step, backend="compile_losses", options=options)
            (site,) = compile_losses.explain(compiled, *given).losses
            assert site.op == "linear_cross_entropy"
            assert plan in site.plan[0]


def test_selected_logits():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (site,) = compile_losses.explain(selected_logits, *problem(24, torch.float32)).losses
    assert "masked_select picks single logits" in site.reason
    assert "the graph breaks there, and lazy_logits takes them with their layer" in site.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lazy_logits(dtype):
    """As the reason says."""
    options = {"lazy_logits": True}
    compiled = torch.compile(selected_logits, backend="compile_losses", options=options)
    close = {} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-3}
    for rows in (24, 36, 48):
        given = problem(rows, dtype)
        (site,) = compile_losses.explain(compiled, *given).losses
        assert (site.op, site.status) == ("linear_cross_entropy", "rewritten")
        torch.testing.assert_close(
            outcome(compiled, given), outcome(selected_logits, given), **close
        )
