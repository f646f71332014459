"""Cross entropy with class indices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from compile_losses.ops.cross_entropy import reference
from tests.specs.spec import Sample, Spec, Spelling


def torch_loss(input, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
    return reference(input, target, weight, reduction, ignore_index, label_smoothing)


def samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    generator = torch.Generator(device="cpu").manual_seed(0)

    def logits(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.to(device, dtype)

    def classes(high: int, *shape: int, ignored: int = -100) -> torch.Tensor:
        target = torch.randint(high, shape, generator=generator)
        target.view(-1)[::5] = ignored
        return target.to(device)

    weight = torch.rand(37, generator=generator, dtype=torch.float64).to(device, dtype) + 0.5
    for reduction in (0, 1, 2):
        option = {"reduction": reduction}
        x, t = logits(20, 37), classes(37, 20)
        yield Sample("plain", (x, t), option)
        yield Sample("ignore_index", (x, classes(37, 20, ignored=3)), {**option, "ignore_index": 3})
        yield Sample("smoothing", (x, t), {**option, "label_smoothing": 0.1})
        yield Sample("weight", (x, t, weight), option)
        yield Sample("weight and smoothing", (x, t, weight), {**option, "label_smoothing": 0.3})
        yield Sample("negative smoothing", (x, t), {**option, "label_smoothing": -1.0})
        yield Sample("uint8", (x, classes(37, 20, ignored=3).to(torch.uint8)), option)
        yield Sample("one row, no batch", (logits(37), torch.tensor(5, device=device)), option)
        yield Sample("one class", (logits(20, 1), torch.zeros_like(t)), option)
        yield Sample("confident", (logits(20, 37, scale=20), t), option)
        yield Sample("offset by 700", (logits(20, 37) + 700, t), option)
        yield Sample(
            "offset, smoothing", (logits(20, 37) + 700, t), {**option, "label_smoothing": 0.1}
        )
        yield Sample("transposed", (logits(37, 20).t(), t), option)
        yield Sample("sliced", (logits(40, 74)[::2, ::2], t), option)
        yield Sample("offset storage", (logits(20 * 37 + 1)[1:].view(20, 37), t), option)
        yield Sample("padded rows", (logits(20, 50)[:, :37], t), option)
        yield Sample("expanded", (logits(1, 37).expand(20, 37), t), option)
        yield Sample("strided target", (x, classes(37, 40)[::2]), option)
        yield Sample("image", (logits(2, 37, 5, 9), classes(37, 2, 5, 9)), option)
        yield Sample(
            "image, weight and smoothing",
            (logits(2, 37, 5, 19), classes(37, 2, 5, 19), weight),
            {**option, "label_smoothing": 0.1},
        )
        yield Sample(
            "channels-last",
            (logits(2, 37, 5, 9).to(memory_format=torch.channels_last), classes(37, 2, 5, 9)),
            option,
        )
        yield Sample("sequence", (logits(3, 37, 11), classes(37, 3, 11)), option)
        yield Sample(
            "odd strides", (logits(9, 2, 37, 5).permute(1, 2, 3, 0), classes(37, 2, 5, 9)), option
        )
        yield Sample("wide", (logits(3, 5003), classes(5003, 3)), option)
        yield Sample("very wide", (logits(2, 131_101), classes(131_101, 2)), option)
        yield Sample("many rows", (logits(3000, 7), classes(7, 3000)), option)


def logits_and_classes():
    target = torch.randint(10, (6,))
    target[1] = -100
    return torch.randn(6, 10, requires_grad=True), target


def half_logits():
    x, t = logits_and_classes()
    return x.bfloat16(), t


def sequences():
    return torch.randn(2, 3, 10, requires_grad=True), torch.randint(10, (2, 3))


def images():
    return torch.randn(2, 10, 4, 4, requires_grad=True), torch.randint(10, (2, 4, 4))


def soft_targets():
    return torch.randn(6, 10, requires_grad=True), torch.rand(6, 10).softmax(-1)


def weighted():
    return (*logits_and_classes(), torch.rand(10))


def shifted(logits, labels):
    """The causal language model loss of Hugging Face's transformers."""
    logits = logits.float()
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.view(-1, logits.shape[-1])
    return F.cross_entropy(logits, labels.view(-1), ignore_index=-100, reduction="mean")


MATCHES = [
    Spelling("F.cross_entropy", F.cross_entropy, logits_and_classes),
    Spelling("sum", lambda x, t: F.cross_entropy(x, t, reduction="sum"), logits_and_classes),
    Spelling("none", lambda x, t: F.cross_entropy(x, t, reduction="none"), logits_and_classes),
    Spelling("keywords", lambda x, t: F.cross_entropy(target=t, input=x), logits_and_classes),
    Spelling("legacy", lambda x, t: F.cross_entropy(x, t, size_average=False), logits_and_classes),
    Spelling(
        "ignore_index",
        lambda x, t: F.cross_entropy(x, t.clamp(min=0), ignore_index=0),
        logits_and_classes,
    ),
    Spelling(
        "smoothing", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), logits_and_classes
    ),
    Spelling("weight", lambda x, t, w: F.cross_entropy(x, t, w), weighted),
    Spelling(
        "nn.CrossEntropyLoss",
        lambda x, t: nn.CrossEntropyLoss(ignore_index=-100)(x, t),
        logits_and_classes,
    ),
    Spelling(
        "nn with weight",
        lambda x, t, w: nn.CrossEntropyLoss(w, label_smoothing=0.2)(x, t),
        weighted,
    ),
    Spelling(
        "flattened", lambda x, t: F.cross_entropy(x.view(-1, x.size(-1)), t.view(-1)), sequences
    ),
    Spelling("transposed", lambda x, t: F.cross_entropy(x.transpose(1, 2), t), sequences),
    Spelling("image", F.cross_entropy, images),
    Spelling("of float()", lambda x, t: F.cross_entropy(x.float(), t), half_logits),
    Spelling("bfloat16", F.cross_entropy, half_logits),
    Spelling("shifted labels", shifted, sequences),
    Spelling(
        "sum over count",
        lambda x, t: F.cross_entropy(x, t, reduction="sum") / (t != -100).sum(),
        logits_and_classes,
    ),
    Spelling("aten", lambda x, t: torch.ops.aten.cross_entropy_loss(x, t), logits_and_classes),
]

NEAR_MISSES = [
    Spelling(
        "binary",
        lambda x, t: F.binary_cross_entropy(x.sigmoid(), t),
        soft_targets,
        "rounded probabilities",
    ),
]

SPEC = Spec(
    name="cross_entropy",
    torch_loss=torch_loss,
    samples=samples,
    operands=lambda rows=4, cols=5, dtype=torch.float64: (
        torch.randn(rows, cols, dtype=dtype),
        torch.randint(cols, (rows,)),
    ),
    matches=MATCHES,
    near_misses=NEAR_MISSES,
    parts=("forward", "value", "backward", "with_grad", "with_grad_"),
    broadcasts=False,
)
