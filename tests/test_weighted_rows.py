"""Losses of probabilities with a weight of each row inside of the sum over the classes."""

from __future__ import annotations

import pytest
import torch

from tests.graphs import Compiled

pytestmark = pytest.mark.usefixtures("no_code")


def inputs():
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(4, 6, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = (torch.rand(4, 6, 1, generator=generator) < 0.6).double()
    return x.requires_grad_(), z, mask, torch.rand(9, generator=generator, dtype=torch.float64)


def masked(x, z, mask, weight):
    """As in EAGLE-3."""
    return -torch.sum(mask * (z.softmax(-1) * x.log_softmax(-1)), 2).mean()


def divergence(x, z, mask, weight):
    p, q = x.log_softmax(-1), z.log_softmax(-1)
    return (q.exp() * (q - p) * mask).sum(-1).sum() / mask.sum()


def with_two_weights(x, z, mask, weight):
    terms = z.softmax(-1) * x.log_softmax(-1)
    return -(mask * terms / (1 + mask)).sum(-1).square().mean()


def of_an_integer(x, z, mask, weight):
    return -(mask.long() * z.softmax(-1) * x.log_softmax(-1)).sum(-1).mean()


def trained(x, z, mask, weight):
    rows = x[..., :1].tanh()
    return -(rows * (z.softmax(-1) * x.log_softmax(-1))).sum(-1).mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", [masked, divergence, with_two_weights, of_an_integer, trained])
def test_rewritten(function):
    compare(function, rewritten=True)


def of_classes(x, z, mask, weight):
    return -(weight * (z.softmax(-1) * x.log_softmax(-1))).sum(-1).mean()


def of_all(x, z, mask, weight):
    return -((mask * weight) * (z.softmax(-1) * x.log_softmax(-1))).sum(-1).mean()


def along_the_rows(x, z, mask, weight):
    return -(mask * (z.softmax(-1) * x.log_softmax(-1))).sum(1).square().mean()


def kept(x, z, mask, weight):
    return -(mask * (z.softmax(-1) * x.log_softmax(-1))).sum(-1, keepdim=True).mean()


@pytest.mark.parametrize("function", [of_classes, of_all, along_the_rows, kept])
def test_others_are_right(function):
    compare(function, rewritten=False)


def compare(function, *, rewritten):
    given = inputs()
    compiled = Compiled(function, inner_backend="eager")
    found, expected = compiled(*given), function(*given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(each, given[0]) for each in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert any(site.status == "rewritten" for site in compiled.sites) == rewritten, compiled.sites


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_infinite_terms(dtype):
    """Of rows that count they are torch's."""
    x, z, mask, weight = (t.detach().to(dtype) for t in inputs())
    x[..., 3] = -torch.inf
    given = (x.requires_grad_(), z, torch.ones_like(mask), weight)
    found, expected = Compiled(masked, inner_backend="eager")(*given), masked(*given)
    assert torch.equal(found, expected)
    assert found.isinf()
