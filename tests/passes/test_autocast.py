"""Which autocast is on at a node."""

from __future__ import annotations

import torch

from compile_losses.recognize.graph.autocast import autocast_dtype, cast_by
from tests.passes.graphs import dynamo, one


def test_autocast():
    def step(x, t):
        with torch.autocast("cpu", torch.bfloat16):
            a = x.sin()
            with torch.autocast("cpu", enabled=False):
                b = a.cos()
        return a + b

    graph = dynamo(step, torch.randn(3), torch.zeros(3)).gm.graph
    inside, off = one(graph, "sin"), one(graph, "cos")
    assert autocast_dtype(inside, "cpu") is torch.bfloat16
    assert autocast_dtype(inside, "cuda") is None
    assert autocast_dtype(off, "cpu") is None
    assert cast_by(torch.bfloat16, torch.float32) is torch.bfloat16
    assert cast_by(torch.bfloat16, torch.float64) is torch.float64
    assert cast_by(None, torch.float32) is torch.float32
