"""Factors of grad_output that the forward knows: they go into the gradient when it is computed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode

import compile_losses
from compile_losses.lower.known_factors import Factor, product_of
from tests.graphs import Head, classes, compare, real

pytestmark = pytest.mark.usefixtures("kernels_for_small_losses")


def average_of_valid(prediction, target, _):
    """The loss of the valid rows alone, as a sum over their number, counted after it."""
    total = F.cross_entropy(prediction, target, ignore_index=3, reduction="sum")
    return total / (target != 3).sum().clamp(min=1)


def shared(prediction, target, count):
    return 0.3 * F.cross_entropy(prediction, target) + F.cross_entropy(-prediction, target) / count


FACTORS = {
    "constant": lambda p, t, n: 0.5 * F.cross_entropy(p, t),
    "negative": lambda p, t, n: -F.cross_entropy(p, t) / 3,
    "tensor": lambda p, t, n: F.cross_entropy(p, t, reduction="sum") / n,
    "product of tensors": lambda p, t, n: n * (F.cross_entropy(p, t) / (n + 1)) * 0.25,
    "integer": lambda p, t, n: F.cross_entropy(p, t, reduction="sum") / t.numel(),
    "counted afterwards": average_of_valid,
    "stacked": lambda p, t, n: torch.stack([F.cross_entropy(p, t), n]).mean(),
    "float64": lambda p, t, n: F.cross_entropy(p, t).double() * 0.1,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("factor", FACTORS)
def test_factor(factor, graphs, no_code):
    compare(Head(FACTORS[factor]), (*classes(), torch.tensor(7.0)), factors=(1.0, 3.0))
    assert "grad_output: %" in graphs["joint"][0]
    # What is left for the backward is the tangent alone, and scale_ returns at once when it is 1.
    assert "scale_.default](args = (%getitem_4, %tangents_1)" in graphs["post"][1]


def test_dynamic_shapes(graphs, no_code):
    """Divided by a size that is a symbol."""
    model = Head(lambda p, t: F.mse_loss(p, t, reduction="sum") / p.shape[0])
    compiled = torch.compile(copy.deepcopy(model), backend="compile_losses", dynamic=True)
    for rows in (8, 5):
        inputs = real(rows)
        results = []
        for function in (model, compiled):
            loss = function(*inputs)
            results.append((loss, *torch.autograd.grad(loss * 3, list(function.parameters()))))
        torch.testing.assert_close(*results)
    assert "grad_output: %" in graphs["joint"][0]


UNKNOWN = {
    "of the loss": lambda p, t, n: F.cross_entropy(p, t) ** 2,
    "divided by itself": lambda p, t, n: (lambda v: v / v.detach())(F.cross_entropy(p, t)),
    "random": lambda p, t, n: F.cross_entropy(p, t) * torch.rand_like(n),
    "none": lambda p, t, n: F.cross_entropy(p, t) + n,
}


@pytest.mark.parametrize("factor", UNKNOWN)
def test_no_factor(factor, graphs, no_code):
    """The gradient's factor depends on the loss, or may not be computed before it."""
    model, inputs = Head(UNKNOWN[factor]), (*classes(), torch.tensor(7.0))
    if factor == "random":
        torch.compile(model, backend="compile_losses")(*inputs).backward()
    else:
        compare(model, inputs, factors=(1.0, 3.0))
    assert "grad_output: %" not in graphs["joint"][0]
    assert "_with_grad" in graphs["joint"][0]


