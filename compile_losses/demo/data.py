"""What the demo's models learn: the text of Python's own help topics, and two generated signals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch import Tensor

from compile_losses.demo import language_models, models

PAST, FUTURE = 256, 512
FACTORS, SENSORS = 8, 512
BYTES = models.BYTES

#: Draws one batch: the arguments of the model's forward.
Sampler = Callable[[torch.Generator], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One model to train.

    ``loss`` is the line that its forward ends in; ``make`` builds it; ``sampler`` draws batches.
    The first of the steps compiles, the next few still warm caches up: ``warm_up`` are not timed.
    ``criterion``, if any, is the loss of what the model returns and of the last tensor of a batch,
    which the model does not get. Both are then compiled by themselves. ``options`` are those of
    this package's backend for the model.
    """

    name: str
    loss: str
    make: Callable[[], nn.Module]
    sampler: Sampler
    learning_rate: float
    steps: int
    warm_up: int = 5
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None
    options: dict[str, bool] = field(default_factory=dict)

    def batches(self, count: int, seed: int = 0) -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(seed)
        return (self.sampler(generator) for _ in range(count))


def help_topics() -> str:
    """The values of ``pydoc_data.topics``."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def text() -> Tensor:
    """The help topics as bytes: int64 [about 460,000], each in [0, 256)."""
    return torch.frombuffer(bytearray(help_topics().encode()), dtype=torch.uint8).long()


def windows(source: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """Random stretches of ``source``: [count, length]. The generator is of the source's device."""
    on = source.device
    starts = torch.randint(len(source) - length + 1, (count, 1), generator=generator, device=on)
    return source[starts + torch.arange(length, device=on)]


def next_tokens(source: Tensor, batch: int, time: int) -> Sampler:
    """Tokens and the tokens that follow them, both [batch, time]."""

    def sample(generator: torch.Generator) -> tuple[Tensor, ...]:
        stretch = windows(source, time + 1, batch, generator)
        return stretch[:, :-1].contiguous(), stretch[:, 1:].contiguous()

    return sample


def completions(source: Tensor, batch: int, time: int) -> Sampler:
    """Stretches of text as a policy might have written them, and what it is told of them.

    Tokens, those that follow, the logarithms of their probabilities, all alike, and which of them
    are no prompt, each [batch, time]; and the advantages, [batch, 1], behind the probabilities: how
    many different tokens there are, beside the others of the batch.
    """
    vocabulary = int(source.max()) + 1
    draw = next_tokens(source, batch, time)

    def sample(generator: torch.Generator) -> tuple[Tensor, ...]:
        tokens, following = draw(generator)
        different = (following.sort(1).values.diff(dim=1) != 0).float().sum(1, keepdim=True)
        advantages = (different - different.mean()) / different.std()
        log_probs = torch.full(tokens.shape, -math.log(vocabulary))
        mask = (torch.arange(time) >= time // 4).float().expand(batch, time).contiguous()
        return tokens, following, log_probs, advantages, mask

    return sample


def signals(batch: int) -> Sampler:
    """Three random sine waves and noise: the past [batch, PAST] and the future [batch, FUTURE]."""
    clock = torch.arange(PAST + FUTURE) / PAST

    def sample(generator: torch.Generator) -> tuple[Tensor, ...]:
        periods, phases = torch.rand(2, batch, 3, 1, generator=generator)
        waves = torch.sin(2 * math.pi * ((1 + periods) * clock + phases)).sum(1)
        waves += 0.1 * torch.randn(waves.shape, generator=generator)
        return waves[:, :PAST].contiguous(), waves[:, PAST:].contiguous()

    return sample


def histograms(source: Tensor, batch: int, window: int = 512) -> Sampler:
    """Square roots of how often each byte occurs in a window of text: [batch, 256]."""

    def sample(generator: torch.Generator) -> tuple[Tensor, ...]:
        stretch = windows(source, window, batch, generator)
        counts = torch.zeros(batch, BYTES).scatter_add_(1, stretch, torch.ones(stretch.shape))
        return (counts.sqrt(),)

    return sample


def bigrams(source: Tensor, batch: int) -> Sampler:
    """Bytes [batch] and how the byte after each is distributed in the text: [batch, 256]."""
    pairs = torch.bincount(source[:-1] * BYTES + source[1:], minlength=BYTES * BYTES)
    counts = pairs.view(BYTES, BYTES).float()
    distributions = counts / counts.sum(1, keepdim=True).clamp(min=1)

    def sample(generator: torch.Generator) -> tuple[Tensor, ...]:
        tokens = windows(source[:-1], 1, batch, generator).flatten()
        return tokens, distributions[tokens]

    return sample


def masked_bytes(source: Tensor, batch: int, time: int, share: float = 0.15) -> Sampler:
    """Text with some bytes masked, and the masked ones as targets: both [batch, time]."""

    def sample(generator: torch.Generator) -> tuple[Tensor, ...]:
        stretch = windows(source, time, batch, generator)
        masked = torch.rand(stretch.shape, generator=generator) < share
        return (
            stretch.masked_fill(masked, models.MASK),
            stretch.masked_fill(~masked, models.IGNORED),
        )

    return sample


def sensors(batch: int, outliers: float = 0.05) -> Sampler:
    """Factors [batch, FACTORS] and what sensors read of them [batch, SENSORS], some far off."""
    generator = torch.Generator().manual_seed(1)
    response = torch.randn(FACTORS, SENSORS, generator=generator) / math.sqrt(FACTORS)

    def sample(generator: torch.Generator) -> tuple[Tensor, ...]:
        factors = torch.randn(batch, FACTORS, generator=generator)
        readings = torch.sin(2 * factors @ response)
        wrong = torch.rand(readings.shape, generator=generator) < outliers
        noise = torch.randn(readings.shape, generator=generator)
        return factors, readings + torch.where(wrong, 20 * noise, 0.1 * noise)

    return sample


def cases(steps: int) -> list[Case]:
    """The GPT, trained for ``steps``, and one small model for each of the five losses."""
    source = text()
    few = max(1, steps // 3)
    return [
        Case(
            "GPT",
            "F.cross_entropy(logits.view(-1, V), targets.view(-1))",
            lambda: language_models.GPT(layers=1, time=128),
            next_tokens(source, batch=8, time=128),
            learning_rate=1e-3,
            steps=steps,
        ),
        Case(
            "forecaster",
            "torch.mean((predictions - targets) ** 2)",
            lambda: models.Forecaster(PAST, FUTURE),
            signals(batch=1024),
            learning_rate=2e-3,
            steps=few,
        ),
        Case(
            "autoencoder",
            "nn.MSELoss()",
            models.Autoencoder,
            histograms(source, batch=2048),
            learning_rate=3e-3,
            steps=few,
        ),
        Case(
            "next byte",
            'F.kl_div(torch.log(predictions), targets, reduction="batchmean")',
            models.NextByte,
            bigrams(source, batch=4096),
            learning_rate=2e-2,
            steps=few,
        ),
        Case(
            "masked bytes",
            "F.cross_entropy(..., ignore_index=-1)",
            models.MaskedBytes,
            masked_bytes(source, batch=32, time=128),
            learning_rate=5e-3,
            steps=few,
        ),
        Case(
            "regression",
            "F.smooth_l1_loss(..., beta=0.5)",
            lambda: models.RobustRegression(FACTORS, SENSORS),
            sensors(batch=1024),
            learning_rate=5e-3,
            steps=few,
        ),
    ]
