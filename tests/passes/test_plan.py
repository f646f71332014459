"""What becomes of each loss, by what computes its input and by what reads its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.lower.fused_calls import find_losses
from compile_losses.lower.plan import costs, feeds_of
from compile_losses.torch_internals.inductor import get_default_op_list
from tests.corpus.capture import planned
from tests.passes import decisions
from tests.passes.graphs import compiled, fused, indexed, of_aten


def given():
    x, w = torch.randn(64, 16), torch.randn(48, 16, requires_grad=True)
    return x, w, torch.randint(48, (64,)), torch.randn(64, 48)


LOSSES = {
    "cross entropy": lambda y, t, r: F.cross_entropy(y, t),
    "mse": lambda y, t, r: F.mse_loss(y, r),
    "huber": lambda y, t, r: F.huber_loss(y, r, reduction="sum"),
}
#: Between a layer and its loss.
HEADS = {
    "linear": lambda y: y,
    "view": lambda y: y.view(8, 8, 48).view(-1, 48),
    "gelu": F.gelu,
    "soft-cap": lambda y: torch.tanh(y / 30) * 30,
    "slice": lambda y: torch.cat([y, y])[:64],
    "cast": lambda y: y.bfloat16().float(),
    "layer norm": lambda y: F.layer_norm(y, (48,)),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("loss", LOSSES)
def test_heads(loss, head):
    def step(x, w, t, r):
        # Two readers of the product keep a head's op out of this.
        return LOSSES[loss](HEADS[head](x @ w.t() + w[:, 0]), t, r)

    decisions.check(
        "plan", f"{loss} of {head}", decisions.planned(compiled(step, *given()).decisions)
    )


SURROUNDINGS = {
    "returned": lambda y, t, r: (F.mse_loss(y, r), y),
    "unreduced": lambda y, t, r: (F.mse_loss(y, r, reduction="none") * r).mean(),
    "two of one input": lambda y, t, r: F.mse_loss(y, r) + F.l1_loss(y, r),
    "twice": lambda y, t, r: F.mse_loss(y, r) + F.mse_loss(y, r),
    "with a factor": lambda y, t, r: 0.25 * F.mse_loss(y, r),
    "squared": lambda y, t, r: F.mse_loss(y, r) ** 2,
    "of both": lambda y, t, r: F.mse_loss(y, y.flip(0)),
    "weighted": lambda y, t, r: F.mse_loss(y, r, weight=r.abs()),
    "without gradients": lambda y, t, r: F.mse_loss(y.detach(), r) + 0 * y.sum(),
    "broadcast": lambda y, t, r: F.mse_loss(y[:1], r),
    "an op's name": lambda y, t, r: torch.ops.fused.l1_loss(y, r),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings(name):
    def step(x, w, t, r):
        return SURROUNDINGS[name](x @ w.t(), t, r)

    found = decisions.planned(compiled(step, *given()).decisions)
    decisions.check("plan", name, found)


def test_inference():
    """Without a backward a kernel reads its arguments once."""
    x, w, *others = given()
    found = compiled(lambda x, w, t, r: F.mse_loss(x @ w.t(), r), x, w.detach(), *others)
    assert found.backward is None
    assert [d.choice for d in found.decisions] == ["decomposed"]
    assert "so little arithmetic" in found.decisions[0].reason


def joint(x, t, tangents_1):
    loss = fused.mse_loss_forward(x, t, None, 1, torch.float32)
    gradient, _, _ = fused.mse_loss_backward(tangents_1, x, t, None, 1, True, False, False)
    return loss, gradient


def test_costs():
    """A kernel reads both arguments once and writes the gradient; torch's ops read them twice."""
    gm = of_aten(joint, torch.randn(64, 48), torch.randn(64, 48), torch.tensor(1.0))
    (loss,) = find_losses(gm.graph)
    size = 64 * 48 * 4
    feeds = feeds_of(loss, get_default_op_list())
    assert [feed.nbytes for feed in feeds] == [size, size]
    kernel, stock = costs(loss, indexed(gm), feeds, in_forward=True)
    assert (kernel.moved, stock.moved) == (3 * size, 5 * size)
    assert (kernel.held, stock.held) == (size, size)
    kernel, _ = costs(loss, indexed(gm), feeds, in_forward=False)
    assert kernel.moved == 5 * size


def test_a_graph_without_losses():
    gm = of_aten(lambda x: x.sin(), torch.ones(3))
    assert planned(gm) == []


def test_elementwise_losses_can_be_left_out():
    def loss(x, t, tangents_1):
        d = x - t
        return (d * d + 1).sqrt().sum(), tangents_1 * d / (d * d + 1).sqrt()

    inputs = torch.randn(64, 48), torch.randn(64, 48), torch.tensor(1.0)
    assert [d.choice for d in planned(of_aten(loss, *inputs))] == ["gradient in forward"]
    assert planned(of_aten(loss, *inputs), losses={"mse_loss"}) == []
