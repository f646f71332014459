"""Programs drawn at random: a linear layer, ops on its output, and what reads that.

Each program is what a user could write: a head in one of eight spellings, up to two ops between,
one to four readers, some of them with labels of their own that equal another's. The readers' sum is
the loss, and what has no gradient is returned beside it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN, CLASSES = 8, 37
IGNORED = -100

#: As people write the same layer; with a bias or without.
HEADS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "linear": lambda h, w, b: F.linear(h, w, b),
    "operator": lambda h, w, b: _biased(h @ w.t(), b),
    "matmul": lambda h, w, b: _biased(torch.matmul(h, w.T), b),
    "transposed": lambda h, w, b: _biased(h @ w.transpose(0, 1), b),
    "einsum": lambda h, w, b: _biased(torch.einsum("...h,vh->...v", h, w), b),
    "inner": lambda h, w, b: _biased(torch.inner(h, w), b),
    "flat": lambda h, w, b: _biased(torch.mm(h.flatten(0, -2), w.t()), b).unflatten(
        0, h.shape[:-1]
    ),
    "addmm": lambda h, w, b: (
        torch.addmm(b, h.flatten(0, -2), w.t()) if b is not None else h.flatten(0, -2) @ w.t()
    ).unflatten(0, h.shape[:-1]),
}

#: Ops between the layer and its readers.
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: x * 0.7,
    "divided": lambda x: x / 1.3,
    "capped": lambda x: 5 * torch.tanh(x / 5),
    "cast": lambda x: x.float() if x.dtype != torch.float64 else x.double(),
    "copied": lambda x: x.contiguous().clone(),
    "shifted by one": lambda x: x + 1,
    "negated": lambda x: -x,
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "clamped": lambda x: x.clamp(-3, 3),
    "some classes": lambda x: x[..., : CLASSES - 4],
    "there and back": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


def _biased(logits: Tensor, bias: Tensor | None) -> Tensor:
    return logits if bias is None else logits + bias


@dataclass
class Inputs:
    """What a program is given: [batch, tokens, hidden], [classes, hidden], [classes] and more."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    mask: Tensor
    advantages: Tensor
    old: Tensor
    teacher: Tensor
    class_weight: Tensor

    def leaves(self) -> list[Tensor]:
        each = (self.hidden, self.weight, self.bias)
        return [t for t in each if t is not None and t.requires_grad]

    def like(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another dtype, as leaves of their own."""

        def cast(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or not tensor.is_floating_point():
                return tensor
            return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

        return Inputs(*map(cast, vars(self).values()))  # type: ignore[arg-type]


@dataclass
class Rows:
    """What a reader gets: logits [batch, tokens, classes], and a number for each row."""

    logits: Tensor
    labels: Tensor
    clean: Tensor
    given: Inputs
    mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        tokens = self.logits.shape[1]
        self.mask = self.given.mask[:, :tokens]

    @property
    def flat(self) -> Tensor:
        return self.logits.reshape(-1, self.logits.shape[-1])

    def of_rows(self, tensor: Tensor) -> Tensor:
        return tensor[:, : self.logits.shape[1]]


def _log_prob(rows: Rows) -> Tensor:
    return F.log_softmax(rows.logits, -1).gather(-1, rows.clean[..., None])[..., 0]


def _in_a_loop(rows: Rows) -> Tensor:
    found = []
    for sample, index in zip(rows.logits, rows.clean, strict=True):
        found.append(F.log_softmax(sample, -1).gather(-1, index[:, None])[:, 0])
    return torch.stack(found)


def _entropy(logits: Tensor) -> Tensor:
    log_probabilities = F.log_softmax(logits, -1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def _entropy_as_verl(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, -1) - (F.softmax(logits, -1) * logits).sum(-1)


def _clipped(rows: Rows, log_probabilities: Tensor) -> Tensor:
    ratio = torch.exp(log_probabilities - rows.of_rows(rows.given.old))
    gain = torch.min(ratio * rows.given.advantages, ratio.clamp(0.8, 1.2) * rows.given.advantages)
    return -(gain * rows.mask).sum() / rows.mask.sum()


def _divergence(rows: Rows, temperature: float, *, reverse: bool = False) -> Tensor:
    classes = rows.logits.shape[-1]
    teacher = rows.of_rows(rows.given.teacher)[..., :classes]
    student = F.log_softmax(rows.logits / temperature, -1).flatten(0, -2)
    other = F.log_softmax(teacher / temperature, -1).flatten(0, -2)
    pair = (other, student) if reverse else (student, other)
    return F.kl_div(*pair, reduction="batchmean", log_target=True) * temperature**2


def _no_grad(function: Callable[[Rows], Tensor]) -> Callable[[Rows], Tensor]:
    def read(rows: Rows) -> Tensor:
        with torch.no_grad():
            return function(rows)

    return read


#: What reads logits: each returns a number, with a gradient or without.
READERS: dict[str, Callable[[Rows], Tensor]] = {
    "mean": lambda r: F.cross_entropy(r.flat, r.labels.flatten()),
    "sum": lambda r: F.cross_entropy(r.flat, r.labels.flatten(), reduction="sum") / 9,
    "of clean labels": lambda r: F.cross_entropy(r.flat, r.clean.flatten()),
    "masked": lambda r: (
        (F.cross_entropy(r.flat, r.labels.flatten(), reduction="none") * r.mask.flatten()).sum()
        / r.mask.sum()
    ),
    "smoothed": lambda r: F.cross_entropy(r.flat, r.labels.flatten(), label_smoothing=0.1),
    "weighted classes": lambda r: F.cross_entropy(
        r.flat, r.labels.flatten(), r.given.class_weight[: r.logits.shape[-1]].to(r.logits.dtype)
    ),
    "another ignored": lambda r: F.cross_entropy(r.flat, r.clean.flatten(), ignore_index=3),
    "classes second": lambda r: F.cross_entropy(r.logits.transpose(1, 2), r.labels),
    "nll": lambda r: F.nll_loss(F.log_softmax(r.flat, -1), r.labels.flatten()),
    "gathered": lambda r: -(_log_prob(r) * r.mask).mean(),
    "gathered less logsumexp": lambda r: (
        -((r.logits.gather(-1, r.clean[..., None])[..., 0] - r.logits.logsumexp(-1)) * r.mask).sum()
    ),
    "in a loop": lambda r: -(_in_a_loop(r) * r.mask).sum() / r.mask.sum(),
    "clipped": lambda r: _clipped(r, _log_prob(r)),
    "clipped in a loop": lambda r: _clipped(r, _in_a_loop(r)),
    "z-loss": lambda r: 1e-2 * r.logits.logsumexp(-1).square().mean(),
    "entropy": lambda r: -0.01 * (_entropy(r.logits) * r.mask).mean(),
    "entropy as verl": lambda r: -0.01 * _entropy_as_verl(r.logits).mean(),
    "entropy logged": _no_grad(lambda r: (_entropy(r.logits) * r.mask).sum()),
    "accuracy": _no_grad(lambda r: (r.logits.argmax(-1) == r.labels).float().mean()),
    "largest": _no_grad(lambda r: r.logits.max(-1).values.mean()),
    "mean logit": _no_grad(lambda r: r.logits.mean()),
    "divergence": lambda r: _divergence(r, 1.0),
    "warm divergence": lambda r: _divergence(r, 2.0),
    "reverse divergence": lambda r: _divergence(r, 1.0, reverse=True),
    "soft targets": lambda r: F.cross_entropy(
        r.flat, r.of_rows(r.given.teacher)[..., : r.logits.shape[-1]].flatten(0, 1).softmax(-1)
    ),
    "two classes": lambda r: (
        -F.log_softmax(r.logits, -1)
        .gather(-1, torch.stack([r.clean, (r.clean + 1) % 20], -1))
        .mean()
    ),
    "all logits": lambda r: 1e-3 * r.logits.square().mean(),
    "spread logged": _no_grad(lambda r: r.logits.std()),
    "focal": lambda r: (lambda each: ((1 - torch.exp(-each)) ** 2 * each).mean())(
        F.cross_entropy(r.flat, r.clean.flatten(), reduction="none")
    ),
}


@dataclass(frozen=True)
class Program:
    """One drawn program; ``str`` tells what it does."""

    head: str
    between: tuple[str, ...]
    readers: tuple[str, ...]
    shift: bool
    twice: bool
    autocast: bool
    returned: bool
    bias: bool
    frozen: bool
    mixture: float | None
    labels: str
    infinite: str
    dtype: torch.dtype
    dynamic: bool

    @classmethod
    def draw(cls, seed: int) -> Program:
        rng = random.Random(seed)

        def chance(part: float) -> bool:
            return rng.random() < part

        readers = tuple(rng.choices(list(READERS), k=rng.choice([1, 2, 2, 3, 3, 4])))
        dtype = rng.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
        return cls(
            head=rng.choice(list(HEADS)),
            between=tuple(rng.choices(list(BETWEEN), k=rng.choice([0, 0, 0, 1, 1, 2]))),
            readers=readers,
            shift=chance(0.3),
            twice=chance(0.4),
            autocast=dtype == torch.float32 and chance(0.4),
            returned=chance(0.08),
            bias=chance(0.3),
            frozen=chance(0.15),
            mixture=rng.choice([None, None, None, 0.3]),
            labels=rng.choice(["some ignored"] * 6 + ["all ignored", "none ignored"]),
            infinite=rng.choice([""] * 20 + ["row", "class"]),
            dtype=dtype,
            dynamic=chance(0.25),
        )

    def inputs(self, batch: int = 4, tokens: int = 18, seed: int = 0) -> Inputs:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.bfloat16().to(self.dtype)

        labels = torch.randint(20, (batch, tokens), generator=generator)
        if self.labels == "some ignored":
            labels[:, ::7] = IGNORED
        elif self.labels == "all ignored":
            labels.fill_(IGNORED)
        mask = (torch.rand(batch, tokens, generator=generator) > 0.3).to(self.dtype)
        hidden, weight, bias = draw(batch, tokens, HIDDEN), draw(CLASSES, HIDDEN), draw(CLASSES)
        if self.infinite == "row":
            hidden[1, 2] = float("inf")
        elif self.infinite == "class":  # as those are masked that padding of a vocabulary adds
            bias[30:32] = -float("inf")
        teacher, old = draw(batch, tokens, CLASSES), 0.3 * draw(batch, tokens) - 3.5
        given = (labels, mask, draw(batch, 1), old, teacher, draw(CLASSES).abs() + 0.5)
        hidden.requires_grad_()
        weight.requires_grad_(not self.frozen)
        bias = bias.requires_grad_() if self.bias or self.infinite == "class" else None
        return Inputs(hidden, weight, bias, *given)

    def __call__(self, *tensors: Any) -> tuple[Tensor, ...]:
        """The loss, and what is read beside it."""
        given = Inputs(*tensors)
        with torch.autocast(given.hidden.device.type, torch.bfloat16, enabled=self.autocast):
            return self._run(given)

    def _run(self, given: Inputs) -> tuple[Tensor, ...]:
        logits = HEADS[self.head](given.hidden, given.weight, given.bias)
        for name in self.between:
            logits = BETWEEN[name](logits)
        labels = given.labels
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        clean = labels.clamp(min=0)
        losses, logged = [], []
        for name in self.readers:
            if self.twice:  # as helpers do that each clean the labels
                clean = labels.clamp(min=0)
            value = READERS[name](Rows(logits, labels, clean, given))
            (losses if value.requires_grad else logged).append(value)
        loss = sum(losses, start=given.hidden.new_zeros(()))
        if self.mixture is not None and len(losses) > 1:
            first, *others = losses
            loss = self.mixture * first + (1 - self.mixture) * sum(others)
        return loss, *logged, *([logits] if self.returned else [])
