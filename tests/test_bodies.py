"""Losses in the graphs of higher-order ops: rewritten where AOTAutograd traces those in place, and
reported with a reason elsewhere; the same for both ways into torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import compile_losses
from tests.results import count_fused_calls

APART = "whose graph torch differentiates and compiles apart"


class Halved(torch.autograd.Function):
    """A loss inside an autograd.Function, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x, target):
        ctx.save_for_backward(x, target)
        return F.mse_loss(x, target)

    @staticmethod
    def backward(ctx, grad_output):
        x, target = ctx.saved_tensors
        return grad_output * (x - target), None


@torch.compiler.nested_compile_region
def region(x, target):
    return F.smooth_l1_loss(x, target)


def checkpointed(x, target):
    return checkpoint(lambda x, t: F.mse_loss(x.sin(), t), x, target, use_reentrant=False)


def checkpointed_with_writes(x, target):
    """The graph around the body writes to what the body's loss reads."""
    p = x * 2
    loss = checkpoint(lambda p, t: F.l1_loss(p, t), p, target, use_reentrant=False)
    p.data.mul_(-2)
    return loss


def checkpointed_after_writes(x, target):
    p = x * 2
    p.mul_(2)
    return checkpoint(lambda p, t: F.l1_loss(p, t), p, target, use_reentrant=False)


def branches(x, target):
    def as_it_is(x, t):
        return F.mse_loss(x, t)

    def of_sines(x, t):
        return F.mse_loss(x.sin(), t)

    return torch.cond(target.sum() > 0, as_it_is, of_sines, (x, target))


def halved(x, target):
    return Halved.apply(x * 1, target)


def twice(x, target):
    return region(x, target) + region(x * 2, target)


PROGRAMS = {
    "checkpointed": (checkpointed, "mse_loss", None),
    "checkpointed, then changed": (checkpointed_with_writes, "l1_loss", "after the loss"),
    "checkpointed, changed before": (checkpointed_after_writes, "l1_loss", None),
    "cond": (branches, "mse_loss", f"inside cond, {APART}"),
    "autograd.Function": (halved, "mse_loss", "inside an autograd.Function"),
    "nested region": (twice, "smooth_l1_loss", f"inside invoke_subgraph, {APART}"),
}


def outcome(function, x, target):
    x = x.detach().clone().requires_grad_()
    loss = function(x, target)
    (gradient,) = torch.autograd.grad(3 * loss, x)
    return loss.detach(), gradient


def run_compiled(function, way, *inputs):
    torch._dynamo.reset()
    if way == "backend":
        return outcome(torch.compile(function, backend="compile_losses"), *inputs)
    with compile_losses.enable():
        return outcome(torch.compile(function), *inputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["backend", "enable"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_bodies(name, way, no_code):
    function, op, reason = PROGRAMS[name]
    x, target = torch.randn(8, 12), torch.randn(8, 12)
    torch._dynamo.reset()
    expected = outcome(torch.compile(function), x, target)
    with fresh_cache():  # a loss this small is decomposed: it is seen in tracing alone
        calls = count_fused_calls(
            lambda: torch.testing.assert_close(run_compiled(function, way, x, target), expected)
        )
    assert (calls > 0) is (reason is None)
    torch._dynamo.reset()
    report = compile_losses.explain(function, x.requires_grad_(), target)
    assert report.sites
    for site in report.sites:
        assert site.op == op
        assert site.status == ("rewritten" if reason is None else "declined")
        assert reason is None or reason in site.reason
    assert not report.errors


class Classifier(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 40, bias=False)
        self.checkpoints = checkpoints

    def loss(self, x, target):
        return F.cross_entropy(self.head(self.body(x).tanh()), target)

    def forward(self, x, target):
        if self.checkpoints:
            return checkpoint(self.loss, x, target, use_reentrant=False)
        return self.loss(x, target)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["backend", "enable"])
@pytest.mark.parametrize("budget", [None, 0.9, 0.5, 0.0])
def test_linear_cross_entropy_is_computed_once(budget, way, graphs, chunks, no_code):
    """In a checkpointed region and with an activation memory budget: its gradients are saved."""
    model = Classifier(budget is None)
    inputs = torch.randn(64, 16), torch.randint(40, (64,))

    def step(function):
        model.zero_grad()
        loss = function(*inputs)
        (2 * loss).backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    expected = step(model)
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=1.0 if budget is None else budget):
        if way == "backend":
            actual = step(torch.compile(model, backend="compile_losses"))
        else:
            with compile_losses.enable():
                actual = step(torch.compile(model))
    torch.testing.assert_close(actual, expected)
    calls = [
        graph.count("fused.linear_cross_entropy_with_grad.default]") for graph in graphs["post"]
    ]
    # A budget of 0 has all computed again: the loss once more, and not its gradients.
    assert calls == ([0, 0] if budget == 0.0 else [1, 0])
    assert ("linear_cross_entropy_backward.default]" in graphs["post"][1]) is (budget == 0.0)


@pytest.mark.usefixtures("kernels_for_small_losses")
def test_memory_budget_is_not_filled_with_unit_gradients(graphs, no_code):
    """What a budget has the partitioner compute again, it would compute with its gradient."""
    model = Classifier(False)
    inputs = torch.randn(64, 16), torch.randint(40, (64,))
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        torch.compile(model, backend="compile_losses")(*inputs).backward()
    assert "with_grad" not in graphs["joint"][0]
    assert "fused.cross_entropy_forward" in graphs["joint"][0]
