"""The data of the examples: bytes of Python's own help topics."""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY = 256


def text() -> Tensor:
    """int64, about 460,000 numbers below VOCABULARY."""
    from pydoc_data.topics import topics

    return torch.tensor(list("\n".join(topics.values()).encode()))


def batches(count: int, batch: int, length: int, seed: int = 0) -> list[Tensor]:
    """Random stretches of the text, each [batch, length]."""
    source, generator = text(), torch.Generator().manual_seed(seed)
    starts = torch.randint(len(source) - length, (count, batch, 1), generator=generator)
    return list(source[starts + torch.arange(length)])
