"""How far rounding may carry results."""

from __future__ import annotations

import pytest
import torch

from compile_losses.recognize.graph.rounding import rounding

EPS = torch.finfo(torch.float64).eps


def errors(function, *inputs):
    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]

    def program():
        result = function(*tensors)
        gradients = torch.autograd.grad(result.sum(), tensors, materialize_grads=True)
        return [result.detach(), *gradients]

    return rounding(program, program())


def test_what_is_left_of_large_numbers():
    """The error is of the size of what was subtracted; that of 64 roundings at most."""
    error, *_ = errors(lambda x: (x + 1000) - 1000, [1e-3, 2e-3])
    assert 10 * EPS < error / 1000 < 200 * EPS
    error, *_ = errors(lambda x: x * 3, [1e-10])
    assert 0 < error < 200 * EPS * 1e-9


@pytest.mark.parametrize("gap", [3e-10, 1e-6])
def test_inside_of_ops(gap):
    """The gradient of a softmax that is nearly one is a difference in one op of ATen."""
    logits = [0.0, torch.tensor(gap).log().item()]
    _, error = errors(lambda x: x.log_softmax(0)[0], logits)
    assert EPS < error < 200 * EPS
    assert error < gap / 1000


def test_extremes_are_still_found():
    """An amax with noise would be nowhere among its numbers, and have no gradient."""
    value, gradient = errors(lambda x: x.amax(0), [1.0, 2.0])
    assert (value, gradient) < (1e-12, 1e-12)


def test_what_cannot_be_told():
    assert errors(lambda x: (x - x).log(), [1.0]) == [0.0, 0.0]
    assert errors(lambda x: x * 2, []) == [0.0, 0.0]
