"""The unit gradient of a loss that is an op, and why it stays in the backward."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lower.fused_calls import find_losses
from compile_losses.lower.gradient_in_forward import (
    SAVED,
    is_returned,
    move_into_forward,
    operands_outlive,
    overwrites_buffers,
    refusal,
    refusal_ahead,
)
from compile_losses.lower.node_relations import depends_on_tangents, storage_of
from tests.constants import set_constants
from tests.corpus.capture import inputs_for
from tests.passes.graphs import aten, fused, indexed, of_aten, one, returned, text
from tests.passes.outcomes import assert_same, results_of

CE = (None, 1, -100, 0.0)


@pytest.fixture(autouse=True)
def small_gradients(monkeypatch):
    """They are computed ahead one at a time, as large ones are."""
    set_constants(monkeypatch, ahead_bytes=0)


def given(dtype=torch.float32):
    x, w = torch.randn(8, 4, dtype=dtype), torch.randn(4, 6, dtype=dtype)
    return x, w, torch.randint(6, (8,)), torch.tensor(2.0, dtype=dtype)


def cross_entropy(grad_output, read=lambda y: ()):
    def joint(x, w, t, tangents_1):
        y = x @ w
        loss, stats, total = fused.cross_entropy_forward(y, t, *CE, y.dtype)
        g = fused.cross_entropy_backward(
            grad_output(tangents_1, loss), y, t, None, stats, total, *CE[1:]
        )
        return loss, x.t() @ g, *read(y)

    return joint


GRAD_OUTPUTS = {
    "tangent": (lambda d, loss: d, False),
    "factor": (lambda d, loss: d * 0.5, True),
    "of the loss": (lambda d, loss: d * loss, False),
}


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("name", GRAD_OUTPUTS)
def test_moved(name, owned):
    grad_output, has_factor = GRAD_OUTPUTS[name]
    gm = of_aten(cross_entropy(grad_output), *given())
    numbers = inputs_for(gm)
    right = results_of(gm, numbers)
    (loss,) = find_losses(gm.graph)
    assert refusal(loss, overwrites=True) is None
    assert move_into_forward(loss, depends_on_tangents(gm.graph), owned=owned) == has_factor
    gm.graph.lint()
    gm.recompile()
    assert_same(results_of(gm, numbers), right)
    call = one(gm.graph, "fused.cross_entropy_with_grad")
    assert ("grad_output" in call.kwargs) == has_factor
    scale = one(gm.graph, "fused.scale")
    assert (SAVED in scale.meta) != owned
    # AOTAutograd donates nothing that shares memory with a result.
    unit = scale.args[0]
    assert (storage_of(scale) == storage_of(unit)) != owned
    assert "cross_entropy_backward" not in text(gm.graph)


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("name", GRAD_OUTPUTS)
def test_computed_ahead(name, owned):
    """Of logits that the caller holds: for one forward at a time."""
    grad_output, has_factor = GRAD_OUTPUTS[name]

    def joint(y, t, tangents_1):
        loss, stats, total = fused.cross_entropy_forward(y, t, *CE, y.dtype)
        given = grad_output(tangents_1, loss), y, t, None, stats, total
        return loss, fused.cross_entropy_backward(*given, *CE[1:])

    x, w, *others = given()
    gm = of_aten(joint, x @ w, *others)
    numbers = inputs_for(gm)
    right = results_of(gm, numbers)
    (loss,) = find_losses(gm.graph)
    assert operands_outlive(loss, indexed(gm))
    backward = depends_on_tangents(gm.graph)
    assert move_into_forward(loss, backward, owned=owned, ahead=True) == has_factor
    gm.graph.lint()
    gm.recompile()
    assert_same(results_of(gm, numbers), right)
    first = one(gm.graph, "fused.cross_entropy_ahead")
    gradient = one(gm.graph, "fused.cross_entropy_ahead_gradient")
    assert ("grad_output" in first.kwargs) == ("grad_output" in gradient.kwargs) == has_factor
    element = gradient.args[1]
    assert element.meta["val"].shape == ()
    # AOTAutograd donates nothing that shares memory with a result.
    assert (storage_of(gradient) == storage_of(element)) != owned
    assert "cross_entropy_backward" not in text(gm.graph)


def kl_div(log_input):
    def joint(x, t, tangents_1):
        loss = fused.kl_div_forward(x, t, 2, False, log_input, x.dtype)
        given = tangents_1, x, t, 2, False, log_input, True, False
        return loss, fused.kl_div_backward(*given)[0]

    return joint


def squares_of(function):
    """Of inputs in bfloat16, and of what they are cast to."""
    x, t, d = pair(torch.bfloat16)
    return (function, x, t, d.float())


def wide_mse(x, t, tangents_1):
    loss = fused.mse_loss_forward(x, t, None, 1, torch.float32)
    return loss, fused.mse_loss_backward(tangents_1, x, t, None, 1, True, False, False)[0]


def read_again(x, w, t, tangents_1):
    y = x @ w
    loss, stats, total = fused.cross_entropy_forward(y, t, *CE, y.dtype)
    g = fused.cross_entropy_backward(tangents_1, y, t, None, stats, total, *CE[1:])
    return loss, x.t() @ g + (tangents_1 * y).sum()


#: What torch holds nothing for, and what it saves a tensor of the input's size for.
OUTLIVE = {
    "a product": (lambda: (cross_entropy(lambda d, loss: d), *given()), False),
    "a product that is returned": (
        lambda: (cross_entropy(lambda d, loss: d, lambda y: (y,)), *given()),
        True,
    ),
    "a product that the backward reads": (lambda: (read_again, *given()), True),
    "log-probabilities": (lambda: (kl_div(log_input=True), *pair()), True),
    "probabilities": (lambda: (kl_div(log_input=False), *pair()), True),
    "a difference": (lambda: (mse(), *pair()), False),
    "a difference in 16 bits": (lambda: (mse(), *pair(torch.bfloat16)), False),
    "a wider difference": (lambda: squares_of(wide_mse), True),
}


@pytest.mark.parametrize("name", OUTLIVE)
def test_operands_that_outlive_the_forward(name):
    make, expected = OUTLIVE[name]
    gm = of_aten(*make())
    (loss,) = find_losses(gm.graph)
    assert operands_outlive(loss, indexed(gm)) == expected


def test_kept_in_the_backward():
    gm = of_aten(kl_div(log_input=True), *pair())
    assert "without the input" in refusal_ahead(find_losses(gm.graph)[0], indexed(gm))
    gm = of_aten(kl_div(log_input=False), *pair())
    (loss,) = find_losses(gm.graph)
    assert refusal_ahead(loss, indexed(gm)) is None
    assert "memory is preferred" in refusal_ahead(loss, indexed(gm, prefer_memory=True))
    with torch._inductor.config.patch("triton.cudagraphs", True):
        assert "CUDA graph" in refusal_ahead(loss, indexed(gm))


def loss_of(function, *inputs):
    gm = of_aten(function, *inputs)
    return find_losses(gm.graph)[0]


def mse(reduction=1, needs=(True, False, False), times=1):
    def joint(x, t, tangents_1):
        loss = fused.mse_loss_forward(x, t, None, reduction, x.dtype)
        gradients = [
            fused.mse_loss_backward(tangents_1, x, t, None, reduction, *needs) for _ in range(times)
        ]
        return loss, *[g for found in gradients for g, n in zip(found, needs, strict=True) if n]

    return joint


def pair(dtype=torch.float32, rows=8):
    return torch.randn(rows, 4).to(dtype), torch.randn(8, 4).to(dtype), torch.tensor(1.0).to(dtype)


def unreduced():
    return *pair()[:2], torch.ones(8, 4)


REFUSED = {
    "unreduced": (mse(reduction=0), unreduced, "not reduced"),
    "of both": (mse(needs=(True, True, False)), pair, "another argument"),
    "of the target": (mse(needs=(False, True, False)), pair, "another argument"),
    "broadcast": (mse(), lambda: pair(rows=1), "input is broadcast"),
    "float16": (mse(), lambda: pair(torch.float16), "underflow"),
    "twice": (mse(times=2), pair, "differentiated more than once"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, inputs, words = REFUSED[name]
    assert words in refusal(loss_of(function, *inputs()), overwrites=True)


def test_refused_by_what_surrounds_it():
    loss = loss_of(mse(), *pair())
    assert refusal(loss, overwrites=False) is None
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert "activation memory budget" in refusal(loss, overwrites=True)
    with torch._inductor.config.patch("triton.cudagraphs", True):
        assert "CUDA graph" in refusal(loss, overwrites=False)
        assert refusal(loss, overwrites=True) is None
    loss.forward.meta["recompute"] = 1
    assert "checkpointed" in refusal(loss, overwrites=True)


def test_gradients_that_others_read():
    def fused_into(x, t, tangents_1):
        loss, gradient = mse()(x, t, tangents_1)
        return loss, gradient * 2

    def of_a_product(x, t, tangents_1):
        loss, gradient = mse()(x, t, tangents_1)
        return loss, gradient @ t.t()

    assert "in what reads it" in refusal(loss_of(fused_into, *pair()), overwrites=False)
    assert "for good" in refusal(loss_of(of_a_product, *pair()), overwrites=False)
    assert refusal(loss_of(of_a_product, *pair()), overwrites=True) is None


def test_buffers_that_stock_gives_to_the_backward():
    def kept(x, w, t, tangents_1):
        return (x * w).sum(), tangents_1 * w

    def made(x, w, t, tangents_1):
        y = x @ w
        return y.sum(), (tangents_1 * y) @ w.t()

    def made_and_returned(x, w, t, tangents_1):
        y = x @ w
        return y, (tangents_1 * y) @ w.t()

    def recomputed(x, w, t, tangents_1):
        y = x.sin()
        return y.sum(), tangents_1 * y.cos()

    x, w, t, d = given()
    assert not overwrites_buffers(indexed(of_aten(kept, x, x + 1, t, d)))
    assert overwrites_buffers(indexed(of_aten(made, x, w, t, d)))
    assert not overwrites_buffers(indexed(of_aten(made_and_returned, x, w, t, d)))
    assert not overwrites_buffers(indexed(of_aten(recomputed, x, w, t, d)))


def test_is_returned():
    gm = of_aten(lambda x: (x.sin().view(-1), x.cos().sum()), torch.ones(2, 2))
    assert is_returned(one(gm.graph, aten.sin.default))
    assert not is_returned(one(gm.graph, aten.cos.default))
    assert len(returned(gm.graph)) == 2
