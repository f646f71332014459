"""The head behind lazy logits, which must not change before they are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakSet, ref

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from compile_losses.lazy.head import Head
from compile_losses.lazy.memory import Memory
from compile_losses.switches import LAZY_LOGITS
from compile_losses.torch_internals.tensors import shard_of, storage_id, version_of

#: The option that keeps all logits, where the door is not known.
ALL_KEPT = f"{LAZY_LOGITS}=False"
#: The names of a head's tensors in messages.
_NAMES = ("hidden state", "head's weight", "head's bias")
#: The sources of all lazy logits.
_sources: WeakSet[Source] = WeakSet()


def head_changes(sources: Iterable[Source] | None = None) -> None:
    """Tells sources that their heads may change now; by default all that are alive."""
    for source in list(_sources) if sources is None else sources:
        if source.before_changes is not None:
            source.before_changes(source)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_note_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    head_changes(_written_by(optimizer))


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    """Fused optimizers write to parameters without counting that as a write."""
    for source, name in _written_by(optimizer).items():
        source.note_step(name)


def _written_by(optimizer: Optimizer) -> dict[Source, str | None]:
    """The sources that a step writes to, with the name of the tensor; None if it is not known."""
    if torch.compiler.is_compiling() or not _sources:
        return {}
    # Sharded training gathers a weight from shards that are not known here.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return dict.fromkeys(_sources)
    written = set()
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        with suppress(NotImplementedError, RuntimeError):  # not every tensor has a storage
            written.add(storage_id(shard_of(parameter)))
    return {
        source: name
        for source in list(_sources)
        for name, tensor in zip(_NAMES, source.head.tensors, strict=False)
        if storage_id(tensor) in written
    }


class Source:
    """A head as a compiled graph returned it, and the changes to it since.

    Args:
        head: outside of the autograd graph.
        remedy: how a user keeps all logits.

    Attributes:
        head, remedy: as above.
        rows: how many rows of its output were computed for readers of only some rows.
        memory: of the head's output, as long as a tensor lies in it.
        before_changes: is called with the source before the head may change.
    """

    def __init__(self, head: Head, remedy: str = ALL_KEPT) -> None:
        self.head = head
        self.memory: ref[Memory] | None = None
        self.before_changes: Callable[[Source], None] | None = None
        self.remedy = remedy
        self.rows = 0
        self._seen = self._look()
        self._refusal: str | None = None
        _watch_optimizers()
        _sources.add(self)

    def _look(self) -> list[tuple[int, int, int]]:
        return [
            (version_of(t), t.untyped_storage().nbytes(), t.data_ptr()) for t in self.head.tensors
        ]

    def unread_memory(self) -> Memory | None:
        """The memory of the head's output, if somebody may still read it who did not yet."""
        memory = None if self.memory is None else self.memory()
        return memory if memory is not None and memory.made is None else None

    def _change(self) -> str | None:
        """What was changed since, in words."""
        for name, before, now in zip(_NAMES, self._seen, self._look(), strict=False):
            if before[1:] != now[1:]:
                return f"the memory of the {name} was given back or used anew"
            if before != now:
                return f"the {name} was changed in place"
        return self._refusal

    def is_intact(self) -> bool:
        return self._change() is None

    def check(self) -> None:
        """
        Raises:
            RuntimeError: a tensor of the head was changed in place, or its memory is gone.
        """
        change = self._change()
        if change is not None:
            raise RuntimeError(
                f"these logits were not read yet, and can't be computed any more: {change} since "
                f"the model returned them. Read them before, or set {self.remedy}, which keeps "
                "all logits"
            )

    def note_step(self, name: str | None) -> None:
        """Notes that an optimizer wrote to a tensor of the head; None stands for an unknown one."""
        if name is None:
            self._refusal = "an optimizer made a step"
        else:
            self._refusal = f"the {name} was changed by an optimizer"
