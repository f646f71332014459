"""The passes on a Dynamo graph: which losses are taken, and which node takes part in one only."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_losses.recognize import rewrite_graph
from compile_losses.request import Request
from compile_losses.torch_internals.graphs import EXAMPLE
from tests.passes.graphs import dynamo, name_of


def classes():
    return torch.randn(4, 6, requires_grad=True), torch.randint(6, (4,))


def rewritten(function, *inputs, **options):
    gm = dynamo(function, *inputs).gm
    report = rewrite_graph(gm.graph, request=Request.of(**options), module=gm)
    calls = [name_of(n.target) for n in gm.graph.nodes if n.op.startswith("call")]
    assert all(EXAMPLE in n.meta for n in gm.graph.nodes if n.op.startswith("call"))
    return calls, [(site.op, site.status) for site in report.sites], report


def test_the_outermost_spelling_takes_all_of_its_nodes():
    calls, sites, _ = rewritten(lambda x, t: F.nll_loss(x.log_softmax(1), t), *classes())
    assert calls == ["fused.cross_entropy"]
    assert sites == [("cross_entropy", "rewritten")]


def test_sites_are_in_the_order_of_the_graph():
    def step(x, t):
        return F.cross_entropy(x, t) + F.mse_loss(x.sum(1), t.float())

    _, sites, _ = rewritten(step, *classes())
    assert sites == [("cross_entropy", "rewritten"), ("mse_loss", "rewritten")]


def test_losses_that_nobody_chose():
    calls, sites, report = rewritten(
        lambda x, t: F.cross_entropy(x, t), *classes(), losses={"mse_loss"}
    )
    assert "fused.cross_entropy" not in calls
    assert sites == [("cross_entropy", "declined")]
    assert "not among the losses" in report.sites[0].reason


def test_a_part_of_what_is_declined():
    """The mean without nan stays torch's, and the loss in it is told of with that reason."""

    def step(x, t):
        return ((x - t) ** 2).nanmean() + 0 * F.mse_loss(x, t)

    inputs = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    calls, sites, report = rewritten(step, *inputs)
    assert sites == [("mse_loss", "declined"), ("mse_loss", "rewritten")]
    assert "nan" in report.sites[0].reason
    assert "nanmean" in calls


def test_a_loss_inside_of_an_autograd_function():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, t):
            ctx.save_for_backward(x, t)
            return F.mse_loss(x, t)

        @staticmethod
        def backward(ctx, grad):
            x, t = ctx.saved_tensors
            return 2 * grad * (x - t) / x.numel(), None

    inputs = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    _, sites, report = rewritten(Square.apply, *inputs)
    assert sites == [("mse_loss", "declined")]
    assert "inside an autograd.Function" in report.sites[0].reason


def test_verification_declines():
    _, sites, report = rewritten(lambda x, t: F.cross_entropy(x, t), *classes(), verify=True)
    assert sites == [("cross_entropy", "rewritten")]
    assert report.errors == []
