"""Operands that hurt: infinities, nan, zeros, denormals, ignored and missing rows, weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.accuracy import assert_accurate
from tests.calls import dtypes
from tests.specs import SPECS


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "huber_loss"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@dtypes
def test_weight_is_torchs(name, reduction, dtype, device):
    """torch's own weighted losses, whose weight has input's size, also in another dtype."""
    a, b, w = (torch.rand(7, 9, device=device).to(dtype) for _ in range(3))
    theirs, ours = getattr(F, name), getattr(torch.ops.fused, name)
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    for weight in (w, w.float(), w.double(), (w > 0.5).to(dtype), w > 0.5, (4 * w).long()):
        expected = theirs(a, b, reduction=reduction, weight=weight)
        exact = theirs(a.double(), b.double(), reduction=reduction, weight=weight.double())
        assert_accurate(ours(a, b, number, weight=weight), expected, exact)
    # A weight that is one number does not promote, but for its sum in the mean.
    a, b, w = a[0, 0], b, torch.full((), 0.3, dtype=torch.float64, device=device)
    expected = theirs(a, b, reduction=reduction, weight=w)
    assert ours(a, b, number, weight=w).dtype == expected.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pos_weight", [None, 2.0, 0.0])
def test_binary_cross_entropy_special_logits(pos_weight, dtype, device):
    """Infinite, nan and huge logits and targets, as torch has them."""
    values = [0.0, 1e-30, 1.0, 20.0, 90.0, 1e4, 1e38, torch.inf]
    logits = torch.tensor([*values, *(-v for v in values), torch.nan], dtype=dtype, device=device)
    targets = torch.tensor([0.0, 0.3, 1.0, torch.nan], dtype=dtype, device=device)
    spec = SPECS["binary_cross_entropy_with_logits"]
    weight = None if pos_weight is None else torch.tensor(pos_weight, device=device)
    results = []
    for function, kind in ((spec.op, dtype), (spec.torch_loss, dtype), (spec.torch_loss, None)):
        x, y = (
            t.to(kind or torch.float64).contiguous().requires_grad_()
            for t in torch.broadcast_tensors(logits[:, None], targets)
        )
        loss = function(x, y, reduction=0, pos_weight=weight)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), (x, y))))
    for ours, eager, exact in zip(*results, strict=True):
        assert_accurate(ours, eager, exact)


@pytest.mark.kernels
def test_confident_binary_cross_entropy_keeps_its_digits(device):
    """torch subtracts logits from their log-sigmoid, and loses the loss of confident negatives."""
    logits = torch.linspace(-80.0, 80.0, 4001, device=device)
    for target in (0.0, 1.0):
        ours = torch.ops.fused.binary_cross_entropy_with_logits(
            logits, torch.full_like(logits, target), reduction=0
        )
        signed = (logits if target == 0.0 else -logits).double()
        exact = F.softplus(signed, threshold=1e9)
        torch.testing.assert_close(ours.double(), exact, rtol=4 * 2**-23, atol=0)


def test_l1_gradient_of_equal_and_nan_elements(device):
    a = torch.tensor([0.0, -0.0, 1.0, -3.0, torch.nan, torch.inf], device=device)
    b = torch.tensor([0.0, 0.0, 1.0, 2.0, 1.0, torch.inf], device=device)
    for loss, options in ((F.l1_loss, {}), (F.smooth_l1_loss, {"beta": 0.0})):
        results = []
        for function in (loss, getattr(torch.ops.fused, loss.__name__)):
            leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
            results.append(torch.autograd.grad(function(*leaves, **options), leaves))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("wide", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("fill", ["-inf mask", "leading -inf", "all -inf", "inf", "nan", "outlier"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_special_logits(fill, smoothing, wide, device):
    x = torch.randn(6, 3000, dtype=torch.float64)
    t = torch.randint(1500, 3000, (6,))
    if fill == "-inf mask":
        x[:, torch.randperm(1500)] = -torch.inf
    elif fill == "leading -inf":
        x[:, :1200] = -torch.inf
    elif fill == "all -inf":
        x[2] = -torch.inf
    elif fill == "inf":
        x[2, 5] = torch.inf
    elif fill == "nan":
        x[2, 5] = torch.nan
    else:
        x[:, 7] = 1e4
    t[4] = -100
    x = x.t().contiguous().t() if wide else x
    spec = SPECS["cross_entropy"]
    for dtype in (torch.float32, torch.bfloat16):
        for reduction in ("none", "mean"):
            results = []
            options = {"reduction": {"none": 0, "mean": 1}[reduction], "label_smoothing": smoothing}
            for function, logits in (
                (spec.op, x.to(device, dtype)),
                (spec.torch_loss, x.to(device, dtype)),
                (spec.torch_loss, x.to(dtype).double()),
            ):
                leaf = logits.detach().requires_grad_()
                loss = function(leaf, t.to(leaf.device), **options)
                (gradient,) = torch.autograd.grad(loss.sum(), leaf)
                results.append((loss.detach(), gradient))
            (ours, eager, exact) = results
            assert_accurate(ours[0], eager[0], exact[0], f"loss {reduction}")
            assert_accurate(ours[1], eager[1], exact[1], f"gradient {reduction}")


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cross_entropy_ignored_rows(reduction, device):
    """All rows ignored: the mean is nan, its gradient 0; nan rows stay nan in the gradient."""
    spec = SPECS["cross_entropy"]
    x = torch.randn(5, 9, device=device)
    x[2] = torch.nan
    t = torch.full((5,), -100, device=device)
    results = []
    for function in (spec.op, spec.torch_loss):
        leaf = x.clone().requires_grad_()
        loss = function(leaf, t, reduction=reduction)
        results.append((loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]))
    torch.testing.assert_close(*results, equal_nan=True)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cross_entropy_no_rows(reduction, device):
    x = torch.randn(0, 9, device=device, requires_grad=True)
    t = torch.zeros(0, dtype=torch.int64, device=device)
    ours = torch.ops.fused.cross_entropy(x, t, reduction=reduction)
    torch.testing.assert_close(
        ours, SPECS["cross_entropy"].torch_loss(x, t, reduction=reduction), equal_nan=True
    )
    assert torch.autograd.grad(ours.sum(), x)[0].shape == (0, 9)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kl_div_of_every_16_bit_target(dtype, device):
    """Little more than the result's rounding may be wrong with any, also where terms cancel."""
    numbers = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
    target = numbers[numbers.isfinite() & (numbers >= 0)]
    assert target.numel() > 2**14
    finfo = torch.finfo(dtype)
    logarithm = target.double().clamp(min=1e-300).log()
    for input in (torch.full_like(target, -1.5), logarithm.clamp(min=finfo.min).to(dtype)):
        exact = F.kl_div(input.double(), target.double(), reduction="none")
        ours = torch.ops.fused.kl_div(input, target, reduction=0).double()
        rounding = finfo.eps * exact.abs() + finfo.smallest_normal * finfo.eps
        arithmetic = 2.0**-20 * target.double() * (1 + input.double().abs())  # in float32
        wrong = ~((ours - exact).abs() <= rounding + arithmetic) & (exact.abs() < finfo.max)
        assert not wrong.any(), (target[wrong][:5], input[wrong][:5], ours[wrong][:5])
    negative = numbers[numbers < 0]
    assert torch.ops.fused.kl_div(negative, negative, reduction=0).isnan().all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1e-7, 0.5, 1.0, 2.0, 1e38, torch.inf, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_div_special_values(value, dtype, device):
    """Logarithm and exponential over their whole range, and torch's corners for target 0."""
    spec = SPECS["kl_div"]
    others = torch.tensor([0.0, 1e-30, 0.3, 1.0, 3.0, torch.nan], dtype=dtype, device=device)
    values = torch.full_like(others, value)
    for options in (
        {"log_input": True},
        {"log_input": False},
        {"log_target": True},
        {"log_target": True, "log_input": False},
    ):
        # An infinite probability is no corner of torch's that anyone could want.
        for input, target in ((values, others), (others, values))[: 1 if value == torch.inf else 2]:
            ours = spec.op(input, target, reduction=0, **options)
            eager = spec.torch_loss(input, target, reduction=0, **options)
            exact = spec.torch_loss(input.double(), target.double(), reduction=0, **options)
            same_kind = torch.isfinite(eager) == torch.isfinite(exact)
            assert_accurate(ours[same_kind], eager[same_kind], exact[same_kind], str(options))


