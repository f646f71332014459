"""Cross entropy with class probabilities, under the name of the ops behind the public one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.specs.cross_entropy import torch_loss
from tests.specs.spec import Sample, Spec, Spelling


class _Exact(torch.autograd.Function):
    """In NumPy's long double: over rows this wide torch's float64 is no better than ours."""

    @staticmethod
    def forward(ctx, input, target, reduction):
        x, q = (tensor.detach().numpy().astype(np.longdouble) for tensor in (input, target))
        shifted = x - x.max(1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        divisor = len(x) if reduction == 1 else 1
        gradients = np.exp(log_p) * q.sum(1, keepdims=True) - q, -log_p
        ctx.gradients = [torch.from_numpy((g / divisor).astype(np.float64)) for g in gradients]
        ctx.each = reduction == 0
        losses = -(q * log_p).sum(1)
        if ctx.each:
            return torch.from_numpy(losses.astype(np.float64))
        return torch.tensor(float(losses.sum() / divisor), dtype=torch.float64)

    @staticmethod
    def backward(ctx, grad_output):
        if ctx.each:
            grad_output = grad_output.unsqueeze(1)
        return (*(gradient * grad_output for gradient in ctx.gradients), None)


def exact_loss(input, target, *weight, reduction=1, **options):
    if input.shape[-1] < 100_000:
        return torch_loss(input, target, *weight, reduction=reduction, **options)
    assert not weight
    assert not options
    return _Exact.apply(input, target, reduction)


def samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    generator = torch.Generator(device="cpu").manual_seed(0)

    def logits(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.to(device, dtype)

    def q(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.softmax(min(1, len(shape) - 1)).to(device, dtype)

    weight = torch.rand(37, generator=generator, dtype=torch.float64).to(device, dtype) + 0.5
    one_hot = F.one_hot(torch.arange(20) % 37, 37).to(device, dtype)
    masked = logits(20, 37)
    masked[:, 3:9] = -torch.inf
    unmasked = q(20, 37)
    unmasked[:, 3:9] = 0
    for reduction in (0, 1, 2):
        option = {"reduction": reduction}
        x, t = logits(20, 37), q(20, 37)

        def sample(name, x, t, *rest, reduction=reduction, differentiable=(0, 1), **more):
            tensors = (x, t, *rest)
            return Sample(name, tensors, {"reduction": reduction, **more}, differentiable)

        yield sample("plain", x, t)
        yield sample("only input", x, t, differentiable=(0,))
        yield sample("only target", x, t, differentiable=(1,))
        yield sample("smoothing", x, t, label_smoothing=0.1)
        yield sample("weight", x, t, weight)
        yield sample("weight differentiated", x, t, weight, differentiable=(0, 1, 2))
        yield sample("only weight", x, t, weight, differentiable=(2,))
        yield sample("all of it", x, t, weight, differentiable=(0, 1, 2), label_smoothing=0.3)
        yield sample("negative smoothing", x, t, label_smoothing=-1.0)
        yield sample("negative ignore_index", x, t, ignore_index=-1)
        yield sample("no distribution", x, logits(20, 37))
        yield sample("one-hot", x, one_hot)
        yield sample("-inf mask", masked, unmasked)
        yield sample("one row, no batch", logits(37), q(37))
        yield sample("one class", logits(20, 1), q(20, 1))
        yield sample("confident", logits(20, 37, scale=20), q(20, 37, scale=20))
        yield sample("offset by 700", logits(20, 37) + 700, t)
        yield sample("offset, smoothing", logits(20, 37) + 700, t, label_smoothing=0.1)
        yield sample("outlier", torch.where(one_hot > 0, 1e4, logits(20, 37)), t)
        yield sample("transposed", logits(37, 20).t(), q(37, 20).t())
        yield sample("one transposed", logits(37, 20).t(), t)
        yield sample("other transposed", x, q(37, 20).t())
        yield sample("sliced", logits(40, 74)[::2, ::2], q(40, 74)[::2, ::2])
        yield sample("offset storage", logits(20 * 37 + 1)[1:].view(20, 37), t)
        yield sample("padded rows", logits(20, 50)[:, :37], q(20, 50)[:, :37])
        yield sample("expanded", logits(1, 37).expand(20, 37), q(20, 1).expand(20, 37))
        yield sample("image", logits(2, 37, 5, 9), q(2, 37, 5, 9))
        yield sample(
            "image with all of it",
            logits(2, 37, 5, 19),
            q(2, 37, 5, 19),
            weight,
            differentiable=(0, 1, 2),
            label_smoothing=0.1,
        )
        yield sample(
            "channels-last",
            logits(2, 37, 5, 9).to(memory_format=torch.channels_last),
            q(2, 37, 5, 9).to(memory_format=torch.channels_last),
        )
        yield sample("sequence", logits(3, 37, 11), q(3, 37, 11))
        yield sample("odd strides", logits(9, 2, 37, 5).permute(1, 2, 3, 0), q(2, 37, 5, 9))
        yield sample("wide", logits(3, 5003), q(3, 5003))
        yield sample("very wide", logits(2, 131_101), q(2, 131_101))
        yield sample("many rows", logits(3000, 7), q(3000, 7))
        if dtype == torch.bfloat16:
            yield sample("float32 target", x, t.float())
            yield sample("float32 input and weight", x.float(), t, weight.float())
        yield Sample("no rows", (logits(0, 37), q(0, 37)), option, (0, 1))


def soft_targets():
    return torch.randn(6, 10, requires_grad=True), torch.rand(6, 10).softmax(-1)


def leaves():
    return torch.randn(6, 10, requires_grad=True), torch.rand(6, 10, requires_grad=True)


def half_logits():
    x, q = soft_targets()
    return x.detach().bfloat16().requires_grad_(), q.bfloat16()


def weighted():
    return (*leaves(), torch.rand(10, requires_grad=True))


def images():
    return torch.randn(2, 10, 4, 4, requires_grad=True), torch.rand(2, 10, 4, 4).softmax(1)


def mixed_up(x, q):
    """Mixup: targets are mixtures of two samples'."""
    return F.cross_entropy(x, 0.3 * q + 0.7 * q.flip(0))


