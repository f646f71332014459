"""Calls for every option of every loss: what PyTorch's samples leave out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.conformance.compare import Call
from tests.conformance.ledger import options_of

LEGACY: tuple[dict[str, Any], ...] = (
    {"size_average": True},
    {"size_average": False},
    {"reduce": False},
    {"reduce": True, "size_average": False},
    {"reduce": False, "reduction": "sum"},
)


class Draw:
    """Random operands of one dtype and device."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return values.to(self.device, self.dtype)

    def positive(self, *shape: int) -> Tensor:
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64) * 0.98 + 0.01
        return values.to(self.device, self.dtype)

    def classes(self, high: int, *shape: int, ignored: int | None = -100) -> Tensor:
        target = torch.randint(high, shape, generator=self.generator)
        if ignored is not None:
            target.view(-1)[::4] = ignored
        return target.to(self.device)


def layouts(draw: Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Two operands of equal shape, in all manner of strides."""
    n, p = draw.normal, draw.positive
    yield "contiguous", n(4, 5), p(4, 5)
    yield "0-d", n(), p()
    yield "empty", n(0, 5), p(0, 5)
    yield "empty rows", n(5, 0), p(5, 0)
    yield "transposed", n(5, 4).t(), p(5, 4).t()
    yield "one transposed", n(4, 5), p(5, 4).t()
    yield "sliced", n(9, 12)[1::2, ::2], p(4, 6)
    yield "expanded", n(4, 1).expand(4, 5), p(1, 5).expand(4, 5)
    yield "offset", n(21)[1:].view(4, 5), p(4, 5)
    yield (
        "channels-last",
        n(2, 3, 4, 5).to(memory_format=torch.channels_last),
        p(2, 3, 4, 5).to(memory_format=torch.channels_last),
    )
    yield "permuted", n(4, 5, 6).permute(2, 0, 1), p(6, 4, 5)
    yield "seven dimensions", n(2, 3, 2, 3, 2, 3, 2)[..., ::2], p(2, 3, 2, 3, 2, 3, 1)


def broadcasts(draw: Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    n, p = draw.normal, draw.positive
    yield "broadcast target", n(3, 4, 5), p(5)
    yield "broadcast input", n(4, 1), p(2, 4, 5)
    yield "broadcast both", n(4, 1), p(1, 5)
    yield "0-d target", n(5, 4).t(), p()
    yield "0-d input", n(), p(5, 4).t()
    yield "permuted and broadcast input", n(4, 1), p(5, 4, 3).permute(2, 1, 0)
    yield "permuted and broadcast target", n(5, 4, 3).permute(2, 1, 0), p(4, 1)
    yield "empty broadcast", n(0, 5), p(1, 5)


def elementwise(loss: str, draw: Draw) -> Iterator[Call]:
    options: list[dict[str, Any]] = [{"reduction": r} for r in ("none", "mean", "sum")]
    own: list[dict[str, Any]] = {
        "smooth_l1_loss": [{"beta": b} for b in (0.0, 0, 0.3, 2, float("inf"))],
        "huber_loss": [{"delta": d} for d in (0.3, 2, float("inf"))],
        "kl_div": [{"log_target": True}],
    }.get(loss, [])
    pairs = list(layouts(draw))
    if loss != "binary_cross_entropy_with_logits":
        pairs += broadcasts(draw)
    if loss == "kl_div":
        options.append({"reduction": "batchmean"})
        own += [
            {"size_average": False, "reduction": "batchmean"},
            {"reduce": False, "reduction": "batchmean"},
            {"reduction": "batchmean", "log_target": True},
        ]
    if loss != "huber_loss":
        own += LEGACY
    weighted = loss in ("mse_loss", "l1_loss", "huber_loss")
    for name, input, target in pairs:
        for option in options:
            tensors = {"input": input, "target": target}
            yield Call(loss, tensors, option, name)
            if weighted:
                weight = draw.positive(*input.shape)
                yield Call(loss, {**tensors, "weight": weight}, option, f"{name}, weight")
    _, input, target = pairs[0]
    for option in own:
        for reduction in options if "reduction" not in option else [{}]:
            yield Call(loss, {"input": input, "target": target}, {**reduction, **option}, "own")
    if loss == "binary_cross_entropy_with_logits":
        yield from binary(draw)


def binary(draw: Draw) -> Iterator[Call]:
    p = draw.positive
    for name, input, target in layouts(draw):
        if input.dim() == 0:
            continue
        shape = input.shape
        weights = (None, p(*shape), p(shape[-1]), p(*shape[:-1], 1), p())
        positives = (None, p(shape[-1]), p(*shape))
        first = name == "contiguous"
        for weight in weights if first else weights[1:4:2]:
            for pos_weight in positives if first else positives[::2]:
                tensors = {"input": input, "target": target}
                tensors |= {} if weight is None else {"weight": weight}
                tensors |= {} if pos_weight is None else {"pos_weight": pos_weight}
                for reduction in ("none", "mean", "sum"):
                    yield Call(
                        "binary_cross_entropy_with_logits", tensors, {"reduction": reduction}, name
                    )


def logits(draw: Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Rows of logits in all manner of strides, and class indices, some of them ignored."""
    n, c = draw.normal, draw.classes
    yield "rows", n(8, 5), c(5, 8)
    yield "one row", n(5), c(5, 1, ignored=None).view(())
    yield "one row, [1] target", n(5), c(5, 1, ignored=None)
    yield "ignored row", n(5), torch.tensor(-100, device=draw.device)
    yield "no rows", n(0, 5), c(5, 0)
    yield "one class", n(4, 1), c(1, 4)
    yield "all ignored", n(4, 5), c(5, 4) * 0 - 100
    yield "confident", n(8, 5, scale=20), c(5, 8)
    yield "transposed", n(5, 8).t(), c(5, 8)
    yield "sliced", n(16, 10)[::2, ::2], c(5, 16)[::2]
    yield "expanded", n(1, 5).expand(8, 5), c(5, 1).expand(8)
    yield "offset", n(41)[1:].view(8, 5), c(5, 8)
    yield "sequence", n(3, 5, 4), c(5, 3, 4)
    yield "image", n(2, 5, 3, 4), c(5, 2, 3, 4)
    yield "volume", n(2, 5, 3, 2, 2), c(5, 2, 3, 2, 2)
    yield (
        "channels-last",
        n(2, 5, 3, 4).to(memory_format=torch.channels_last),
        c(5, 2, 4, 3).transpose(1, 2),
    )
    yield "empty image", n(2, 5, 0, 4), c(5, 2, 0, 4)
    yield "uint8", n(8, 5), c(5, 8, ignored=None).to(torch.uint8)


def rows(loss: str, draw: Draw) -> Iterator[Call]:
    own: list[dict[str, Any]] = [{}, {"ignore_index": 1}]
    if loss == "cross_entropy":
        own += [
            {"label_smoothing": 0.1},
            {"label_smoothing": 1.0},
            {"label_smoothing": -1.0},
            {"label_smoothing": 0.3, "ignore_index": 1},
        ]
    for name, input, target in logits(draw):
        if name == "channels-last" and loss == "nll_loss":
            continue  # torch does not differentiate it; ours does, in tests/specs
        classes = input.shape[0 if input.dim() == 1 else 1]
        weights: tuple[Tensor | None, ...] = (None, draw.positive(classes))
        if name == "rows":
            weights += (draw.positive(2 * classes)[::2],)
        for reduction in ("none", "mean", "sum"):
            for option in own:
                if name == "one class" and option.get("label_smoothing"):
                    continue  # its gradient is zero, of which a few ulp are none
                if name == "uint8" and option.get("label_smoothing"):
                    continue  # torch can't gather a weight by uint8; ours can
                ignored = option.get("ignore_index", -100)
                for weight in weights:
                    tensors = {"input": input, "target": target.where(target != -100, ignored)}
                    tensors |= {} if weight is None else {"weight": weight}
                    yield Call(loss, tensors, {"reduction": reduction, **option}, name)
    for option in LEGACY:
        yield Call(loss, {"input": draw.normal(8, 5), "target": draw.classes(5, 8)}, option, "old")
    if loss == "cross_entropy":
        yield from probabilities(draw)


def probabilities(draw: Draw) -> Iterator[Call]:
    for name, input, _ in logits(draw):
        class_dim = 0 if input.dim() == 1 else 1
        target = draw.normal(*input.shape).softmax(class_dim)
        if name == "one class":
            continue  # its gradient is zero, of which a few ulp are none
        if name == "channels-last":
            target = target.to(memory_format=torch.channels_last)
        weight = draw.positive(input.shape[class_dim])
        for reduction in ("none", "mean", "sum"):
            for smoothing in (0.0, 0.2):
                option = {"reduction": reduction, "label_smoothing": smoothing}
                tensors = {"input": input, "target": target}
                yield Call("cross_entropy", tensors, option, f"{name}, soft")
                yield Call("cross_entropy", {**tensors, "weight": weight}, option, f"{name}, soft")


def calls(loss: str, dtype: torch.dtype, device: str) -> Iterator[Call]:
    draw = Draw(dtype, device)
    yield from (rows if loss in ("cross_entropy", "nll_loss") else elementwise)(loss, draw)


#: Samples that stand for the others where a case takes long.
BRIEF = (
    "contiguous",
    "0-d",
    "channels-last",
    "broadcast target",
    "rows",
    "one row",
    "image",
    "own",
)


def brief(loss: str, dtype: torch.dtype, device: str) -> Iterator[Call]:
    """A few calls, in which every two options of the loss meet."""
    seen: set[frozenset[str]] = set()
    for call in calls(loss, dtype, device):
        name = call.name.split(",")[0]
        if name not in BRIEF:
            continue
        values = {f"{key}={value}" for key, value in call.options.items()}
        pairs = set(map(frozenset, itertools.combinations({*options_of(call), *values, name}, 2)))
        if not pairs <= seen:
            seen |= pairs
            yield call
