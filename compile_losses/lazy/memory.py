"""The memory of lazy logits: one for a tensor and its views, filled by the first read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor


class Memory:
    """The counterpart of a plain tensor's storage: one for a tensor and all its views.

    Args:
        make: computes the tensor.
        source: the memory that it is computed of, if any.

    Attributes:
        made: the tensor, once it was read.
    """

    def __init__(self, make: Callable[[], Tensor], source: Memory | None = None) -> None:
        self.made: Tensor | None = None
        self._make: Callable[[], Tensor] | None = make
        self._source = source
        #: The memories that are computed of this one, and must be before its numbers change.
        self._readers: WeakSet[Memory] = WeakSet()
        #: The tensors that lie in this memory, which are told once it is made. Tensors compare
        #: element by element, so they are known by their identity.
        self._tensors: dict[int, ref[Any]] = {}
        self._lock: threading.RLock = threading.RLock() if source is None else source._lock
        if source is not None:
            source._readers.add(self)

    @staticmethod
    def of(made: Tensor) -> Memory:
        memory = Memory(lambda: made)
        memory.read()
        return memory

    def hold(self, tensor: Any) -> None:
        """Calls the tensor's ``lie_in(made)`` once this memory is made."""
        with self._lock:
            if self.made is not None:
                tensor.lie_in(self.made)
                return
            key, tensors = id(tensor), self._tensors
            tensors[key] = ref(tensor, lambda _: tensors.pop(key, None))

    def read(self) -> Tensor:
        with self._lock:
            if self.made is None:
                assert self._make is not None
                # A tensor of inference mode could not take part in a backward later.
                with torch.inference_mode(False), torch.no_grad():
                    made = self._make()
                self.made, self._make, self._source = made, None, None
                with torch.inference_mode(False):
                    for tensor in [each() for each in list(self._tensors.values())]:
                        if tensor is not None:
                            tensor.lie_in(made)
                self._tensors.clear()
            return self.made

    def is_unread(self) -> bool:
        """Whether neither this memory nor its source has been computed."""
        with self._lock:
            return self.made is None and (self._source is None or self._source.is_unread())

    def share(self) -> Tensor:
        """Reads it for somebody who may write to it; waiting memories are computed before."""
        with self._lock:
            made = self.read()
            for reader in list(self._readers):
                reader.read()
            return made
