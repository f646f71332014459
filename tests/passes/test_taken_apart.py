"""Tensors that are put together and taken apart: what is read in their place."""

from __future__ import annotations

import pytest
import torch

from compile_losses.recognize.graph.memory import look_at
from compile_losses.recognize.graph.taken_apart import read_parts
from compile_losses.recognize.graph.unrolled import is_join
from tests.corpus.apart import MATCHES, NEAR_MISSES
from tests.corpus.heads import head
from tests.passes.graphs import dynamo, name_of
from tests.passes.outcomes import with_gradients


def joins(gm):
    return [node for node in gm.graph.nodes if is_join(node)]


def taken(function, inputs):
    """The graph before and after."""
    before, after = (dynamo(function, *inputs) for _ in range(2))
    look_at(after.gm.graph)
    read_parts(after.gm.graph)
    after.gm.graph.lint()
    after.gm.recompile()
    return before, after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MATCHES)
def test_parts_are_read(name, dtype):
    inputs = head(dtype)
    before, after = taken(MATCHES[name], inputs)
    assert joins(before.gm)
    assert not joins(after.gm)
    found, right = (with_gradients(each.gm, each.inputs) for each in (after, before))
    torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    before, after = taken(NEAR_MISSES[name], head())
    assert [name_of(n.target) for n in before.gm.graph.nodes] == [
        name_of(n.target) for n in after.gm.graph.nodes
    ]


def test_parts_of_parts():
    def step(x, y):
        pairs = torch.stack((x, y), 1)
        rows = torch.cat((pairs[:, 1], pairs[:, 0]))
        return rows[:4].sum() - 2 * rows[4:].exp().sum()

    inputs = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    before, after = taken(step, inputs)
    assert len(joins(before.gm)) == 2
    assert not joins(after.gm)
    found, right = (with_gradients(each.gm, each.inputs) for each in (after, before))
    torch.testing.assert_close(found, right, rtol=0, atol=0)
