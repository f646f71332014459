"""What a report without a loss says."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses import sites

LIBRARY = """
import torch

class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x / x.numel()

def loss(x):
    return Loss.apply(x)

def broken(x):
    torch._dynamo.graph_break()
    return x.square().flatten()

@torch.library.custom_op("fast_losses_of_a_test::loss", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()

op.register_fake(lambda x: x.new_empty(()))
op.register_autograd(lambda ctx, g: g.expand(3, 4), setup_context=lambda ctx, inputs, output: None)

def by_op(x):
    return op(x)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A library that is installed, as torch is."""
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / "fast_losses").mkdir()
    (folder / "fast_losses" / "functions.py").write_text(LIBRARY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        module = importlib.import_module("fast_losses.functions")
        place = os.path.join(os.path.realpath(folder), "")
        patch.setattr(sites, "_PACKAGES", (*sites._PACKAGES, place))
        yield module


def x():
    return torch.randn(3, 4, requires_grad=True)


def said(function, *args):
    report = compile_losses.explain(function, *args)
    assert report.losses == []
    return str(report)


def test_nothing_compiled():
    assert "no graph was compiled" in said(lambda: 3)
    disabled = torch.compiler.disable(lambda x: x.sum())
    assert "no graph was compiled" in said(lambda x: disabled(x), x())


def test_outside():
    text = said(lambda x: {"logits": x * 2}, x())
    assert "the loss is outside of the compiled function. Compile" in text


def test_unknown():
    assert "no known loss; docs/patterns.md" in said(lambda x: x.cosh().mean(), x())


@pytest.mark.parametrize("name", ["loss", "by_op"])
def test_inside_a_library(name, library):
    text = said(lambda x: getattr(library, name)(x * 2), x())
    what = "an autograd.Function" if name == "loss" else "torch.ops.fast_losses_of_a_test.loss"
    assert f"{what} in fast_losses (" in text
    assert "functions.py:" in text


def test_a_graph_break_inside_a_library(library):
    text = said(lambda x: library.broken(x * 2), x())
    assert "a call in fast_losses that ends the graph (" in text


def test_of_the_users_own():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.square().mean()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.expand(3, 4)

    text = said(lambda x: Own.apply(x * 2), x())
    assert "inside of an autograd.Function of your own" in text


def test_a_loss_that_is_found_needs_no_reason(library):
    report = compile_losses.explain(lambda x: F.mse_loss(x, x.detach()) + library.loss(x), x())
    assert len(report.losses) == 1
    assert "may be inside" not in str(report)
    assert report.foreign