MATCHES = [
    Spelling("F.cross_entropy", F.cross_entropy, soft_targets),
    Spelling("target differentiated", F.cross_entropy, leaves),
    Spelling("sum", lambda x, q: F.cross_entropy(x, q, reduction="sum"), soft_targets),
    Spelling("none", lambda x, q: F.cross_entropy(x, q, reduction="none"), soft_targets),
    Spelling("keywords", lambda x, q: F.cross_entropy(target=q, input=x), soft_targets),
    Spelling("smoothing", lambda x, q: F.cross_entropy(x, q, label_smoothing=0.1), soft_targets),
    Spelling("weight", lambda x, q, w: F.cross_entropy(x, q, w), weighted, since=(2, 13)),
    Spelling(
        "nn.CrossEntropyLoss",
        lambda x, q: nn.CrossEntropyLoss(label_smoothing=0.2)(x, q),
        soft_targets,
    ),
    Spelling("image", F.cross_entropy, images),
    Spelling("bfloat16", F.cross_entropy, half_logits),
    Spelling("of float()", lambda x, q: F.cross_entropy(x.float(), q), half_logits),
    Spelling("both of float()", lambda x, q: F.cross_entropy(x.float(), q.float()), half_logits),
    Spelling("mixup", mixed_up, soft_targets),
    Spelling("aten", lambda x, q: torch.ops.aten.cross_entropy_loss(x, q), soft_targets),
]

NEAR_MISSES = [
    Spelling("a sum without the logits", lambda x, q: (q * x).sum(), soft_targets),
    Spelling(
        "softmax over the rows",
        lambda x, q: -(q * F.log_softmax(x, 0)).sum(-1).mean(),
        soft_targets,
    ),
]

SPEC = Spec(
    name="cross_entropy_probabilities",
    public="cross_entropy",
    torch_loss=torch_loss,
    exact_loss=exact_loss,
    samples=samples,
    operands=lambda rows=4, cols=5, dtype=torch.float64: (
        torch.randn(rows, cols, dtype=dtype),
        torch.randn(rows, cols, dtype=dtype).softmax(-1),
    ),
    matches=MATCHES,
    near_misses=NEAR_MISSES,
    parts=("forward", "backward", "weight_backward", "with_grad", "with_grad_"),
    broadcasts=False,
)
