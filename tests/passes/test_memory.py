"""What a Dynamo graph writes to, and when."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from compile_losses.recognize.graph.memory import (
    function_of,
    is_sum_over_term,
    look_at,
    memory_of,
    storage_of,
)
from tests.passes.graphs import dynamo, one, returned


def looked_at(function, *inputs):
    graph = dynamo(function, *inputs).gm.graph
    return graph, look_at(graph)


def first(graph):
    return graph.find_nodes(op="placeholder")[0]


def test_nothing_is_written():
    graph, memory = looked_at(lambda x: (x * 2).sum(), torch.ones(3))
    assert not memory.written
    assert memory_of(graph) is memory
    (root,) = returned(graph)
    storage = storage_of(first(graph).meta["example_value"])
    assert memory.conflict(storage, first(graph), root) is None


def test_writes_before_between_and_after():
    def step(x):
        before = x.clone()
        before.add_(1)
        between = x.clone()
        read = between.sin()
        between.mul_(2)
        after = x.clone()
        loss = (before * read * after).sum()
        after.zero_()
        return loss, before, between, after

    graph, memory = looked_at(step, torch.ones(3, requires_grad=True))
    assert memory.written
    root, before, between, after = returned(graph)
    sin = one(graph, "sin")
    first_product = next(n for n in graph.nodes if n.target is operator.mul)

    def conflict(tensor, reader):
        storage = storage_of(tensor.meta["example_value"])
        return memory.conflict(storage, reader, root)

    assert conflict(before, first_product) is None
    assert conflict(between, sin) == "is changed in place by mul_ while the loss is computed"
    said = conflict(after, first_product)
    assert said.startswith("is changed in place by ")
    assert said.endswith("after the loss, whose backward may read it")


def test_a_write_after_a_loss_without_gradients():
    def step(x):
        loss = (x * 2).sum()
        x.zero_()
        return loss

    graph, memory = looked_at(step, torch.ones(3))
    storage = storage_of(first(graph).meta["example_value"])
    assert memory.conflict(storage, one(graph, "mul"), returned(graph)[0]) is None


def test_views_share_memory():
    graph, memory = looked_at(lambda x: (x.view(-1)[1:].zero_(), x.sum())[1], torch.ones(2, 2))
    assert storage_of(first(graph).meta["example_value"]) in memory.storages


def flat(*sizes):
    """Tensors that are no views, one after the other in one memory."""
    memory = torch.ones(sum(sizes)).untyped_storage()
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [
        torch.empty(0).set_(memory, start, (n,)) for start, n in zip(starts, sizes, strict=True)
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 2, 1)])
@pytest.mark.parametrize("seen", [lambda x: x, lambda x: x[:], lambda x: x.view(1, -1)])
def test_memory_in_common_is_no_write(order, seen):
    """Nor is what starts within its memory. A further write by an unknown node is one."""

    def step(a, b, c):
        return checkpoint(lambda: (a.sin() * b.sum()).sum(), use_reentrant=False) + c.sum()

    parts = flat(3, 3, 3)
    for place in range(3):
        graph, memory = looked_at(step, *(seen(parts[part]) for part in order))
        assert not memory.written
        value = [*graph.find_nodes(op="placeholder")][min(place, len(set(order)) - 1)]
        value = value.meta["example_value"]
        with torch.no_grad():
            value.zero_()
        assert storage_of(value) in look_at(graph).storages


def test_writes_with_out_and_setitem():
    def step(x, out):
        torch.add(x, 1, out=out)
        x[0] = 3
        return out.sum() + x.sum()

    graph, memory = looked_at(step, torch.ones(3), torch.empty(3))
    storages = {storage_of(n.meta["example_value"]) for n in graph.find_nodes(op="placeholder")}
    assert storages <= memory.storages


def test_sums_over_their_first_term():
    def step(x, y):
        total = x * y
        total += y
        total -= x
        return total.sum()

    graph, memory = looked_at(step, torch.ones(3), torch.ones(3))
    added, less = (one(graph, name) for name in ("iadd", "isub"))
    assert is_sum_over_term(added)
    assert is_sum_over_term(less)
    assert [function_of(n).__name__ for n in (added, less)] == ["add", "sub"]
    assert {added, less} <= set(memory.sums)


def test_other_sums_in_place():
    def of_an_input(x, y):
        x += y
        return x.sum()

    def read_again(x, y):
        term = x * y
        other = term.sin()
        term += y
        return term.sum() + other.sum()

    def of_a_view(x, y):
        term = x.view(-1)
        term += y.view(-1)
        return term.sum()

    for function in (of_an_input, read_again, of_a_view):
        graph, _ = looked_at(function, torch.ones(3), torch.ones(3))
        node = next(n for n in graph.nodes if getattr(n.target, "__name__", "") == "iadd")
        assert not is_sum_over_term(node), function.__name__
        assert function_of(node) is node.target


def test_no_memory_of_its_own():
    assert storage_of(3) is None
    assert storage_of(torch.eye(3).to_sparse()) is None
    x = torch.ones(3)
    assert storage_of(x) == storage_of(x[1:])
    assert storage_of(x) != storage_of(x.clone())
