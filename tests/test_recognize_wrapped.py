"""Losses beside, and of, tensors that are not plain: of torch.func, of masks, of subclasses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

import compile_losses

WAYS = pytest.mark.parametrize("way", ["backend", "enable"])


def run_compiled(function, way, *inputs):
    torch._dynamo.reset()
    if way == "backend":
        return torch.compile(function, backend="compile_losses")(*inputs)
    with compile_losses.enable():
        return torch.compile(function)(*inputs)


def narrow_and_back(x):
    return x.bfloat16().float()


def check(function, way, inputs, status):
    expected = function(*inputs)
    tolerance = {"rtol": 2e-2, "atol": 2e-2}  # Inductor leaves out a rounding to bfloat16
    torch.testing.assert_close(run_compiled(function, way, *inputs), expected, **tolerance)
    torch._dynamo.reset()
    report = compile_losses.explain(function, *inputs)
    assert report.errors == []
    assert [site.status for site in report.sites] == [status], str(report)
    return report.sites[0]


@WAYS
def test_block_mask(way, no_code):
    """A mask of flex attention is made with vmap, by an overload packet that takes lists."""
    documents = torch.arange(256) // 64

    def same_document(b, h, q, k):
        return (q >= k) & (documents[q] == documents[k])

    def step(x, t):
        mask = create_block_mask(same_document, 1, 1, 256, 256, device="cpu")
        return F.mse_loss(x, t), mask.kv_num_blocks

    check(step, way, (torch.randn(8, 8), torch.randn(8, 8)), "rewritten")


LOSSES = {
    "cross entropy": lambda p, t: F.cross_entropy(narrow_and_back(p), t.argmax(-1)),
    "squared errors": lambda p, t: F.mse_loss(narrow_and_back(p), t),
    "divergence": lambda p, t: F.kl_div(p.softmax(-1).log(), t, reduction="sum"),
}


@pytest.mark.sampled(3)
@WAYS
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
@pytest.mark.parametrize("loss", LOSSES)
def test_absorption_inside_torch_func(loss, transform, way, no_code):
    """What stands before the loss has no storage of its own there."""
    function = LOSSES[loss]

    def step(x, t):
        if transform == "grad":
            return torch.func.grad(function)(x, t)
        if transform == "vmap":
            return torch.vmap(function)(x[:, None], t[:, None])
        return torch.func.jvp(lambda x: function(x, t), (x,), (x,))

    site = check(step, way, (torch.randn(8, 8), torch.rand(8, 8)), "declined")
    assert site.reason == "inside torch.func, where custom ops have no rules"


@WAYS
def test_writes_inside_torch_func_beside_a_loss(way, no_code):
    def changed(a):
        a = a.clone()
        a.mul_(2)
        return a.sum()

    def step(x, t):
        return F.mse_loss(narrow_and_back(x), t) + torch.vmap(changed)(x).sum()

    check(step, way, (torch.randn(8, 8), torch.rand(8, 8)), "rewritten")


class Chunked(torch.autograd.Function):
    """A user's own loss, with the gradient in its forward."""

    @staticmethod
    def forward(ctx, x, w, t):
        loss = LOSSES["cross entropy"]
        gradient, value = torch.func.grad_and_value(lambda w: loss(x @ w, t))(w)
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx, grad_output):
        return None, ctx.saved_tensors[0] * grad_output, None


@WAYS
def test_torch_func_inside_an_autograd_function(way, no_code):
    w = torch.randn(8, 8, requires_grad=True)

    def step(x, t):
        return Chunked.apply(x, w, t)

    check(step, way, (torch.randn(8, 8), torch.rand(8, 8)), "declined")


class Tagged(torch.Tensor):
    """Dynamo takes it for a plain tensor, and Inductor's code does not."""


@pytest.mark.sampled(2)
@WAYS
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy_with_logits,
    ],
)
def test_subclass_as_target(loss, way):
    """Of the losses that stock torch.compile takes with one."""
    layer, x = nn.Linear(64, 800), torch.randn(800, 64)
    target = torch.rand(800, 800).as_subclass(Tagged)

    def step(x, t):
        return loss(layer(x), t)

    def gradients(function):
        layer.zero_grad()
        function(x, target).backward()
        return [p.grad.clone() for p in layer.parameters()]

    expected = gradients(step)
    actual = gradients(lambda *inputs: run_compiled(step, way, *inputs))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
    torch._dynamo.reset()
    (site,) = compile_losses.explain(step, x, target).losses
    assert (site.status, "Tagged" in site.reason) == ("declined", True)
