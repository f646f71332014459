"""The demo's large problems: what the package is for, where losses take time and memory.

To add one, write a function that returns its :class:`Case` and add it to :data:`PROBLEMS`, or to
:data:`QUICK` if a few seconds are enough for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from compile_losses.demo import data, models
from compile_losses.demo.data import Case, Sampler
from compile_losses.demo.language_models import GPT, Policy, Student, next_token_loss

VOCABULARY = 16384


def words(size: int = VOCABULARY) -> Tensor:
    """The help topics as words, and as pairs of words that are frequent: int64 [about 70,000].

    The vocabulary of ``size`` is all words, numbers, marks and spaces of the text, a space before a
    word counted to it, and as many of the pairs as there is room for.
    """
    pieces = re.findall(r" ?\w+| ?[^\w\s]+|\s+", data.help_topics())
    single = dict.fromkeys(pieces)
    counted = Counter(pairwise(pieces)).most_common(size - len(single))
    numbers = {entry: i for i, entry in enumerate([*single, *(pair for pair, _ in counted)])}
    found = []
    place = 0
    while place < len(pieces):
        pair = tuple(pieces[place : place + 2])
        found.append(numbers.get(pair, numbers[pieces[place]]))
        place += 2 if pair in numbers else 1
    return torch.tensor(found)


def of_words(
    quick: bool,
    name: str,
    loss: str,
    kind: Callable[..., nn.Module],
    sampler: Callable[[Tensor, int, int], Sampler] = data.next_tokens,
    **others: Any,
) -> Case:
    """A GPT of words; nearly all of its memory is the logits."""
    width, time, batch = 32 if quick else 64, 256, 32
    return Case(
        name,
        loss,
        lambda: kind(width, 1, time=time, vocabulary=VOCABULARY),
        sampler(words(), batch, time),
        learning_rate=1e-3,
        steps=3 if quick else 4,
        warm_up=1,
        **others,
    )


def language_model(quick: bool) -> Case:
    formula = "F.cross_entropy(logits.view(-1, V), targets.view(-1))"
    return of_words(quick, "GPT, 16k words", formula, GPT)


def returned_logits(quick: bool) -> Case:
    """The same, but that the model is compiled without its loss, which is compiled by itself."""
    formula = "criterion(model(tokens), targets), each compiled, with lazy_logits"
    options = {"lazy_logits": True}
    return of_words(
        quick, "returned logits", formula, GPT, criterion=next_token_loss, options=options
    )


def policy(quick: bool) -> Case:
    formula = "PPO's min(ratio * A, clipped * A) + bonus * entropy, a mean over masked tokens"
    return of_words(quick, "policy", formula, Policy, data.completions)


def distillation(quick: bool) -> Case:
    """From a teacher twice as wide. Its weights are random: what it knows changes no figure."""

    def kind(width: int, layers: int, **others: int) -> nn.Module:
        return Student(GPT(width, layers, **others), GPT(2 * width, layers, **others))

    def sampler(source: Tensor, batch: int, time: int) -> Sampler:
        return lambda generator: (data.windows(source, time, batch, generator),)

    formula = "F.kl_div(log_softmax(logits / T), softmax(teacher's / T), reduction='batchmean')"
    return of_words(quick, "distillation", formula, kind, sampler)


def product(rows: int, cols: int, rank: int) -> Tensor:
    """A matrix of that rank, [rows, cols], with entries of variance 1 and some noise."""
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(rows, rank, generator=generator)
    right = torch.randn(rank, cols, generator=generator)
    noise = torch.randn(rows, cols, generator=generator)
    return torch.addmm(noise, left, right, beta=0.1, alpha=rank**-0.5)


def whole(entries: Tensor) -> Sampler:
    """The same in every batch."""
    return lambda generator: (entries,)


def of_a_matrix(
    quick: bool,
    name: str,
    formula: str,
    kind: Callable[[int, int, int], nn.Module],
    entries: Callable[[Tensor], Tensor],
) -> Case:
    """A large matrix, fitted by the product of two thin ones: all that is large is in the loss."""
    rows, cols, rank = (1024 if quick else 2048), 16384, 4
    return Case(
        name,
        formula,
        lambda: kind(rows, cols, rank),
        whole(entries(product(rows, cols, rank))),
        learning_rate=1e-2,
        steps=6 if quick else 12,
        warm_up=2,
    )


def factorisation(quick: bool) -> Case:
    formula = "F.mse_loss(self.left @ self.right, entries)"
    return of_a_matrix(quick, "factorisation", formula, models.Factorisation, lambda x: x)


def recommender(quick: bool) -> Case:
    """Of zeros and ones, whose loss takes more arithmetic."""
    formula = "F.binary_cross_entropy_with_logits(self.left @ self.right, entries)"
    return of_a_matrix(quick, "recommender", formula, models.Recommender, lambda x: (x > 1).float())


#: Those of ``--quick``, and all. Each is told whether it is to be quick.
QUICK: tuple[Callable[[bool], Case], ...] = (language_model, factorisation)
PROBLEMS = (
    *(language_model, returned_logits, policy, distillation),
    *(factorisation, recommender),
)


def problems(quick: bool) -> list[Case]:
    return [make(quick) for make in (QUICK if quick else PROBLEMS)]
