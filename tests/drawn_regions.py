"""Programs drawn at random whose losses read a head's logits in ways that no op knows.

Sizes are small and often equal to one another: as many rows as classes, a batch of one, a row. Each
program is a head, what is done to its logits, what makes numbers of them, and a loss of these.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
#: Batch and tokens, or more dimensions, or tokens alone; and classes.
SIZES = (
    *(((3, 4), 7), ((2, 4), 8), ((8,), 8), ((4, 4), 4), ((1, 6), 5), ((6, 1), 6), ((2, 2, 3), 12)),
    *(((5, 1, 2), 5), ((9,), 2), ((2, 8), 2), ((1, 7), 7), ((13,), 3), ((4, 2), 2), ((1, 1, 8), 8)),
)

Shape: TypeAlias = tuple[int, ...]


@dataclass
class Inputs:
    """What a program is given; the logits' shape is [*sizes, classes]."""

    h: Tensor
    w: Tensor
    b: Tensor
    other: Tensor
    labels: Tensor
    #: One of each row, as [*sizes]; of each class; of each logit; one number; trained all.
    of_rows: Tensor
    of_classes: Tensor
    of_logits: Tensor
    number: Tensor
    #: Neither is trained.
    mask: Tensor
    soft: Tensor
    #: Some classes, of which some may be twice there; negative places count from the end.
    index: Tensor

    def all(self) -> list[Tensor]:
        return list(vars(self).values())


def inputs_of(sizes: Shape, classes: int, seed: int, ignored: float) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    hidden = 3

    def normal(*shape: int, trained: bool = True) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.requires_grad_(trained)

    labels = torch.randint(classes, sizes, generator=generator)
    labels[torch.rand(sizes, generator=generator) < ignored] = IGNORED
    return Inputs(
        normal(*sizes, hidden),
        normal(classes, hidden),
        normal(classes),
        normal(classes, hidden),
        labels,
        normal(*sizes),
        normal(classes),
        normal(*sizes, classes),
        normal(),
        (torch.rand(sizes, generator=generator) < 0.7).double(),
        normal(*sizes, classes, trained=False).softmax(-1),
        torch.randint(-classes, classes, (max(2, classes - 2),), generator=generator),
    )


Between: TypeAlias = Callable[[Tensor, Inputs], Tensor]

HEADS: dict[str, Callable[[Inputs], Tensor]] = {
    "linear": lambda i: F.linear(i.h, i.w),
    "biased": lambda i: F.linear(i.h, i.w, i.b),
    "matmul": lambda i: i.h @ i.w.T,
    "frozen": lambda i: F.linear(i.h, i.w.detach(), i.b),
    "of known states": lambda i: F.linear(i.h.detach(), i.w),
    "two": lambda i: F.linear(i.h, i.w) + 0.5 * F.linear(i.h, i.other),
    "adapted": lambda i: (
        F.linear(i.h, i.w.detach()) + F.linear(F.linear(i.h, i.other[:2]), i.other[:, :2])
    ),
    "normalised": lambda i: F.linear(F.normalize(i.h, dim=-1), F.normalize(i.w, dim=-1)),
    "one number as bias": lambda i: F.linear(i.h, i.w) + i.number,
    "stacked": lambda i: _residual(F.linear(i.h, i.w), i),
    "tied": lambda i: F.linear(i.h + i.w[i.labels.clamp(min=0)], i.w),
}


def _residual(x: Tensor, i: Inputs) -> Tensor:
    return x + F.linear(torch.relu(x), i.w @ i.w.T)


def _turned(x: Tensor, first: int, second: int) -> Tensor:
    return x.transpose(first, second)


def _there_and_back(x: Tensor) -> Tensor:
    return (x.transpose(-1, 0) * 2).contiguous().transpose(-1, 0)