@pytest.mark.parametrize("op", ["softmax_kl_div", "softmax_js_div", "softmax_finite_kl_div"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_softmax_divergence_at_infinite_temperature(op, layout, device):
    """Both softmaxes are uniform then, whatever the logits."""
    x, t = torch.randn(4, 33, device=device), torch.randn(4, 33, device=device) * 9
    if layout == "columns":
        x, t = (tensor.t().contiguous().t() for tensor in (x, t))
    leaf = x.requires_grad_()
    loss = getattr(torch.ops.fused, op)(leaf, t, 0, temperature=torch.inf)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(loss, torch.zeros_like(loss))
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_input", [True, False])
def test_sum_of_kl_div_has_no_other_values_on_a_cpu(log_input, dtype):
    """Which adds up ordinary numbers another way: one that is not, and zeros, amid them."""
    tiny = torch.finfo(dtype).tiny
    values = [0.0, -0.0, tiny / 4, tiny, 1e-30, 0.5, 1.0, 3.0, 3e38, torch.inf, -1.0, torch.nan]
    target = torch.rand(700).to(dtype) * (torch.rand(700) > 0.3)
    input = torch.rand(700).to(dtype) + 0.1
    for x in values:
        for t in values:
            input[300], target[300] = x, t
            total, each = (
                torch.ops.fused.kl_div(input, target, reduction, log_input=log_input)
                for reduction in (2, 0)
            )
            expected = each.double().sum().to(dtype)
            torch.testing.assert_close(total, expected, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "distance", [0.0, 0.3, 2.0, 10.0, 30.0, 87.0, 87.4, 104.0, 1e30, torch.inf]
)
def test_sum_of_equal_exponentials_on_a_cpu(distance):
    """Errors of the same sign in every term of a softmax's sum, by rows and by columns. Where the
    terms are small beside 1, rounding the sum loses most; torch loses up to 3.3e-6."""
    logits = torch.full((4, 3000), 5.0)
    logits[:, 1:] -= distance
    for input in (logits, logits.t().contiguous().t()):
        for target in (0, 1):
            targets = torch.full((4,), target)
            ours = torch.ops.fused.cross_entropy(input, targets)
            exact = F.cross_entropy(input.double(), targets)
            torch.testing.assert_close(ours.double(), exact, rtol=0, atol=3e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ignored", [0, 1, 8], ids=["none ignored", "one ignored", "all ignored"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weights", [(0.0, 0.0, 0.0), (0.0, 1.0, 2.0), (1.0, 0.0, 2.0)], ids=str)
@dtypes
def test_cross_entropy_of_class_weights_of_0(weights, reduction, smoothing, ignored, dtype, device):
    """A mean over a total weight of 0 is nan; with smoothing too, where the losses are not 0."""
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    shapes = [(4, 3), (4, 3, 2), (3,)]
    if device != "cpu" and ignored and reduction == "mean" and not smoothing:
        shapes.remove((3,))  # on CUDA torch's mean of one row alone that is ignored is 0
    for shape in shapes:
        x = torch.randn(shape, dtype=torch.float64).to(device, dtype)
        weight = torch.tensor(weights, dtype=dtype, device=device)
        target = torch.zeros((*shape[:-2], *shape[-1:]) if len(shape) > 2 else shape[:-1]).long()
        target.view(-1)[:ignored] = -100
        target = target.to(device)
        results = []
        for function, leaf, w, option in (
            (torch.ops.fused.cross_entropy, x, weight, number),
            (F.cross_entropy, x, weight, reduction),
            (F.cross_entropy, x.double(), weight.double(), reduction),
        ):
            leaf = leaf.detach().requires_grad_()
            loss = function(leaf, target, w, reduction=option, label_smoothing=smoothing)
            results.append((loss.detach(), *torch.autograd.grad(loss.sum(), leaf)))
        for ours, eager, exact in zip(*results, strict=True):
            assert_accurate(ours, eager, exact)
        if reduction != "none":
            loss, gradient = torch.ops.fused.cross_entropy_with_grad(
                x, target, weight, number, -100, smoothing, dtype
            )
            torch.testing.assert_close(loss, results[0][0], equal_nan=True)
            torch.testing.assert_close(gradient, results[0][1], equal_nan=True)
        if reduction == "mean" and weights[0] == 0:
            assert loss.isnan()
