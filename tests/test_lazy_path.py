"""Who reads gradients on the way from a tensor to the head that it is made of."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lazy.path import HeadFunction, Path, nodes_to_head
from tests.lazy_programs import Reversed


class Head(HeadFunction):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def tensors():
    """A head's output, and a view of it; with their paths."""
    output = Head.apply(torch.randn(3, requires_grad=True))
    view = output.view(3, 1)
    first = Path(output, None)
    return output, view, first, Path(view, first)


def test_free():
    output, view, first, last = tensors()
    assert first.is_free()
    assert last.is_free()
    del output, view  # which nobody holds has no hooks
    assert last.is_free()


@pytest.mark.parametrize("place", [0, 1])
def test_touched(place):
    """Whoever touches a tensor stands in the way of those that are made of it, and of no other."""
    output, view, *paths = tensors()
    paths[place].touch()
    assert [path.is_free() for path in paths] == [place == 1, False]
    assert output.shape.numel() == view.shape.numel()


def test_hooks():
    output, _, first, last = tensors()
    output.register_hook(lambda grad: grad)
    assert not first.is_free()
    assert not last.is_free()


def test_nodes():
    output, view, *_ = tensors()
    assert len(nodes_to_head(output)) == 1
    assert nodes_to_head(view) == [view.grad_fn, output.grad_fn]
    assert nodes_to_head(Reversed.apply(view)) is None
    assert nodes_to_head(view + output) is None
    assert nodes_to_head(torch.ones(3, requires_grad=True) * 2) is None
