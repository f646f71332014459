"""Gradients over buffers that nothing else reads: the choice, the graph, and the numbers."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from compile_losses import implementations
from compile_losses.lower.gradient_in_forward import SAVED
from tests.corpus.capture import inputs_for, put_in_place
from tests.passes.graphs import aten, fused, of_aten, one, text
from tests.passes.outcomes import assert_same, results_of

ROWS, HIDDEN, CLASSES = 64, 4, 48
CE = (None, 1, -100, 0.0, torch.float32)


def weights(*shapes):
    return [torch.randn(shape) for shape in shapes]


def head():
    return *weights((ROWS, HIDDEN), (HIDDEN, CLASSES)), torch.randint(CLASSES, (ROWS,))


def check(function, *inputs, donated=()):
    """The choices; the numbers stay."""
    gm = of_aten(function, *inputs)
    given = inputs_for(gm)
    right = results_of(gm, given)
    decisions = put_in_place(gm, donated)
    gm.graph.lint()
    gm.recompile()
    assert_same(results_of(gm, given), right)
    return gm, [f"{d.choice}: {d.reason}".removesuffix(": ") for d in decisions]


def test_over_a_product():
    def forward(x, w, t):
        loss, unit = fused.cross_entropy_with_grad(x @ w, t, *CE)
        return loss, unit

    gm, choices = check(forward, *head())
    assert choices == ["in place"]
    assert_expected_inline(
        text(gm.graph),
        """\
