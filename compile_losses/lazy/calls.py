"""Calls of a graph that is given lazy logits: what it takes in their place, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_losses.lazy.crossing import Crossing
from compile_losses.lazy.head import Step, apply
from compile_losses.lazy.replay import Replay
from compile_losses.lazy.tensor import LazyLogits
from compile_losses.torch_internals.tensors import storage_id


@dataclass(frozen=True, eq=False)
class Outside:
    """A result that is made of one of the graph's arguments alone.

    Attributes:
        place: of the argument.
        steps: the ops that lead from it to the result.
        requires_grad: whether gradients go from the result to the argument.
    """

    place: int
    steps: tuple[Step, ...]
    requires_grad: bool

    def of(self, given: tuple[Any, ...]) -> Tensor:
        result = apply(given[self.place], self.steps)
        return result.detach() if result.requires_grad and not self.requires_grad else result


@dataclass(frozen=True, eq=False)
class Calls:
    """How a graph is called that takes heads and numbers in the place of lazy logits.

    Args:
        graph: the graph as Dynamo captured it, which takes the logits themselves.
        opened: the places of the arguments in whose place it takes a head.
        written: the places of the arguments that the graph writes to.
        outside: the results that the compiled graph does not return, by their place among the
            results of ``graph``.
        watched: of the other results, which are tensors of their own that need a gradient.
        refusal: why the graph can't be run a second time, if that is known.
        is_uncompiled: whether its results can't be told apart from its arguments, so that it has
            to run as it is.
    """

    graph: Callable[..., Any]
    opened: frozenset[int]
    written: frozenset[int]
    outside: dict[int, Outside]
    watched: tuple[int, ...]
    refusal: str | None
    is_uncompiled: bool

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A function with the arguments and results of ``graph``."""

        def run(*given: Any) -> Any:
            if self.is_uncompiled or (self.written and self._shares_memory(given)):
                return self.graph(*given)
            return self._run(compiled, given)

        return run

    def _run(self, compiled: Callable[..., Any], given: tuple[Any, ...]) -> list[Any]:
        crossing = self._crossing(given)
        taken: list[Any] = []
        copies: dict[int, Tensor] = {}
        for place, value in enumerate(given):
            if not isinstance(value, LazyLogits):
                taken.append(value)
            elif crossing is not None and place in crossing.heads:
                taken += crossing.heads[place]
            elif place in self.opened:
                taken += value.opened().tensors
            elif place in self.written:
                copies[place] = value.plain().clone()
                taken.append(copies[place])
            else:
                taken.append(value.plain())
        made = list(compiled(*taken))
        for place, copy in copies.items():
            given[place].copy_(copy)
        for at in sorted(self.outside):
            made.insert(at, self.outside[at].of(given))
        if crossing is not None:
            self._watch(crossing, made)
        return made

    def _crossing(self, given: tuple[Any, ...]) -> Crossing | None:
        """The autograd graph from the logits to their heads, if gradients go there."""
        logits = {
            place: value
            for place, value in enumerate(given)
            if place in self.opened and value.requires_grad and not value.is_traced
        }
        if not logits or not torch.is_grad_enabled():
            return None
        replay = Replay(self.graph, given, logits, list(self.watched), self.refusal)
        return Crossing(logits, replay)

    def _watch(self, crossing: Crossing, made: list[Any]) -> None:
        for place, result in enumerate(made):
            if isinstance(result, LazyLogits) and place not in self.outside:
                crossing.refuse_replay("it returns the logits of another head")
                return
        results = [made[place] for place in self.watched]
        for place, result in zip(self.watched, crossing.watch(results), strict=True):
            made[place] = result

    def _shares_memory(self, given: tuple[Any, ...]) -> bool:
        """Whether an argument that the graph writes to shares memory with another one, and logits
        are among them."""
        found: dict[Any, list[int]] = {}
        for place, value in enumerate(given):
            for key in _memories(value, place in self.opened):
                found.setdefault(key, []).append(place)
        return any(
            len(places) > 1
            and not self.written.isdisjoint(places)
            and any(isinstance(given[place], LazyLogits) for place in places)
            for places in found.values()
        )


def _memories(value: Any, is_opened: bool) -> set[Any]:
    """What tells the memory of an argument apart, and of a head that takes its place."""
    tensors = [value] if isinstance(value, Tensor) else []
    found: set[Any] = set()
    if isinstance(value, LazyLogits):
        memory = value._memory
        tensors = [] if memory.made is None else [memory.made]
        tensors += value.opened().tensors if is_opened else ()
        found.add(("unread", id(memory)))
    for tensor in tensors:
        with suppress(NotImplementedError, RuntimeError):  # not every tensor has a storage
            found.add(storage_id(tensor))
    return found
