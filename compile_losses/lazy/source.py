"""The head behind lazy logits, which must not change before they are computed."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from compile_losses.lazy.head import Head
from compile_losses.switches import LAZY_LOGITS
from compile_losses.torch_internals.tensors import shard_of, storage_id, version_of

#: The names of a head's tensors in messages.
_NAMES = ("hidden state", "head's weight", "head's bias")
#: The sources of all lazy logits.
_sources: WeakSet[Source] = WeakSet()


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    """Fused optimizers write to parameters without counting that as a write."""
    if torch.compiler.is_compiling() or not _sources:
        return
    # Sharded training gathers a weight from shards that are not known here.
    sharded = torch.distributed.is_available() and torch.distributed.is_initialized()
    written = set()
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        with suppress(NotImplementedError, RuntimeError):  # not every tensor has a storage
            written.add(storage_id(shard_of(parameter)))
    for source in list(_sources):
        source.note_step(None if sharded else written)


class Source:
    """A head as a compiled graph returned it, and the changes to it since.

    Attributes:
        head: outside of the autograd graph.
        rows: how many rows of its output were computed for readers of only some rows.
    """

    def __init__(self, head: Head) -> None:
        self.head = head
        self.rows = 0
        self._seen = self._look()
        self._refusal: str | None = None
        _watch_optimizers()
        _sources.add(self)

    def _look(self) -> list[tuple[int, int, int]]:
        return [
            (version_of(t), t.untyped_storage().nbytes(), t.data_ptr()) for t in self.head.tensors
        ]

    def check(self) -> None:
        """
        Raises:
            RuntimeError: a tensor of the head was changed in place, or its memory is gone.
        """
        for name, before, now in zip(_NAMES, self._seen, self._look(), strict=False):
            if before[1:] != now[1:]:
                _refuse(f"the memory of the {name} was given back or used anew")
            if before != now:
                _refuse(f"the {name} was changed in place")
        if self._refusal is not None:
            _refuse(self._refusal)

    def note_step(self, written: set[int] | None) -> None:
        """Notes that an optimizer wrote to these storages; None stands for unknown ones."""
        if written is None:
            self._refusal = "an optimizer made a step"
            return
        for name, tensor in zip(_NAMES, self.head.tensors, strict=False):
            if storage_id(tensor) in written:
                self._refusal = f"the {name} was changed by an optimizer"


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"these logits were not read yet, and can't be computed any more: {what} since the model "
        f"returned them. Read them before, or compile with options={{{LAZY_LOGITS!r}: False}}, "
        "which keeps all logits"
    )
