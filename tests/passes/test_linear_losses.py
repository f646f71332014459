"""Losses of a layer's output: where their gradients are computed, and with which factor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.lower.linear_losses import numbers_of_rows
from tests.corpus.capture import inputs_for, planned
from tests.passes import decisions
from tests.passes.graphs import compiled, fused, indexed, of_aten, one, text
from tests.passes.outcomes import assert_same, results_of

F64 = torch.float64
ROWS, HIDDEN, CLASSES = 12, 3, 40


def given(*, frozen=False):
    h = torch.randn(ROWS, HIDDEN, dtype=F64, requires_grad=True)
    w = torch.randn(CLASSES, HIDDEN, dtype=F64, requires_grad=not frozen)
    return h, w, torch.randint(CLASSES, (ROWS,)), torch.rand(ROWS, dtype=F64)


def each(h, w, t):
    return F.cross_entropy(F.linear(h, w), t, reduction="none")


STEPS = {
    "mean": lambda h, w, t, m: F.cross_entropy(F.linear(h, w), t),
    "factor": lambda h, w, t, m: 0.25 * F.cross_entropy(F.linear(h, w), t),
    "by a number": lambda h, w, t, m: F.cross_entropy(F.linear(h, w), t, reduction="sum") / m.sum(),
    "squared": lambda h, w, t, m: F.cross_entropy(F.linear(h, w), t) ** 2,
    "twice": lambda h, w, t, m: (lambda x: x + x.square())(F.cross_entropy(F.linear(h, w), t)),
    "frozen layer": lambda h, w, t, m: F.cross_entropy(F.linear(h, w.detach()), t),
    "masked": lambda h, w, t, m: (each(h, w, t) * m).sum(),
    "masked, frozen layer": lambda h, w, t, m: (each(h, w.detach(), t) * m).sum(),
    "across rows": lambda h, w, t, m: (each(h, w, t) * m).sum() ** 2,
    "rows returned": lambda h, w, t, m: each(h, w, t),
    "divergence": lambda h, w, t, m: F.kl_div(
        F.linear(h, w).log_softmax(-1), F.linear(h.detach(), w.detach() + 1).softmax(-1),
        reduction="batchmean",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_choices(name):
    found = compiled(STEPS[name], *given())
    decisions.check("linear", name, decisions.planned(found.decisions))
    inputs = inputs_for(found.joint)
    assert_same(results_of(found.planned, inputs), results_of(found.joint, inputs))


@pytest.mark.parametrize("name", ["mean", "masked", "across rows", "rows returned"])
def test_memory_is_preferred(name):
    found = compiled(STEPS[name], *given())
    gm = found.joint
    inputs = inputs_for(gm)
    right = results_of(gm, inputs)
    choices = [d.choice for d in planned(gm, prefer_memory=True)]
    expected = "logits computed again" if "rows" in name else "gradient in forward"
    assert choices[0].startswith(expected)
    gm.recompile()
    assert_same(results_of(gm, inputs), right)
    assert "aten.mm" not in text(gm.graph) or "rows" not in name


@pytest.mark.parametrize("name", ["mean", "masked"])
def test_without_a_budget(name):
    """Nothing is saved: the logits are computed again."""
    gm = compiled(STEPS[name], *given()).joint
    inputs = inputs_for(gm)
    right = results_of(gm, inputs)
    with torch._functorch.config.patch(activation_memory_budget=0):
        first, *_ = planned(gm)
    gm.recompile()
    assert_same(results_of(gm, inputs), right)
    assert "activation memory budget" in f"{first.choice} {first.reason}"
    assert "with_grad" not in text(gm.graph)


def test_float16():
    options = (None, None, 0, -100, 0.0, None, 0.0, torch.float16)

    def joint(h, w, t, tangents_1):
        losses = fused.linear_cross_entropy_forward(h, w, t, *options)
        g = tangents_1.expand(ROWS)
        return losses, *fused.linear_cross_entropy_backward(
            g, h, w, t, *options, True, True, False
        )[:2]

    tensors = [t.detach().half() for t in given()[:2]]
    gm = of_aten(joint, *tensors, given()[2], torch.tensor(1.0).half())
    first, *_ = planned(gm)
    assert (first.choice, "underflow" in first.reason) == ("logits computed again", True)


def test_a_factor_is_taken():
    """The gradients are those of the product; only the tangent is left to scale them by."""
    gm = compiled(STEPS["factor"], *given()).planned
    call = one(gm.graph, "fused.linear_cross_entropy_with_grad")
    assert call.kwargs["grad_output"].target is torch.ops.aten.full.default
    scales = [n for n in gm.graph.nodes if n.target is fused.scale.default]
    assert {n.args[1].op for n in scales} == {"placeholder"}


def test_few_numbers_of_each_row():
    gm = compiled(lambda h, w, t, m: F.mse_loss(each(h, w, t), m), *given()).joint
    losses = [n for n in gm.graph.nodes if "mse_loss_forward" in str(n.target)]
    inputs = [n.args[0] for n in losses]
    assert numbers_of_rows(indexed(gm), inputs) == inputs
    assert numbers_of_rows(indexed(gm), gm.graph.find_nodes(op="placeholder")) == []
