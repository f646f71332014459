"""Nodes that a gradient shares with the forward, and results that are saved."""

from __future__ import annotations

import torch

from compile_losses.lower.shared_with_forward import save, share
from compile_losses.torch_internals.graphs import RECOMPUTE
from tests.passes.graphs import aten, of_aten, one, text


def test_shared_nodes():
    def step(x):
        forward = (x.sin() * 2, x.exp())
        backward = (x.sin() * 2, x.sin() * 2.0, x.exp() + 1)
        return *forward, *backward

    gm = of_aten(step, torch.randn(3))
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    before = gm(torch.ones(3))
    share(calls[:3], calls[3:])
    gm.graph.lint()
    gm.recompile()
    assert text(gm.graph).count("aten.sin") == 1
    assert text(gm.graph).count("aten.exp") == 1
    assert text(gm.graph).count("aten.mul") == 2  # 2 is not 2.0
    torch.testing.assert_close(gm(torch.ones(3)), before)


def test_saved():
    gm = of_aten(lambda x: x.sort()[0], torch.randn(3))
    node = one(gm.graph, aten.sort.default)
    save(node)
    assert all(RECOMPUTE in n.meta for n in (node, *node.users))
