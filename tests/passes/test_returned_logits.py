"""What else reads the logits of a loss."""

from __future__ import annotations

import pytest
import torch

from compile_losses.recognize.heads.head import NotAbsorbedError
from compile_losses.recognize.returned_logits import outputs_of, readers
from tests.passes.graphs import dynamo, one, returned


def test_outputs_of_logits():
    def step(x, t):
        y = x * 2
        return y.sum(), y.view(-1), y.size(0)

    graph = dynamo(step, torch.randn(3, 4), torch.zeros(3)).gm.graph
    logits = one(graph, "mul")
    total, view, *_ = returned(graph)
    assert [n.name for n in outputs_of({logits}, total)] == [view.name]
    assert set(readers({logits}, total)) == {view}


def test_logits_that_others_read():
    def step(x, t):
        y = x * 2
        return y.sum(), y.sin().sum(), y.max(-1)

    graph = dynamo(step, torch.randn(3, 4), torch.zeros(3)).gm.graph
    total, *_ = returned(graph)
    with pytest.raises(NotAbsorbedError, match="have other users"):
        outputs_of({one(graph, "mul")}, total)