mm = aten.mm(x_1, w_1)
cross_entropy_with_grad__default = fused.cross_entropy_with_grad_(mm, t_1, None, 1, -100, 0.0, torch.float32)
return (cross_entropy_with_grad__default, mm)""",
    )


def read_before(x, w, t):
    y = x @ w
    return *fused.cross_entropy_with_grad(y, t, *CE), y.amax(1)


def read_after(x, w, t):
    y = x @ w
    loss, unit = fused.cross_entropy_with_grad(y, t, *CE)
    return loss, unit, y.amax(1)


def read_after_by_a_view(x, w, t):
    y = x @ w
    loss, unit = fused.cross_entropy_with_grad(y, t, *CE)
    return loss, unit, y.view(-1).sin()


def of_an_input(x, w, t):
    return fused.cross_entropy_with_grad(w.repeat(16, 1)[:ROWS], t, *CE)


def logits_returned(x, w, t):
    y = x @ w
    return *fused.cross_entropy_with_grad(y, t, *CE), y


def of_a_copy(x, w, t):
    return fused.cross_entropy_with_grad((x @ w).clone(), t, *CE)


REFUSED = {
    "returned": (logits_returned, "not in place: input is returned, or saved for the backward"),
    "generated": (of_an_input, "not in place: repeat is not a matrix product"),
    "a copy": (of_a_copy, "not in place: clone is not a matrix product"),
    "read by a view": (read_after_by_a_view, "not in place: sin reads input, too"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, choice = REFUSED[name]
    gm, choices = check(function, *head())
    assert choices == [choice]
    assert not any(
        "with_grad_" in n.name and n.name.endswith("grad__default") for n in gm.graph.nodes
    )


@pytest.mark.parametrize("function", [read_before, read_after])
def test_readers_go_before(function):
    gm, choices = check(function, *head())
    assert choices == ["in place"]
    assert one(gm.graph, aten.amax.default) < one(gm.graph, "fused.cross_entropy_with_grad_")


def scaled(g, tangents_1):
    return fused.scale(g, tangents_1)


def test_scale():
    inputs = *weights((ROWS, CLASSES)), torch.tensor(2.0)
    gm, choices = check(scaled, *inputs, donated=(0,))
    assert choices == ["scale in place"]
    assert "fused.scale_(g_1, tangents_1_1)" in text(gm.graph)
    _, choices = check(scaled, *inputs)
    assert choices == ["scale in a new buffer: the gradient is not the backward's own"]


def test_scale_that_others_read():
    def backward(g, tangents_1):
        return fused.scale(g, tangents_1), g.sum()

    _, choices = check(backward, *weights((ROWS, CLASSES)), torch.tensor(2.0), donated=(0,))
    assert choices == ["scale in a new buffer: the gradient is read again"]


def test_scale_of_what_the_backward_made():
    def backward(g, tangents_1):
        return fused.scale(g.exp(), tangents_1)

    _, choices = check(backward, *weights((ROWS, CLASSES)), torch.tensor(2.0), donated=(0,))
    assert choices == ["scale in a new buffer: the gradient is not saved by the forward"]


def test_scale_that_is_fused():
    def backward(g, tangents_1):
        return fused.scale(g, tangents_1) * 3

    gm, choices = check(backward, *weights((ROWS, CLASSES)), torch.tensor(2.0), donated=(0,))
    assert choices == ["scale fused"]
    assert text(gm.graph).startswith("mul_tensor = aten.mul.Tensor(g_1, tangents_1_1)")


def test_scale_without_kernels(monkeypatch):
    monkeypatch.setattr(implementations, "has_kernels", lambda device: False)
    gm, choices = check(scaled, *weights((ROWS, CLASSES)), torch.tensor(2.0), donated=(0,))
    assert choices == ["scale fused"]
    assert "aten.mul.Tensor" in text(gm.graph)
    assert "fused.scale" not in text(gm.graph)


def test_a_factor_of_another_dtype():
    def backward(g, tangents_1):
        return fused.scale(g, tangents_1)

    gm, _ = check(backward, torch.randn(8, 8).bfloat16(), torch.tensor(2.0))
    assert "convert_element_type" in text(gm.graph)


def test_scale_of_a_saved_gradient():
    gm = of_aten(scaled, *weights((ROWS, CLASSES)), torch.tensor(2.0))
    one(gm.graph, "fused.scale").meta[SAVED] = True
    (decision,) = put_in_place(gm)
    assert decision.choice == "scale in place unless retained"
    assert "fused.scale_saved" in text(gm.graph)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_gradient_over_the_logits(reduction):
    def backward(y, t, stats, total, g):
        return fused.cross_entropy_backward(g, y, t, None, stats, total, reduction, -100, 0.1)

    y, t = torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))
    _, stats, total = fused.cross_entropy_forward(y, t, None, reduction, -100, 0.1, torch.float32)
    g = torch.randn(ROWS) if reduction == 0 else torch.tensor(2.0)
    gm, choices = check(backward, y, t, stats, total, g, donated=(0,))
    assert choices == ["gradient in place"]
    assert ("aten.div" in text(gm.graph)) == (reduction == 1)
    _, choices = check(backward, y, t, stats, total, g)
    assert choices == ["gradient in a new buffer: input is an input of the graph, too"]


def test_gradient_of_statistics():
    def backward(y, t, stats, a, b):
        return fused.row_statistics_backward(a, None, b, None, y, t, stats, -100, None)

    y, t = torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))
    *_, stats, _ = fused.row_statistics_forward(y, t, -100, None)
    inputs = y, t, stats, *weights((ROWS,), (ROWS,))
    gm, choices = check(backward, *inputs, donated=(0,))
    assert choices == ["gradient in place"]
    assert "fused.row_statistics_backward_(" in text(gm.graph)
    assert check(backward, *inputs)[1][0].startswith("gradient in a new buffer")


def test_elementwise_gradients_are_decomposed():
    def backward(x, t, g):
        return fused.mse_loss_backward(g, x, t, None, 1, True, False, False)[0]

    gm, choices = check(backward, *weights((8, 8), (8, 8)), torch.tensor(2.0))
    assert choices == []
    assert "fused" not in text(gm.graph)


def test_markers_are_dropped():
    def forward(x, y):
        return fused.keep_gradient(x.sum(), y * 2)

    gm = of_aten(forward, *weights((8,), (8,)))
    assert put_in_place(gm) == []
    assert "keep_gradient" not in text(gm.graph)
