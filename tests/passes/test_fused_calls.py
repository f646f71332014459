"""The fused ops in an ATen graph, and which gradient belongs to which loss."""

from __future__ import annotations

import torch

from compile_losses.lower.fused_calls import (
    find_losses,
    fused_call,
    has_part,
    is_elementwise,
    result,
)
from tests.passes.graphs import fused, name_of, of_aten

MSE = (None, 1)
NEEDS = (True, False, False)


def given():
    return torch.randn(4, 5), torch.randn(4, 5), torch.tensor(2.0)


def joint(x, t, tangents_1):
    loss = fused.mse_loss_forward(x, t, *MSE, x.dtype)
    other = fused.mse_loss_forward(x, t, None, 2, x.dtype)
    return loss, other, fused.mse_loss_backward(tangents_1, x, t, *MSE, *NEEDS)[0]


def test_losses():
    gm = of_aten(joint, *given())
    mean, total = find_losses(gm.graph)
    assert (mean.name, len(mean.backwards), len(total.backwards)) == ("mse_loss", 1, 0)
    assert mean.input.name == "x_1"
    assert mean.value is mean.forward
    assert mean.is_elementwise
    (gradient,) = mean.gradients()
    assert gradient.args == (mean.backwards[0], 0)
    assert total.arguments["reduction"] == 2


def test_parts():
    gm = of_aten(joint, *given())
    found = [fused_call(node) for node in gm.graph.nodes]
    assert [f for f in found if f] == [
        ("mse_loss", "forward"), ("mse_loss", "forward"), ("mse_loss", "backward")
    ]  # fmt: skip
    assert has_part("mse_loss", "with_grad_")
    assert not has_part("linear_cross_entropy", "with_grad_")
    assert is_elementwise("huber_loss")
    assert not is_elementwise("cross_entropy")


def test_results():
    def step(x, t):
        return fused.cross_entropy_forward(x, t, None, 1, -100, 0.0, x.dtype)[:2]

    gm = of_aten(step, torch.randn(4, 5), torch.randint(5, (4,)))
    (call,) = (n for n in gm.graph.nodes if "cross_entropy" in name_of(n.target))
    assert result(call, 0).args == (call, 0)
    assert result(call, 7) is None
