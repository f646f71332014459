"""A Dynamo graph as ATen ops, and which of its tensors hold the same numbers."""

from __future__ import annotations

import pytest
import torch

from compile_losses.recognize.graph.aten_replay import compute, equal_sizes, same_sizes
from tests.passes.graphs import aten, dynamo, recognizer, returned, words


def replayed(function, *inputs):
    gm = dynamo(function, *inputs).gm
    found_by, _ = recognizer(gm)
    return found_by.replay, [found_by.replay.of(node) for node in returned(gm.graph)]


SPELLINGS = {
    "operator": (lambda x: (x**2,), "pow.Tensor_Scalar(l_x_, 2)"),
    "method": (lambda x: (x.pow(2),), "pow.Tensor_Scalar(l_x_, 2)"),
    "square": (lambda x: (torch.square(x),), "pow.Tensor_Scalar(l_x_, 2)"),
    "all dimensions": (lambda x: (x.mean((0, 1)),), "mean.dim(l_x_, [0, 1], False)"),
    "logsigmoid": (lambda x: (torch.nn.functional.logsigmoid(x),), "log_sigmoid(l_x_)"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    function, expected = SPELLINGS[name]
    replay, (value,) = replayed(function, torch.randn(3, 4))
    value = replay.resolve(value)
    value.whole = False
    assert words(value) == expected


SAME = {
    "twice": (lambda x: (x.exp(), x.exp()), True),
    "another op": (lambda x: (x.exp(), x.log()), False),
    "another number": (lambda x: (x * 2, x * 3), False),
    "True is not 1": (lambda x: (x.sum(1, keepdim=True), x.sum(1, keepdim=False)), False),
    "random": (lambda x: (torch.rand_like(x), torch.rand_like(x)), False),
    "without a gradient": (lambda x: (x.exp(), x.detach().exp()), False),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_numbers(name):
    function, expected = SAME[name]
    replay, (one, other) = replayed(function, torch.randn(3, 4, requires_grad=True))
    assert replay.same(one, other) is expected
    assert replay.same(one, one)
    assert not replay.same(one, 2)


def test_what_writes_is_opaque():
    replay, (value,) = replayed(lambda x: (x.clone().add_(1),), torch.randn(3))
    assert value.op is None
    assert replay.looked_at(value.node)


def test_computed_ahead():
    _, (value,) = replayed(lambda x: (x.exp(),), torch.randn(3, 4))
    made = compute(aten.sum.dim_IntList, value, [1])
    assert made.is_new
    assert list(made.fake.shape) == [3]
    assert compute(aten.permute.default, value, [0, 0]) is None


def test_sizes():
    assert same_sizes([2, 3], (2, 3))
    assert not same_sizes([2, 3], [2])
    assert not same_sizes([2, 3], [2, 4])
    assert equal_sizes([2, 3], (2, 3))
    assert not equal_sizes([2, 3], [3, 2])