BETWEEN: dict[str, Between] = {
    "scaled": lambda x, i: x * 0.7,
    "by a number": lambda x, i: x * i.number,
    "by one": lambda x, i: x * i.number[None],
    "by an exponential": lambda x, i: x * i.number.exp(),
    "clamped": lambda x, i: x.clamp(-1, 1),
    "clamped by rows": lambda x, i: torch.maximum(x, i.of_rows[..., None].detach()),
    "capped": lambda x, i: 3 * torch.tanh(x / 3),
    "by classes": lambda x, i: x * i.of_classes,
    "plus classes": lambda x, i: x + i.of_classes.detach() * 2,
    "by rows": lambda x, i: x * i.of_rows[..., None],
    "by known rows": lambda x, i: x * i.of_rows.detach()[..., None].exp(),
    "by flat rows": lambda x, i: (x.flatten(0, -2) * i.of_rows.reshape(-1, 1)).view(x.shape),
    "by mask": lambda x, i: x * i.mask.unsqueeze(-1),
    "by first of rows": lambda x, i: x * i.of_rows[:1].unsqueeze(-1).detach(),
    "by last dim": lambda x, i: x + i.of_logits.flatten()[: x.shape[-1]],
    "with logits": lambda x, i: x + i.of_logits,
    "with known logits": lambda x, i: x * i.of_logits.detach(),
    "with computed logits": lambda x, i: x + (i.of_logits * 2).cos(),
    "with one batch": lambda x, i: x + i.of_logits[:1],
    "without classes": lambda x, i: x.masked_fill(i.of_classes > 0.5, -5.0),
    "without rows": lambda x, i: x.masked_fill(i.mask[..., None] == 0, 0.0),
    "without some": lambda x, i: torch.where(i.of_logits > 0, x, i.number),
    "positive": lambda x, i: torch.where(x > 0, x, 0.1 * x),
    "chosen": lambda x, i: torch.where(i.mask[..., None] > 0, x, i.of_logits),
    "logarithms": lambda x, i: x.log_softmax(-1),
    "probabilities": lambda x, i: x.softmax(-1),
    "of classes first": lambda x, i: x.softmax(0),
    "less the largest": lambda x, i: x - x.amax(-1, keepdim=True).detach(),
    "less the largest value": lambda x, i: x - x.max(-1, keepdim=True).values,
    "centred": lambda x, i: x - x.mean(-1, keepdim=True),
    "centred at tokens": lambda x, i: x - x.mean(0, keepdim=True),
    "centred at all": lambda x, i: x - x.detach().mean(),
    "standardised": lambda x, i: x / (0.3 + x.std(-1, keepdim=True)),
    "by root": lambda x, i: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2),
    "norm": lambda x, i: F.normalize(x, dim=-1),
    "layer norm": lambda x, i: F.layer_norm(x, x.shape[-1:], i.of_classes, i.b),
    "sigmoid": lambda x, i: torch.sigmoid(x),
    "narrow and wide": lambda x, i: x.float().double(),
    "there and back": lambda x, i: _there_and_back(x),
    "turned": lambda x, i: (x.flatten(0, -2).t() * i.of_classes[:, None]).t().view(x.shape),
    "turned by rows": lambda x, i: (x.flatten(0, -2).t() * i.of_rows.flatten()).t().view(x.shape),
    "flat": lambda x, i: x.flatten(0, -2)[None].squeeze(0).unflatten(0, x.shape[:-1]),
    "square confused": lambda x, i: (
        x.flatten().view(x.shape[-1], -1).mul(2).flatten().view(x.shape)
    ),
    "square turned": lambda x, i: x + x.flatten(0, -2).t().reshape(x.shape),
    "rolled": lambda x, i: x + x.roll(1, 0),
    "flipped": lambda x, i: x + x.flip(-1),
    "adds up": lambda x, i: x.cumsum(-1) / 3,
    "in place": lambda x, i: _in_place(x, i),
    "written": lambda x, i: _written(x, i),
    "margin": lambda x, i: x - 0.3 * F.one_hot(i.labels.clamp(min=0), x.shape[-1]),
    "scattered": lambda x, i: x.scatter(-1, i.labels.clamp(min=0)[..., None], 0.5),
    "scattered rows": lambda x, i: x.scatter(
        -1, i.labels.clamp(min=0)[..., None], i.of_rows[..., None]
    ),
    "added at": lambda x, i: x.scatter_add(
        -1, i.labels.clamp(min=0)[..., None], i.of_rows[..., None]
    ),
    "chosen at": lambda x, i: (
        x + torch.zeros_like(x).scatter_(-1, i.labels.clamp(min=0)[..., None], 1.5)
    ),
    "spread": lambda x, i: x - x.gather(-1, i.labels.clamp(min=0)[..., None]).expand_as(x),
    "some classes": lambda x, i: torch.cat([x[..., :1] * 2, x[..., 1:]], -1),
    "one class": lambda x, i: x - x[..., :1],
    "first row": lambda x, i: x - x[:1].detach(),
    "noughts": lambda x, i: x * 0 + i.of_logits.detach(),
    "twice": lambda x, i: x * x,
    "fused": lambda x, i: torch.addcmul(x, i.of_rows[..., None], i.of_classes, value=0.5),
    "lerp": lambda x, i: torch.lerp(x, i.of_classes.expand_as(x), i.mask[..., None]),
    "hash": lambda x, i: x * (x.detach() * 100).long().remainder(3),
    "by bool": lambda x, i: x * (x > x.mean(-1, keepdim=True)),
    "infinite": lambda x, i: x.masked_fill(i.of_classes > 0.8, float("-inf")),
    "by count": lambda x, i: x / (x > 0).sum(-1, keepdim=True).clamp(min=1),
    "some put back": lambda x, i: torch.zeros_like(x).index_add(
        -1, i.index % x.shape[-1], x[..., i.index]
    ),
    "some doubled": lambda x, i: x.slice_scatter(x[..., 1:] * 2, x.dim() - 1, 1),
    "some copied": lambda x, i: x.index_copy(-1, i.index[:1].abs() % 2, x[..., :1] + 1),
    "by some": lambda x, i: x + x[..., i.index].logsumexp(-1, keepdim=True),
    "by the first": lambda x, i: x * x[..., : x.shape[-1] // 2 + 1].square().mean(-1, keepdim=True),
    "looked up": lambda x, i: x * i.of_classes.detach()[x.argmax(-1)][..., None],
    "looked up, trained": lambda x, i: x * i.of_classes[x.argmax(-1)][..., None],
    "less some of more": lambda x, i: x - _of_more(i, i.h.detach())[..., 1 : x.shape[-1] + 1],
    "with some of more": lambda x, i: (
        x + _of_more(i, i.h)[..., torch.arange(0, 2 * x.shape[-1], 2)].tanh()
    ),
    "power": lambda x, i: x.abs().add(0.5).pow(i.of_rows[..., None].abs()),
}


