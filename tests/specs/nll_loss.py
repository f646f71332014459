"""Negative log likelihood of log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from compile_losses.ops.nll_loss import reference
from tests.specs.spec import Sample, Spec, Spelling


def torch_loss(input, target, weight=None, reduction=1, ignore_index=-100):
    # Torch's own gradient refuses other layouts.
    return reference(input.contiguous(), target, weight, reduction, ignore_index)


def samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    generator = torch.Generator(device="cpu").manual_seed(0)

    def logs(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.log_softmax(min(1, len(shape) - 1)).to(device, dtype)

    def classes(high: int, *shape: int, ignored: int = -100) -> torch.Tensor:
        target = torch.randint(high, shape, generator=generator)
        target.view(-1)[::5] = ignored
        return target.to(device)

    weight = torch.rand(37, generator=generator, dtype=torch.float64).to(device, dtype) + 0.5
    hostile = logs(20, 37)
    hostile[0] = torch.nan
    hostile[1, 3] = -torch.inf
    for reduction in (0, 1, 2):
        option = {"reduction": reduction}
        x, t = logs(20, 37), classes(37, 20)
        yield Sample("plain", (x, t), option)
        yield Sample("ignore_index", (x, classes(37, 20, ignored=3)), {**option, "ignore_index": 3})
        yield Sample("weight", (x, t, weight), option)
        yield Sample("weights of 0", (x, t, weight * 0), option)
        yield Sample("uint8", (x, classes(37, 20, ignored=3).to(torch.uint8)), option)
        yield Sample("all ignored", (x, torch.full_like(t, -100)), option)
        yield Sample("nan in an ignored row, -inf off target", (hostile, t), option)
        yield Sample("one row, no batch", (logs(37), torch.tensor(5, device=device)), option)
        yield Sample("one class", (logs(20, 1), torch.zeros_like(t)), option)
        yield Sample("no rows", (logs(0, 37), classes(37, 0)), option)
        yield Sample("transposed", (logs(37, 20).t(), t), option)
        yield Sample("sliced", (logs(40, 74)[::2, ::2], t), option)
        yield Sample("expanded", (logs(1, 37).expand(20, 37), t), option)
        yield Sample("strided target", (x, classes(37, 40)[::2]), option)
        yield Sample("image", (logs(2, 37, 5, 9), classes(37, 2, 5, 9)), option)
        yield Sample("image, weight", (logs(2, 37, 5, 9), classes(37, 2, 5, 9), weight), option)
        yield Sample(
            "channels-last",
            (logs(2, 37, 5, 9).to(memory_format=torch.channels_last), classes(37, 2, 5, 9)),
            option,
        )
        yield Sample("sequence", (logs(3, 37, 11), classes(37, 3, 11)), option)
        yield Sample(
            "odd strides", (logs(9, 2, 37, 5).permute(1, 2, 3, 0), classes(37, 2, 5, 9)), option
        )
        yield Sample("many rows", (logs(70_000, 3), classes(3, 70_000)), option)


def logs_and_classes():
    target = torch.randint(10, (6,))
    target[1] = -100
    return torch.randn(6, 10).log_softmax(-1).requires_grad_(), target


def half_logs():
    x, t = logs_and_classes()
    return x.detach().bfloat16().requires_grad_(), t


def images():
    return torch.randn(2, 10, 4, 4, requires_grad=True), torch.randint(10, (2, 4, 4))


def weighted():
    return (*logs_and_classes(), torch.rand(10))


MATCHES = [
    Spelling("F.nll_loss", F.nll_loss, logs_and_classes),
    Spelling("sum", lambda x, t: F.nll_loss(x, t, reduction="sum"), logs_and_classes),
    Spelling("none", lambda x, t: F.nll_loss(x, t, reduction="none"), logs_and_classes),
    Spelling("legacy", lambda x, t: F.nll_loss(x, t, size_average=False), logs_and_classes),
    Spelling(
        "ignore_index", lambda x, t: F.nll_loss(x, t.clamp(min=0), ignore_index=0), logs_and_classes
    ),
    Spelling("weight", lambda x, t, w: F.nll_loss(x, t, w), weighted),
    Spelling("nn.NLLLoss", lambda x, t: nn.NLLLoss(ignore_index=-100)(x, t), logs_and_classes),
    Spelling("image", F.nll_loss, images),
    Spelling("bfloat16", F.nll_loss, half_logs),
    Spelling("of float()", lambda x, t: F.nll_loss(x.float(), t), half_logs),
    Spelling("aten", lambda x, t: torch.ops.aten.nll_loss_nd(x, t), logs_and_classes),
]

NEAR_MISSES = [
    Spelling("the other class", lambda x, t: -x[:, 0].mean() + t.sum() * 0, logs_and_classes),
    Spelling("Poisson", lambda x, t: F.poisson_nll_loss(x[:, 0], t.float()), logs_and_classes),
]

SPEC = Spec(
    name="nll_loss",
    torch_loss=torch_loss,
    samples=samples,
    operands=lambda rows=4, cols=5, dtype=torch.float64: (
        torch.randn(rows, cols, dtype=dtype).log_softmax(-1),
        torch.randint(cols, (rows,)),
    ),
    matches=MATCHES,
    near_misses=NEAR_MISSES,
    # In a graph it is torch's own, see ops/nll_loss.py: no pass meets it there.
    parts=("forward", "value", "backward"),
    broadcasts=False,
)
