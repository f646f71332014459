"""The ops' gradients: gradcheck, second derivatives, transforms, graphs that are used again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.calls import specs
from tests.specs import SPECS


@pytest.mark.sampled(2)
@specs
def test_gradcheck(spec, device):
    operands = [
        t.to(device).requires_grad_() if t.is_floating_point() else t.to(device)
        for t in spec.operands(4, 5)
    ]
    for reduction in (0, 1, 2):

        def function(*tensors, reduction=reduction):
            return spec.op(*tensors, reduction=reduction)

        assert torch.autograd.gradcheck(function, operands)
        assert torch.autograd.gradgradcheck(function, operands)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("smooth_l1_loss", {"beta": 0.3}),
        ("huber_loss", {"delta": 0.3}),
        ("kl_div", {"log_input": False}),
        ("kl_div", {"log_target": True}),
        ("kl_div", {"log_target": True, "log_input": False, "reduction": 3}),
        ("cross_entropy", {"label_smoothing": 0.2}),
        ("cross_entropy_probabilities", {"label_smoothing": 0.2}),
        ("softmax_kl_div", {"temperature": 2.5, "reduction": 3}),
        ("softmax_kl_div", {"dim": 0}),
        ("softmax_js_div", {"beta": 0.1, "temperature": 2.5, "reduction": 3}),
        ("softmax_js_div", {"beta": 0.9, "dim": 0, "reduction": 0}),
        ("softmax_finite_kl_div", {"entropy": False, "temperature": 2.5, "reduction": 3}),
        ("softmax_finite_kl_div", {"dim": 0, "reduction": 0}),
    ],
)
def test_gradcheck_options(name, options, device):
    spec = SPECS[name]
    operands = [
        t.to(device).requires_grad_() if t.is_floating_point() else t.to(device)
        for t in spec.operands(4, 5)
    ]
    assert torch.autograd.gradcheck(lambda *t: spec.op(*t, **options), operands)
    assert torch.autograd.gradgradcheck(lambda *t: spec.op(*t, **options), operands)


WEIGHTED = [spec for spec in SPECS.values() if "weight" in spec.arguments and spec.broadcasts]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", WEIGHTED, ids=lambda spec: spec.name)
@pytest.mark.parametrize("shape", [(4, 5), (5,), (4, 1), ()], ids=str)
def test_gradcheck_weight(spec, shape, device):
    """Gradients of all three tensors, twice, in each of which any may be the only one."""
    input, target = (t.to(device).requires_grad_() for t in spec.operands(4, 5))
    weight = (torch.rand(shape, dtype=torch.float64, device=device) + 0.5).requires_grad_()
    for reduction in (0, 1, 2):

        def function(a, b, w, reduction=reduction):
            return spec.op(a, b, reduction=reduction, weight=w)

        assert torch.autograd.gradcheck(function, (input, target, weight))
        assert torch.autograd.gradgradcheck(function, (input, target, weight))
        for i in range(3):
            tensors = [input.detach(), target.detach(), weight.detach()]
            tensors[i].requires_grad_()
            (ours,) = torch.autograd.grad(function(*tensors).sum(), tensors[i])
            torchs = spec.torch_loss(*tensors[:2], reduction=reduction, weight=tensors[2])
            torch.testing.assert_close(ours, torch.autograd.grad(torchs.sum(), tensors[i])[0])


@pytest.mark.parametrize("weights", [("weight",), ("pos_weight",), ("weight", "pos_weight")])
def test_gradcheck_binary_weights(weights, device):
    spec = SPECS["binary_cross_entropy_with_logits"]
    operands = [t.to(device).requires_grad_() for t in spec.operands(4, 5)]
    given = {
        name: torch.rand(shape, dtype=torch.float64, device=device)
        for name, shape in zip(weights, ((4, 1), (5,)), strict=False)
    }
    assert torch.autograd.gradcheck(lambda *t: spec.op(*t, **given), operands)
    assert torch.autograd.gradgradcheck(lambda *t: spec.op(*t, **given), operands)


def test_weights_in_functional_transforms(device):
    a, b, w = (torch.rand(4, 5, device=device) for _ in range(3))
    for name in ("mse_loss", "huber_loss"):
        ours, torchs = getattr(torch.ops.fused, name), getattr(F, name)
        for transform in (torch.func.grad, torch.func.jacrev):
            results = [
                transform(lambda *t, f=f: f(t[0], t[1], weight=t[2]), argnums=(0, 2))(a, b, w)
                for f in (ours, torchs)
            ]
            torch.testing.assert_close(*results)
        results = [
            torch.func.vmap(lambda x, y, z, f=f: f(x, y, weight=z))(a, b, w) for f in (ours, torchs)
        ]
        torch.testing.assert_close(*results)
    results = [
        torch.func.grad(lambda x, f=f: f(x, b, pos_weight=w[0]))(a)
        for f in (
            torch.ops.fused.binary_cross_entropy_with_logits,
            F.binary_cross_entropy_with_logits,
        )
    ]
    torch.testing.assert_close(*results)


@specs
def test_gradgradcheck_broadcast_and_same_tensor(spec, device):
    if not spec.broadcasts:
        pytest.skip(reason=f"{spec.name}'s input and target do not broadcast")
    input, _ = (t.to(device).requires_grad_() for t in spec.operands(3, 1))
    _, target = (t.to(device).requires_grad_() for t in spec.operands(1, 4))
    assert torch.autograd.gradcheck(spec.op, (input, target))
    assert torch.autograd.gradgradcheck(spec.op, (input, target))
    square = spec.operands(4, 4)[0].to(device).requires_grad_()
    ours = torch.autograd.grad(spec.op(square, square * 1).exp(), square, create_graph=True)[0]
    torchs = torch.autograd.grad(
        spec.torch_loss(square, square * 1).exp(), square, create_graph=True
    )[0]
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), square), torch.autograd.grad(torchs.sum(), square)
    )


def test_retain_graph_and_version_counter(device):
    a = torch.randn(30, device=device, requires_grad=True)
    b = torch.randn(30, device=device)
    loss = torch.ops.fused.mse_loss(a, b)
    first = torch.autograd.grad(loss, a, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, a), first, rtol=0, atol=0)
    loss = torch.ops.fused.mse_loss(a, b)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@specs
def test_functional_transforms(spec, device):
    """Inside torch.func the public op is torch's loss."""
    a, b = (t.to(device) for t in spec.operands(6, 5))

    def ours(x, y):
        return spec.op(x, y)

    def torchs(x, y):
        return spec.torch_loss(x, y)

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian, torch.func.vmap):
        torch.testing.assert_close(transform(ours)(a, b), transform(torchs)(a, b))
    tangent = torch.ones_like(a)
    jvps = [torch.func.jvp(lambda x, f=f: f(x, b), (a,), (tangent,)) for f in (ours, torchs)]
    torch.testing.assert_close(*jvps)


@specs
def test_forward_mode(spec, device):
    from torch.autograd import forward_ad

    a, b = (t.to(device) for t in spec.operands(6, 5))
    results = []
    for function in (spec.op, spec.torch_loss):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(a, torch.ones_like(a))
            results.append(forward_ad.unpack_dual(function(dual, b)).tangent)
    torch.testing.assert_close(*results)
