"""Calls of known heads in a graph: their sites, and those that were refused."""

from __future__ import annotations

import pytest
import torch

from compile_losses.known_heads import HEADS, doors
from compile_losses.recognize.heads.known_heads import known_heads, refused_heads
from compile_losses.sites import is_without_logits, site_of
from tests.passes.graphs import dynamo


@pytest.fixture(autouse=True)
def nothing_refused():
    doors.take_refused()
    yield
    doors.take_refused()


def head_of(package):
    return next(head for head in HEADS if head.package == package)


def test_calls_are_marked():
    compute = head_of("liger-kernel").compute
    inputs = torch.randn(6, 8), torch.randn(10, 8), torch.randint(10, (6,))
    graph = dynamo(lambda h, w, t: compute(h, w, t)[0] + h.sum(), *inputs).gm.graph
    (site,) = known_heads(graph)
    assert (site.op, site.status) == ("linear_cross_entropy", "rewritten")
    assert site.reason == str(head_of("liger-kernel"))
    (node,) = (node for node in graph.nodes if site_of(node) == site.mark)
    assert is_without_logits(node)


def test_ops_of_the_user_are_none():
    fused = torch.ops.fused
    inputs = torch.randn(6, 8), torch.randn(10, 8), torch.randint(10, (6,))
    graph = dynamo(lambda h, w, t: fused.linear_cross_entropy(h, w, t), *inputs).gm.graph
    assert known_heads(graph) == []
    assert all(site_of(node) is None for node in graph.nodes)


def test_refused_calls_are_told_once():
    doors.refused.append(("a head", "its bias has another dtype", ("train.py", 3)))
    (site,) = known_heads(dynamo(lambda x: x + 1, torch.randn(2)).gm.graph)
    assert (site.status, site.file, site.line) == ("declined", "train.py", 3)
    assert refused_heads() == []
