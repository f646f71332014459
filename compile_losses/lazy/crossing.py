"""The gradients of a compiled graph that takes heads in the place of lazy logits.

The graph's backward makes gradients of hidden state, weight and bias, which go straight to these.
So the logits' own gradient is not computed. If somebody asks for it all the same, it is computed
by a second run of the graph (``replay``), and the gradients of the head's tensors by the head's
own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compile_losses.lazy.gradient import LazyGradient
from compile_losses.lazy.path import nodes_to_head
from compile_losses.lazy.replay import Replay
from compile_losses.lazy.tensor import LazyLogits, shape_of
from compile_losses.torch_internals.dynamo import in_compiled_backward
from compile_losses.torch_internals.eager import (
    is_on_the_way,
    no_modes,
    not_compiled,
    retains_graph,
)
from compile_losses.torch_internals.tensors import autograd_node

#: What a backward does with the logits' gradient: it goes past them; it computes it; it takes one
#: along that is computed if somebody reads it.
_PAST, _NOW, _LATER = "past", "now", "later"
#: From one gradient to another.
_Way = Callable[[Tensor], Tensor]


class Crossing:
    """One call of a graph that takes heads.

    Args:
        logits: the lazy logits, by their place among the graph's arguments. They require gradients.
        replay: the call, to be run again.
    """

    def __init__(self, logits: dict[int, LazyLogits], replay: Replay) -> None:
        self._replay: Replay | None = replay
        self._paths = [lazy.path for lazy in logits.values()]
        self._nodes = [node for lazy in logits.values() for node in nodes_to_head(lazy) or ()]
        #: For each of the logits, its shape and device, which of the head's tensors need a
        #: gradient, and how that of the input is made of that of the input which the graph takes.
        self._described: list[tuple[Tensor, torch.device, list[bool], _Way | None]] = []
        self._noted: tuple[Tensor | None, ...] = ()
        tensors: list[Tensor] = []
        self.heads: dict[int, tuple[Tensor, ...]] = {}
        for place, lazy in logits.items():
            self.heads[place] = lazy.opened().tensors
            needed = [tensor.requires_grad for tensor in self.heads[place]]
            way = lazy.gradient_before_reshapes()
            self._described.append((shape_of(lazy), lazy.device, needed, way))
            tensors += [tensor for tensor in self.heads[place] if tensor.requires_grad]
        taken = iter(_Open.apply(self, _probe(), len(logits), *logits.values(), *tensors))
        for place, head in self.heads.items():
            self.heads[place] = tuple(next(taken) if t.requires_grad else t for t in head)

    def watch(self, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The same results, whose gradients are noted if they are needed."""
        watched: tuple[Tensor, ...] = _Watch.apply(self, *results)
        return watched

    def refuse_replay(self, why: str) -> None:
        assert self._replay is not None
        self._replay.refuse(why)

    def plan(self) -> str:
        """In a backward: what it does with the logits' gradient."""
        if in_compiled_backward() or not all(path.is_free() for path in self._paths):
            return _NOW
        if is_on_the_way(autograd_node(_probe())):  # and so is every node
            return _PAST
        if not any(map(is_on_the_way, self._nodes)):
            return _PAST
        return _NOW if torch.is_grad_enabled() else _LATER

    @not_compiled
    def note(self, grads: tuple[Tensor | None, ...]) -> None:
        if self.plan() != _PAST:
            self._noted = grads

    @not_compiled
    def gradients(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Of the logits and of the heads' tensors, from those of the latter that are computed."""
        plan, replay, noted = self.plan(), self._replay, self._noted
        self._noted = ()
        if not retains_graph():
            self._replay = None
        if plan == _PAST:
            return (*(None for _ in self._described), *grads)
        nothing: list[Tensor | None] = [None for _ in grads]
        assert replay is not None
        if plan == _NOW:
            found: list[Tensor | None] = replay.gradients(noted)
            if in_compiled_backward():
                nothing = [None if grad is None else torch.zeros_like(grad) for grad in grads]
                found = [self._zeros(at) if g is None else g for at, g in enumerate(found)]
            return (*found, *nothing)
        computed = cache(lambda: replay.gradients(noted))
        rest, later = iter(grads), list[Tensor | None]()
        for place, (like, device, needed, way) in enumerate(self._described):
            parts = tuple(next(rest) if is_needed else None for is_needed in needed)
            if way is not None and parts[0] is not None:
                parts = (way(parts[0]), *parts[1:])

            def make(place: int = place) -> Tensor:
                grad = computed()[place]
                return self._zeros(place) if grad is None else grad

            is_read = any(part is not None for part in parts)
            later.append(LazyGradient.of(like, device, make, [parts]) if is_read else None)
        return (*later, *nothing)

    def _zeros(self, place: int) -> Tensor:
        like, device, *_ = self._described[place]
        return torch.zeros(like.shape, dtype=like.dtype, device=device)


@cache
def _probe() -> Tensor:
    """A tensor that no gradient is asked of: only a backward of everything comes past it."""
    with no_modes(), torch.enable_grad():
        return torch.zeros((), device="cpu", requires_grad=True).view(())


class _Open(torch.autograd.Function):
    """From lazy logits to the tensors of their heads."""

    @staticmethod
    def forward(
        ctx: Any, crossing: Crossing, probe: Tensor, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.crossing = crossing
        return tuple(tensor.detach() for tensor in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, None, *ctx.crossing.gradients(grads))


class _Watch(torch.autograd.Function):
    """The identity of a graph's results."""

    @staticmethod
    def forward(ctx: Any, crossing: Crossing, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.crossing = crossing
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.crossing.note(grads)
        return (None, *grads)
