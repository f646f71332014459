"""What the specs of divergences of two softmaxes share: exact arithmetic, and inputs that hurt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from compile_losses.ops.checks import reduction_name
from tests.specs.spec import Sample

Array = np.ndarray[Any, Any]
#: From the logarithms of both softmaxes and dim: what each class adds to the loss, and the
#: gradients of both rows of logits for temperature 1.
Divergence = Callable[[Array, Array, int], tuple[Array, tuple[Array, Array]]]


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx, divergence, input, target, reduction, temperature, dim):
        def log_softmax(tensor):
            scaled = tensor.detach().numpy().astype(np.longdouble) / np.longdouble(temperature)
            scaled = scaled - scaled.max(dim, keepdims=True, initial=-np.inf)
            return scaled - np.log(np.exp(scaled).sum(dim, keepdims=True))

        with np.errstate(all="ignore"):
            terms, gradients = divergence(log_softmax(input), log_softmax(target), dim)
            each = terms.sum(dim)
        name = reduction_name(reduction)
        divisor = {"mean": input.numel(), "batchmean": input.size(0)}.get(name, 1)
        scale = 1 / np.longdouble(temperature) / divisor if divisor else np.longdouble(np.nan)
        ctx.gradients = [torch.from_numpy((g * scale).astype(np.float64)) for g in gradients]
        ctx.dim = dim if name == "none" else None
        if name == "none":
            return torch.from_numpy(np.asarray(each).astype(np.float64))
        total = each.sum() / divisor if divisor else np.longdouble(np.nan)
        return torch.tensor(float(total), dtype=torch.float64)

    @staticmethod
    def backward(ctx, grad_output):
        if ctx.dim is not None:
            grad_output = grad_output.unsqueeze(ctx.dim)
        return (None, *(gradient * grad_output for gradient in ctx.gradients), None, None, None)


def exact(divergence: Divergence, input, target, reduction, temperature, dim) -> torch.Tensor:
    """In NumPy's long double: a divergence is a small difference of large numbers, and torch's
    float64 no better than ours."""
    return _Exact.apply(divergence, input, target, reduction, temperature, dim)


def samples(device: str, dtype: torch.dtype, **options: Any) -> Iterator[Sample]:
    """Every layout with every reduction, logits of all sizes, and both temperatures.

    Args:
        options: of the loss, given with every sample.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)

    def logits(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.to(device, dtype)

    masked = logits(20, 37)
    masked[:, 3:9] = -torch.inf
    outlier = logits(20, 37)
    outlier[:, 7] = 1e4
    for reduction in (0, 1, 2, 3):

        def sample(name, x, t, reduction=reduction, differentiable=(0, 1), **more):
            named = {"reduction": reduction, **options, **more}
            return Sample(name, (x, t), named, differentiable)

        x, t = logits(20, 37), logits(20, 37)
        yield sample("plain", x, t)
        yield sample("only input", x, t, differentiable=(0,))
        yield sample("only target", x, t, differentiable=(1,))
        yield sample("temperature 2", x, t, temperature=2.0)
        yield sample("temperature 0.3", x, t, temperature=0.3)
        yield sample("one row", logits(37), logits(37))
        yield sample("one class", logits(20, 1), logits(20, 1))
        yield sample("confident", logits(20, 37, scale=20), logits(20, 37, scale=20))
        yield sample("offset by 700", logits(20, 37) + 700, t)
        yield sample("both offset", logits(20, 37) + 700, logits(20, 37) - 700)
        # -inf in target alone is probability 0; torch's gradient with respect to it is nan.
        yield sample("-inf target", x, masked, differentiable=(0,))
        yield sample("-inf input", masked, t, differentiable=(0,))
        yield sample("outlier target", x, outlier, differentiable=(0,))
        yield sample("outlier input", outlier, t)
        yield sample("transposed", logits(37, 20).t(), logits(37, 20).t())
        yield sample("one transposed", logits(37, 20).t(), t)
        yield sample("other transposed", x, logits(37, 20).t())
        yield sample("sliced", logits(40, 74)[::2, ::2], logits(40, 74)[::2, ::2])
        yield sample("offset storage", logits(20 * 37 + 1)[1:].view(20, 37), t)
        yield sample("padded rows", logits(20, 50)[:, :37], logits(20, 50)[:, :37])
        yield sample("expanded", logits(1, 37).expand(20, 37), logits(20, 37))
        yield sample("dim 0", x, t, dim=0)
        yield sample("image", logits(2, 37, 5, 19), logits(2, 37, 5, 19), dim=1, temperature=1.5)
        yield sample("sequence", logits(3, 11, 37), logits(3, 11, 37))
        yield sample("wide", logits(3, 5003), logits(3, 5003))
        yield sample("very wide", logits(2, 131_101), logits(2, 131_101))
        yield sample("many rows", logits(3000, 7), logits(3000, 7))
        if dtype == torch.bfloat16:
            yield sample("float32 target", x, t.float())
            yield sample("float32 input", x.float(), t)
        yield sample("no rows", logits(0, 37), logits(0, 37))


def operands(rows=4, cols=5, dtype=torch.float64):
    return torch.randn(rows, cols, dtype=dtype), torch.randn(rows, cols, dtype=dtype)
