"""Sizes of a joint graph, computed of the inputs' sizes."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compile_losses.lower.early_sizes import compute_sizes_early
from tests.passes.graphs import aten, name_of, one


def test_sizes_of_the_inputs_are_read_first():
    def step(x, t):
        y = (x + t).sin()
        return y.sum() / y.shape[0], y.cos().expand(y.shape[0] * 1, y.shape[1])

    gm = make_fx(step, tracing_mode="symbolic")(torch.randn(6, 5), torch.randn(6, 5))
    compute_sizes_early(gm.graph)
    gm.graph.lint()
    gm.recompile()
    order = list(gm.graph.nodes)
    sine = order.index(one(gm.graph, aten.sin.default))
    sizes = [n for n in order if "sym_size" in name_of(n.target)]
    assert sizes
    assert all(order.index(n) < sine and n.args[0].op == "placeholder" for n in sizes)
    x, t = torch.randn(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(gm(x, t), step(x, t))
