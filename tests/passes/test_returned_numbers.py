"""The numbers that a graph returns to be differentiated."""

from __future__ import annotations

import torch

from compile_losses.recognize.graph.returned_numbers import of_parameters, returned_numbers
from tests.passes.graphs import dynamo


def test_returned_numbers():
    def step(x, t):
        loss = (x.sin() * t).sum() + x.cos().mean()
        return loss, t.sum()

    graph = dynamo(step, torch.randn(3, requires_grad=True), torch.randn(3)).gm.graph
    (number,) = returned_numbers(graph, set())
    assert len(number.reductions) == 2
    assert not any(of_parameters(n) for n in number.reductions)