def _of_more(i: Inputs, h: Tensor) -> Tensor:
    """Logits of twice as many classes."""
    return F.linear(h, torch.cat([i.w, i.other]))


def _in_place(x: Tensor, i: Inputs) -> Tensor:
    x = x.clone()
    x.mul_(2).clamp_(-3, 3)
    x[..., 0] += i.of_rows
    return x


def _written(x: Tensor, i: Inputs) -> Tensor:
    x = x * 1
    x[i.mask > 0] = 0.5
    return x


def _flat(x: Tensor, i: Inputs) -> tuple[Tensor, Tensor]:
    return x.flatten(0, -2), i.labels.flatten()


def _own(x: Tensor, i: Inputs) -> Tensor:
    return x.gather(-1, i.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


#: What makes numbers of logits: of each row, as [*sizes], or of all.
READERS: dict[str, Between] = {
    "cross entropy": lambda x, i: F.cross_entropy(*_flat(x, i), reduction="none").view(
        i.mask.shape
    ),
    "mean cross entropy": lambda x, i: F.cross_entropy(*_flat(x, i)),
    "smoothed": lambda x, i: F.cross_entropy(*_flat(x, i), label_smoothing=0.2, reduction="sum"),
    "of classes": lambda x, i: F.cross_entropy(*_flat(x, i), weight=i.of_classes.detach().abs()),
    "soft": lambda x, i: F.cross_entropy(x.flatten(0, -2), i.soft.flatten(0, -2)),
    "classes second": lambda x, i: F.cross_entropy(x.movedim(-1, 1), i.labels, reduction="none"),
    "picked": lambda x, i: _own(x.log_softmax(-1), i),
    "own": _own,
    "probability": lambda x, i: _own(x.softmax(-1), i),
    "logsumexp": lambda x, i: x.logsumexp(-1),
    "largest": lambda x, i: x.max(-1).values,
    "extreme": lambda x, i: x.amax(-1) - x.amin(-1),
    "variance": lambda x, i: x.var(-1),
    "deviation": lambda x, i: x.std(-1, correction=0),
    "norm": lambda x, i: x.norm(dim=-1),
    "one norm": lambda x, i: x.norm(p=1, dim=-1),
    "sum": lambda x, i: x.sum(-1),
    "mean": lambda x, i: x.mean(-1),
    "squares": lambda x, i: x.square().sum(-1),
    "weighted": lambda x, i: (x * i.of_classes).sum(-1),
    "product": lambda x, i: x.prod(-1),
    "entropy": lambda x, i: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "all": lambda x, i: x.mean(),
    "all squares": lambda x, i: x.square().sum(),
    "of each": lambda x, i: F.binary_cross_entropy_with_logits(x, i.soft),
    "of each none": lambda x, i: F.binary_cross_entropy_with_logits(
        x, i.soft, reduction="none"
    ).sum(-1),
    "distance": lambda x, i: F.mse_loss(x, i.soft),
    "smooth distance": lambda x, i: F.smooth_l1_loss(x, i.of_logits, reduction="none").mean(-1),
    "divergence": lambda x, i: F.kl_div(x.log_softmax(-1), i.soft, reduction="batchmean"),
    "margin": lambda x, i: F.multi_margin_loss(x.flatten(0, -2), i.labels.flatten().clamp(min=0)),
    "hinge": lambda x, i: F.relu(1 + x - _own(x, i)[..., None]).sum(-1),
    "focal": lambda x, i: (1 - _own(x.softmax(-1), i)).pow(2) * -_own(x.log_softmax(-1), i),
    "first dim": lambda x, i: x.sum(0),
    "rows": lambda x, i: x.flatten(0, -2).mean(0),
    "first class": lambda x, i: x[..., 0],
    "first row": lambda x, i: x[0],
    "shifted": lambda x, i: x[1:].sum(-1),
    "top": lambda x, i: x.topk(2).values.sum(-1),
    "median": lambda x, i: x.median(-1).values,
    "two dims": lambda x, i: x.sum((-1, 0)),
    "place": lambda x, i: x.gather(-1, x.argmax(-1, keepdim=True)).squeeze(-1),
    "hits": lambda x, i: x.logsumexp(-1) * (x.argmax(-1) == i.labels),
    "count": lambda x, i: x.mean(-1) * (x > 0).any(-1),
    "overlap": lambda x, i: torch.minimum(x.softmax(-1), i.soft).sum(-1),
    "log overlap": lambda x, i: -torch.minimum(x.softmax(-1), i.soft).sum(-1).log(),
    "total variation": lambda x, i: (x.softmax(-1) - i.soft).abs().sum(-1),
    "of some": lambda x, i: x[..., i.index].logsumexp(-1),
    "soft of some": lambda x, i: (
        -(i.soft[..., i.index] * x.index_select(-1, i.index % x.shape[-1]).log_softmax(-1)).sum(-1)
    ),
    "of the first": lambda x, i: x[..., : x.shape[-1] // 2 + 1].log_softmax(-1).amin(-1),
    "of the last": lambda x, i: x[..., 1:].exp().sum(-1) / x.exp().sum(-1),
    "finite": lambda x, i: torch.where(torch.isinf(x), 0.0, x.log_softmax(-1) * i.soft).sum(-1),
    "by a table": lambda x, i: x.logsumexp(-1) * (i.of_classes.detach() > 0)[x.argmax(-1)],
    "labelled": lambda x, i: torch.where(i.labels >= 0, _own(x, i), i.of_rows),
}

#: A loss of what a reader returned.
LOSSES: dict[str, Between] = {
    "mean": lambda x, i: x.mean(),
    "sum": lambda x, i: x.sum(),
    "scaled": lambda x, i: x.sum() / i.mask.sum().clamp(min=1),
    "masked": lambda x, i: (x * _like(i.mask, x)).sum() / i.mask.sum().clamp(min=1),
    "weighted": lambda x, i: (x * _like(i.of_rows, x)).mean(),
    "by a number": lambda x, i: (x * i.number).mean(),
    "squares": lambda x, i: x.square().mean(),
    "exponential": lambda x, i: (-x.abs()).exp().sum(),
    "of the mean": lambda x, i: x.mean().tanh(),
    "centred": lambda x, i: (x - x.mean()).square().mean(),
    "centred at known": lambda x, i: (x - x.mean().detach()).square().mean(),
    "deviation": lambda x, i: (x.var() + 1).log(),
    "softmax": lambda x, i: (x.flatten().softmax(0) * x.flatten()).sum(),
    "largest": lambda x, i: x.max(),
    "norm": lambda x, i: x.norm(),
    "turned": lambda x, i: (x.T * x.T.tanh()).sum() if x.dim() == 2 else x.sum(),
    "turned onto": lambda x, i: _onto(x).mean(),
    "outer": lambda x, i: (x.flatten()[:, None] * x.flatten()).tanh().mean(),
    "adds up": lambda x, i: x.flatten().cumsum(0).tanh().mean(),
    "rolled": lambda x, i: (x.flatten() * x.flatten().roll(1)).mean(),
    "clipped": lambda x, i: torch.minimum(
        x.clamp(-2, 2).exp() * 0.5, _like(i.of_rows, x).detach()
    ).mean(),
    "by position": lambda x, i: (x * torch.arange(x.numel()).view(x.shape)).mean(),
    "first": lambda x, i: x.flatten()[0] * 2,
    "kept": lambda x, i: x[_like(i.mask, x) >= 0].sum(),
    "by batch": lambda x, i: (x.sum(-1) if x.dim() else x).square().mean(),
    "by batch first": lambda x, i: (x.sum(0) if x.dim() else x).square().mean(),
}


def _like(tensor: Tensor, x: Tensor) -> Tensor:
    return tensor if tensor.shape == x.shape else tensor.mean()


def _onto(x: Tensor) -> Tensor:
    return x * x.T.cos() if x.dim() == 2 and x.shape[0] == x.shape[1] else x


@dataclass
class Program:
    """Called with the tensors of :class:`Inputs` in their order; the first result is the loss."""

    seed: int
    sizes: Shape
    classes: int
    ignored: float
    head: str
    between: list[str] = field(default_factory=list)
    #: What each reads: the number of ops between that come before.
    readers: list[tuple[int, str, str, bool]] = field(default_factory=list)
    trained: tuple[bool, ...] = ()
    #: How many heads of the same weight there are, of hidden states that are made of the last.
    depths: int = 1

    @staticmethod
    def draw(seed: int) -> Program:
        r = random.Random(seed)
        sizes, classes = r.choice(SIZES)
        program = Program(
            seed, sizes, classes, r.choice([0.0, 0.3, 0.3, 1.0]), r.choice(list(HEADS))
        )
        program.between = r.choices(list(BETWEEN), k=r.choice([0, 1, 1, 2, 2, 3]))
        for _ in range(r.choice([1, 1, 1, 2, 2, 3])):
            place = r.choice([len(program.between)] * 3 + list(range(len(program.between) + 1)))
            program.readers.append(
                (place, r.choice(list(READERS)), r.choice(list(LOSSES)), r.random() < 0.15)
            )
        program.trained = tuple(r.random() < 0.8 for _ in range(8))
        program.depths = r.choice([1, 1, 1, 2, 3])
        return program

    def inputs(self) -> list[Tensor]:
        given = inputs_of(self.sizes, self.classes, self.seed, self.ignored).all()
        leaves = [t for t in given if t.requires_grad]
        for leaf, trained in zip(leaves, self.trained, strict=True):
            leaf.requires_grad_(trained)
        return given

    def dims_of_rows(self, tensor: Tensor) -> list[int]:
        """The dimensions of a tensor that are rows, but for those of one."""
        if tensor.shape[: len(self.sizes)] != self.sizes:
            return []
        return [dim for dim, size in enumerate(self.sizes) if size > 1]

    def __call__(self, *tensors: Tensor) -> Any:
        i = Inputs(*tensors)
        loss: Any = 0.0
        beside: list[Tensor] = []
        for depth in range(self.depths):
            loss = loss + (0.5 if depth else 1.0) * self._of_head(i, beside)
            i = replace(i, h=i.h + torch.tanh(0.7 * i.h), mask=1 - i.mask)
        return loss, *beside

    def _of_head(self, i: Inputs, beside: list[Tensor]) -> Any:
        logits = [HEADS[self.head](i)]
        for name in self.between:
            logits.append(BETWEEN[name](logits[-1], i))
        loss: Any = 0.0
        for place, reader, of_reader, is_returned in self.readers:
            numbers = READERS[reader](logits[place], i)
            loss = loss + LOSSES[of_reader](numbers, i)
            if is_returned:
                beside.append(numbers)
        return loss