def test_several_losses(graphs, no_code):
    """Each of them has its own factor; a term without one stays as it is."""

    class Detector(Head):
        def __init__(self):
            super().__init__(None)
            self.boxes = torch.nn.Linear(16, 12)

        def forward(self, x, target, box):
            classification = F.cross_entropy(self.linear(x), target)
            return 0.2 * classification + 5 * F.smooth_l1_loss(self.boxes(x), box)

    x, target = classes()
    compare(Detector(), (x, target, torch.randn(8, 12)), factors=(1.0, 3.0))
    assert_expected_inline(
        graphs["post"][0],
        """\
%permute = call_function[target=torch.ops.aten.permute.default](args = (%primals_1, [1, 0]), kwargs = {})
%addmm = call_function[target=torch.ops.aten.addmm.default](args = (%primals_2, %primals_3, %permute), kwargs = {})
%full_default_2 = call_function[target=torch.ops.aten.full.default](args = ([], 0.2), kwargs = {dtype: torch.float32, layout: torch.strided, device: cpu, pin_memory: False})
%cross_entropy_with_grad__default = call_function[target=torch.ops.fused.cross_entropy_with_grad_.default](args = (%addmm, %primals_4, None, 1, -100, 0.0, torch.float32), kwargs = {grad_output: %full_default_2})
%mul = call_function[target=torch.ops.aten.mul.Tensor](args = (%cross_entropy_with_grad__default, 0.2), kwargs = {})
%permute_1 = call_function[target=torch.ops.aten.permute.default](args = (%primals_5, [1, 0]), kwargs = {})
%addmm_1 = call_function[target=torch.ops.aten.addmm.default](args = (%primals_6, %primals_3, %permute_1), kwargs = {})
%full_default_3 = call_function[target=torch.ops.aten.full.default](args = ([], 5.0), kwargs = {dtype: torch.float32, layout: torch.strided, device: cpu, pin_memory: False})
%smooth_l1_loss_with_grad__default = call_function[target=torch.ops.fused.smooth_l1_loss_with_grad_.default](args = (%addmm_1, %primals_7, None, 1, 1.0, torch.float32), kwargs = {grad_output: %full_default_3})
%mul_1 = call_function[target=torch.ops.aten.mul.Tensor](args = (%smooth_l1_loss_with_grad__default, 5), kwargs = {})
%add = call_function[target=torch.ops.aten.add.Tensor](args = (%mul, %mul_1), kwargs = {})""",
    )
    assert graphs["post"][1].count("%tangents_1), kwargs") == 2


@pytest.mark.parametrize("number", [0.0, float("inf"), float("nan"), 1e30])
def test_extreme_factors(number):
    """Finite where torch's gradient is, and the same there."""
    model, (x, t) = Head(FACTORS["tensor"]), classes()
    compiled = torch.compile(copy.deepcopy(model), backend="compile_losses")
    results = []
    for function in (model, compiled):
        loss = function(x, t, torch.tensor(number))
        gradients = torch.autograd.grad(loss, list(function.parameters()))
        # An infinite factor makes torch's gradient infinite or nan, by the order of its sums.
        results.append([torch.nan_to_num(g, 0.0, 0.0, 0.0) for g in gradients])
        results[-1] += [g.isfinite() for g in gradients]
    torch.testing.assert_close(*results)


def test_numbers_on_the_host():
    """The factor lies on the loss's device, wherever its parts do."""
    graph = torch.fx.Graph()

    def placeholder(name, value):
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    with FakeTensorMode():
        tangent = torch.empty((), device="cuda")  # fake: there need not be one
        half, count = torch.empty(()), torch.empty((), dtype=torch.int64)
    nodes = [placeholder(*pair) for pair in (("half", half), ("count", count))]
    factor = Factor(placeholder("tangent", tangent), 0.5, nodes[:1], nodes[1:])
    loss = placeholder("loss", tangent)
    value = product_of(factor, torch.float32, tangent, loss).meta["val"]
    assert value.device.type == "cuda"
    assert value.dtype == torch.float32


def test_weighted_mean():
    """The sum of the weights divides the gradient where it is computed."""

    def loss(p, t, w):
        return F.mse_loss(p, t, weight=w)

    inputs = torch.randn(8, 16), torch.randn(8, 12), torch.rand(8, 12)
    (site,) = compile_losses.explain(Head(loss), *inputs).losses
    assert site.plan == (
        "kernel",
        "gradient in forward with its factor",
        "in place",
        "scale in place",
    )


def test_told():
    report = compile_losses.explain(Head(FACTORS["constant"]), *classes(), torch.tensor(7.0))
    assert report.sites[0].plan == (
        "kernel",
        "gradient in forward with its factor",
        "in place",
        "scale in place",
    )
