"""Loops over the samples of a batch, as one computation."""

from __future__ import annotations

import pytest
import torch

from tests.passes.graphs import aten, dynamo, recognizer, words


def chunked(order=slice(None), stop=None):
    def step(x, t):
        parts = [a.log_softmax(-1).sum(-1) for a in x.chunk(3)[order][:stop]]
        return torch.cat(parts)

    return step


@pytest.mark.parametrize(
    ("function", "expected"),
    [(chunked(), True), (chunked(slice(None, None, -1)), False), (chunked(stop=2), False)],
)
def test_loops_are_rejoined(function, expected):
    found_by, root = recognizer(dynamo(function, torch.randn(6, 5), torch.zeros(6)).gm)
    value = found_by.replay.resolve(found_by.replay.of(root))
    assert (value.op is aten.sum.dim_IntList) == expected, value


def test_a_stack_of_samples():
    def step(x, t):
        return torch.stack([a.logsumexp(-1) for a in x])

    found_by, root = recognizer(dynamo(step, torch.randn(3, 4, 5), torch.zeros(3)).gm)
    value = found_by.replay.resolve(found_by.replay.of(root))
    assert value.op is aten.logsumexp.default
    assert [words(a) for a in value.args[:2]] == ["l_x_", "[2]"]
