"""What passes ask of an ATen graph, which is answered anew once the graph has changed."""

from __future__ import annotations

import torch

from compile_losses.graphs import emit, replace
from tests.passes.graphs import aten, fused, indexed, of_aten, one


def step(x, t, tangents_1):
    loss = fused.mse_loss_forward(x, t, None, 1, torch.float32)
    gradient, _, _ = fused.mse_loss_backward(tangents_1, x, t, None, 1, True, False, False)
    return loss, x.exp(), gradient


def graph():
    gm = of_aten(step, torch.randn(3), torch.randn(3), torch.tensor(1.0))
    return gm, indexed(gm)


def test_answers():
    gm, found = graph()
    assert [(name, part) for _, name, part in found.calls] == [
        ("mse_loss", "forward"),
        ("mse_loss", "backward"),
    ]
    (loss,) = found.losses
    assert (loss.name, loss.input.name, len(loss.backwards)) == ("mse_loss", "x_1", 1)
    (tangent,) = (n for n in gm.graph.find_nodes(op="placeholder") if "tangents" in n.name)
    assert {tangent, *loss.backwards} < found.backward
    assert loss.forward not in found.backward
    assert [n.name for n in found.outputs] == [loss.forward.name, "exp", found.outputs[2].name]
    assert found.forward_outputs == found.outputs[:2]


def test_answers_are_kept_until_the_graph_changes():
    gm, found = graph()
    kept = found.losses
    assert found.losses is kept
    exp = one(gm.graph, "aten.exp")
    replace(exp, emit(exp, aten.neg.default, exp.args))
    assert found.losses is not kept
    assert [n.name for n in found.forward_outputs][1] == "neg_default"
