"""Soft-capped cross entropy: the leaf ops with a softcap, on the way of every shape."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.library import opcheck

from compile_losses.ops.cross_entropy import reference
from tests.accuracy import assert_accurate

fused = torch.ops.fused
NONE, MEAN, SUM = 0, 1, 2
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

#: Classes of a dense row: on a GPU from one lane's registers over a block's to several blocks'.
WIDTHS = [1, 7, 32, 100, 257, 516, 1031, 4099, 32_000, 200_003]
#: Shapes of logits, and what is done to them: other than dense rows that start on a boundary.
LAYOUTS = {
    "offset": ((4 * 515 + 1,), lambda x: x[1:].view(4, 515)),
    "padded": ((6, 1040), lambda x: x[:, :1031]),
    "transposed": ((65, 70), lambda x: x.t()),
    "transposed, one class": ((1, 70), lambda x: x.t()),
    "every other": ((6, 74), lambda x: x[:, ::2]),
    "images": ((2, 37, 5, 19), lambda x: x),
    "channels last": ((2, 37, 5, 9), lambda x: x.to(memory_format=torch.channels_last)),
    "one row": ((37,), lambda x: x),
}


def problem(shape, arrange, dtype, device, scale):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    logits = arrange(values.to(device, dtype))
    dim = min(1, logits.dim() - 1)
    classes = logits.shape[dim]
    target = torch.randint(classes, logits.shape[:dim] + logits.shape[dim + 1 :])
    if target.numel() > 2:
        target.view(-1)[1] = -100
    weight = torch.rand(classes, generator=generator, dtype=torch.float64) + 0.5
    return logits, target.to(device), weight.bfloat16().to(device, dtype)


def torchs(logits, target, weight, reduction, smoothing, softcap, grad_output):
    leaf = logits.detach().clone().requires_grad_()
    loss = reference(leaf, target, weight, reduction, -100, smoothing, softcap)
    loss.backward(grad_output.to(loss).reshape(loss.shape))
    return loss.detach(), leaf.grad


def exactly(logits, target, weight, reduction, smoothing, softcap, grad_output):
    """As torchs in float64; of float64 logits by the formula, in numpy's longest floats, or torch
    would be compared with itself."""
    if logits.dtype != torch.float64:
        wide = None if weight is None else weight.double().cpu()
        arguments = (wide, reduction, smoothing, softcap, grad_output)
        return torchs(logits.double().cpu(), target.cpu(), *arguments)
    dim = min(1, logits.dim() - 1)
    values = logits.cpu().movedim(dim, -1)
    x = values.numpy().astype(np.longdouble)
    t, kept = target.cpu().numpy(), target.cpu().numpy() != -100
    classes = x.shape[-1]
    w = np.ones(classes, np.longdouble) if weight is None else weight.cpu().numpy().astype(x.dtype)
    with np.errstate(invalid="ignore"):
        tanh = np.tanh(x / softcap)
        y = softcap * tanh
        largest = np.fmax.reduce(y, -1, keepdims=True)
        exponentials = np.exp(y - largest)
        sums = exponentials.sum(-1, keepdims=True)
        one_hot = (np.arange(classes) == t[..., None]) * (w * (1 - smoothing))
        shares = np.where(kept[..., None], one_hot + w * smoothing / classes, 0)
        losses = np.where(shares != 0, shares * (np.log(sums) + largest - y), 0).sum(-1)
        p = exponentials / sums
        gradient = (p * shares.sum(-1, keepdims=True) - shares) * (1 - tanh * tanh)
    divisor = w[t[kept]].sum() if reduction == MEAN else 1
    scale = grad_output.numpy().astype(x.dtype) / divisor
    gradient *= scale[..., None] if reduction == NONE else scale
    loss = losses if reduction == NONE else losses.sum() / divisor
    gradient = torch.from_numpy(gradient.astype(np.float64)).movedim(-1, dim)
    return torch.from_numpy(np.asarray(loss, np.float64)), gradient


def check(logits, target, weight, reduction, smoothing, softcap, what):
    """Forward and backward, and where there is a reduction both at once, against float64."""
    each = reduction == NONE
    options = (weight, reduction, -100, smoothing)
    grad_output = torch.linspace(0.5, 1.5, target.numel() if each else 1, dtype=torch.float64)
    grad_output = grad_output.reshape(target.shape if each else ())
    arguments = (logits, target, weight, reduction, smoothing, softcap, grad_output)
    (eager, eager_gradient), (exact, exact_gradient) = torchs(*arguments), exactly(*arguments)
    given = grad_output.to(logits.device, logits.dtype)
    loss, stats, total = fused.cross_entropy_forward(
        logits, target, *options, logits.dtype, softcap
    )
    gradient = fused.cross_entropy_backward(
        given, logits, target, weight, stats, total, *options[1:], softcap
    )
    results = [("", loss, gradient)]
    if not each:
        both = fused.cross_entropy_with_grad(
            logits, target, *options, logits.dtype, softcap, grad_output=given
        )
        overwritten = torch.empty_like(logits).copy_(logits)
        loss = fused.cross_entropy_with_grad_(
            overwritten, target, *options, logits.dtype, softcap, grad_output=given
        )
        results += [(", with its gradient", *both), (", in place", loss, overwritten)]
    # With one class nothing is left of the gradient but the rounding of its terms.
    alone = exact_gradient.abs().max() < torch.finfo(torch.float64).eps
    atol = 4 * torch.finfo(logits.dtype).eps * grad_output.max().item() if alone else 0.0
    for way, loss, gradient in results:
        assert_accurate(loss, eager, exact, what + way)
        assert_accurate(gradient, eager_gradient, exact_gradient, f"{what}{way}, gradient", atol)


@pytest.mark.sampled(3)
@dtypes
@pytest.mark.parametrize("cols", WIDTHS)
def test_rows(cols, dtype, device):
    wide = cols > 10_000
    for scale, softcap in ((1.0, 30.0), (20.0, 5.0)):
        shape = (2 if wide else 20, cols)
        logits, target, weight = problem(shape, lambda x: x, dtype, device, scale)
        options = [(None, 0.0), (weight, 0.3)] if wide else [(None, 0.0), (weight, 0.0)]
        options += [] if wide else [(None, 0.1), (weight, 0.3)]
        for reduction in (MEAN,) if wide else (NONE, MEAN, SUM):
            for weights, smoothing in options:
                what = f"softcap {softcap}, reduction {reduction}, smoothing {smoothing}"
                check(logits, target, weights, reduction, smoothing, softcap, what)


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype, device):
    logits, target, weight = problem(*LAYOUTS[layout], dtype, device, 10.0)
    for reduction in (NONE, MEAN):
        for weights, smoothing in ((None, 0.0), (weight, 0.1)):
            check(logits, target, weights, reduction, smoothing, 7.5, f"smoothing {smoothing}")


@pytest.mark.sampled(2)
@dtypes
@pytest.mark.parametrize("cols", [7, 100, 1031, 9000])
@pytest.mark.parametrize("transposed", [False, True])
def test_extreme_logits(cols, transposed, dtype, device):
    """Saturated, masked and infinite logits count as plus or minus the cap, with a gradient of 0;
    a nan makes its row's loss and gradient nan."""
    logits, target, _ = problem((8, cols), lambda x: x, dtype, device, 1.0)
    most = torch.finfo(dtype).max
    logits[0, ::2] = 6e4
    logits[1, 1::2] = -6e4
    logits[2, ::3] = -math.inf
    logits[3] = -math.inf
    logits[4] = math.inf
    logits[5, cols // 2] = most
    logits[5, cols // 2 + 1] = -most
    logits[6, 2] = math.nan
    target[:8] = torch.tensor([0, 1, 0, 2, 3, cols // 2, 1, -100], device=device)
    logits[7, 3] = math.inf
    if transposed:
        logits = logits.t().contiguous().t()
    for reduction in (NONE, SUM):
        check(logits, target, None, reduction, 0.0, 5.0, "extreme")
        check(logits, target, None, reduction, 0.1, 5.0, "extreme, smoothing")
    loss, gradient = fused.cross_entropy_with_grad(
        logits[:6], target[:6], None, SUM, -100, 0.0, dtype, 5.0
    )
    assert loss.isfinite()
    assert (gradient[logits[:6].abs() > 5e4] == 0).all()


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 1e3, 1e6])
@dtypes
def test_caps(softcap, dtype, device):
    """From a cap that saturates all logits to one that changes none of their digits."""
    logits, target, _ = problem((20, 700), lambda x: x, dtype, device, 3.0)
    check(logits, target, None, MEAN, 0.0, softcap, f"softcap {softcap}")


def test_one_class_has_no_loss(device):
    """Exactly: the logit and the row's largest are rounded alike."""
    for dtype in DTYPES:
        for shape in ((300, 1), (1, 1, 300)):
            logits = torch.randn(shape, device=device).mul(20).to(dtype)
            target = torch.zeros(300, dtype=torch.int64, device=device).view(shape[0], *shape[2:])
            loss, *_ = fused.cross_entropy_forward(
                logits, target, None, NONE, -100, 0.0, dtype, 7.3
            )
            assert (loss == 0).all(), dtype


@dtypes
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(7, 11), (2, 11, 30)])
def test_shards_make_the_whole(shape, smoothing, dtype, device):
    logits, target, weight = problem(shape, lambda x: x, dtype, device, 10.0)
    logits[0, :4] = -math.inf  # a shard of nothing else
    softcap, options = 5.0, (-100, smoothing)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shards = list(pairwise((0, 4, 8, 8, 11)))
    parts = [
        fused.vocabulary_parallel_parts(
            logits[:, begin:end], target, weight, begin, 11, *options, softcap
        )
        for begin, end in shards
    ]
    masses = torch.stack([weight[begin:end].to(wide).sum() for begin, end in shards])
    loss, stats, _ = fused.vocabulary_parallel_merge(
        torch.stack(parts), target, weight, masses, 11, SUM, *options, dtype
    )
    one = torch.ones((), dtype=dtype, device=device)
    gradient = torch.cat(
        [
            fused.vocabulary_parallel_gradient(
                one, logits[:, begin:end], target, weight, stats, begin, 11, SUM, *options, softcap
            )
            for begin, end in shards
        ],
        1,
    )
    arguments = (logits, target, weight, SUM, smoothing, softcap, one.cpu())
    eager, exact = torchs(*arguments), exactly(*arguments)
    for ours, eagers, exacts in zip((loss, gradient), eager, exact, strict=True):
        assert_accurate(ours, eagers, exacts)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_autograd(reduction, device):
    logits, target, weight = problem((5, 6), lambda x: x, torch.float64, device, 3.0)

    def loss(x):
        return fused.cross_entropy_forward(
            x, target, weight, reduction, -100, 0.1, torch.float64, 2.0
        )[0]

    logits.requires_grad_()
    assert torch.autograd.gradcheck(loss, logits)
    assert torch.autograd.gradgradcheck(loss, logits)


