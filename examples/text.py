"""The data of the examples: bytes of Python's own help topics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of transformers: the bytes, and two special tokens behind them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    # Sorted by byte, so that a byte is its own token.
    characters = [bytes_to_unicode()[byte] for byte in range(VOCABULARY)]
    names = [*characters, "<pad>", "<eos>"]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
