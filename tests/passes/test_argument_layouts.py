"""The strides in which Inductor passes arguments to a call."""

from __future__ import annotations

import torch

from compile_losses.lower.argument_layouts import accept_layouts, leave_unpadded
from compile_losses.torch_internals.graphs import DISLIKES_PADDING, EAGER_VALUES
from tests.passes.graphs import aten, fused, of_aten, one


def loss_of(y, t):
    return fused.cross_entropy_with_grad(y, t, None, 1, -100, 0.0, torch.float32)


def layouts(function):
    gm = of_aten(
        function, torch.randn(8, 4), torch.randn(4, 6), torch.randint(6, (8,)), torch.randn(6)
    )
    call = one(gm.graph, "fused.cross_entropy_with_grad")
    call.meta[EAGER_VALUES] = ((), {})
    accept_layouts(call)
    leave_unpadded(call)
    return gm, EAGER_VALUES not in call.meta


def test_layouts():
    assert layouts(lambda x, w, t, b: loss_of(x @ w, t))[1]
    assert layouts(lambda x, w, t, b: loss_of((x @ w).view(2, 4, 6).view(8, 6), t))[1]
    assert not layouts(lambda x, w, t, b: loss_of((x @ w).sin(), t))[1]


def test_products_with_a_bias():
    gm, _ = layouts(lambda x, w, t, b: loss_of(torch.addmm(b, x, w), t))
    assert one(gm.graph, aten.addmm.default).meta[DISLIKES_PADDING]
    gm, _ = layouts(lambda x, w, t, b: loss_of(x @ w, t))
    assert DISLIKES_PADDING not in one(gm.graph, aten.mm.default).meta
