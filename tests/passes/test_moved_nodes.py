"""Nodes that make class indices, moved to an earlier place."""

from __future__ import annotations

import torch

from compile_losses.recognize.graph.moved_nodes import move_before
from tests.passes.graphs import dynamo, recognizer, returned


def test_what_is_moved_before_a_place():
    def step(x, t):
        place = x.sin()
        labels = (t + 1) % 5
        drawn = torch.randint(5, (3,))
        wide = t.float()
        return place, labels, drawn, wide

    found = dynamo(step, torch.randn(3), torch.arange(3))
    found_by, _ = recognizer(found.gm)
    place, labels, drawn, wide = returned(found.gm.graph)
    assert move_before([labels], place, found_by.replay)
    assert labels < place
    assert not move_before([drawn], place, found_by.replay)
    assert not move_before([wide], place, found_by.replay)
    found.gm.graph.lint()


def test_nothing_moves_past_a_write():
    def step(x, t):
        place = x.sin()
        t.add_(1)
        return place, t * 2

    found = dynamo(step, torch.randn(3), torch.arange(3))
    found_by, _ = recognizer(found.gm)
    place, labels = returned(found.gm.graph)
    assert not move_before([labels], place, found_by.replay)