def test_opcheck(device):
    logits, target, weight = problem((5, 6), lambda x: x, torch.float32, device, 3.0)
    options = (MEAN, -100, 0.1)
    arguments = (logits, target, weight, *options, torch.float32, 2.0)
    leaf = logits.clone().requires_grad_()
    opcheck(fused.cross_entropy_forward.default, (leaf, *arguments[1:]))
    _, stats, total = fused.cross_entropy_forward(*arguments)
    one = torch.ones((), device=device)
    backward = (one, leaf, target, weight, stats, total, *options, 2.0)
    opcheck(fused.cross_entropy_backward.default, backward)
    opcheck(fused.cross_entropy_with_grad.default, arguments, {"grad_output": one})
    in_place = (logits.clone(), *arguments[1:])
    opcheck(fused.cross_entropy_with_grad_.default, in_place, {"grad_output": one})
    shard = (weight, 0, 6, -100, 0.1, 2.0)
    opcheck(fused.vocabulary_parallel_parts.default, (logits, target, *shard))
    shard = (weight, stats, 0, 6, SUM, -100, 0.1, 2.0)
    opcheck(fused.vocabulary_parallel_gradient.default, (one, logits, target, *shard))


@pytest.mark.parametrize("softcap", [0.0, -1.0, math.nan])
def test_errors(softcap, device):
    logits, target, _ = problem((5, 6), lambda x: x, torch.float32, device, 3.0)
    arguments = (target, None, MEAN, -100, 0.0, torch.float32, softcap)
    for where in (device, "meta"):
        moved = [a.to(where) if isinstance(a, torch.Tensor) else a for a in arguments]
        with pytest.raises(RuntimeError, match="expected softcap to be positive, got"):
            fused.cross_entropy_forward(logits.to(where), *moved)
