"""The gradient of logits that a compiled graph did not compute, for somebody who asks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from compile_losses.lazy.head import apply
from compile_losses.lazy.tensor import LazyLogits
from compile_losses.switches import LAZY_LOGITS
from compile_losses.torch_internals.eager import TorchDispatchMode, recording
from compile_losses.torch_internals.ops import communicates, schema_of, tree_leaves
from compile_losses.torch_internals.tensors import storage_id, version_of


class _ImpureError(Exception):
    """A graph can't be run a second time; the message says why."""


class _Pure(TorchDispatchMode):
    """Refuses what would make a second run differ from the first, or change its inputs."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self._given = {storage_id(tensor) for tensor in given}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _ImpureError(f"it draws random numbers ({func})")
        if communicates(func):
            raise _ImpureError(f"it talks to other processes ({func})")
        for place, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = kwargs.get(argument.name, args[place] if place < len(args) else None)
            tensors = [each for each in tree_leaves(written) if isinstance(each, Tensor)]
            if any(storage_id(tensor) in self._given for tensor in tensors):
                raise _ImpureError(f"it changes one of its inputs in place ({func})")
        return func(*args, **kwargs)


class _Logits:
    """Logits as they were handed on. What is written to them later is not seen here."""

    def __init__(self, lazy: LazyLogits) -> None:
        self._origin, self._source, self._steps = lazy.opened(), lazy.source, lazy.reshaped()[1]
        self._held = self._origin.with_tensors(*(t.detach() for t in self._origin.tensors))

    def compute(self, is_recorded: bool) -> Tensor:
        """
        Args:
            is_recorded: whether gradients go on to the head; else the result is a leaf.

        Raises:
            RuntimeError: the head was changed since.
        """
        if self._source is not None:
            self._source.check()
        if not self._origin.lies_in(self._held):
            _refuse("its head was given other data since")
        with torch.set_grad_enabled(is_recorded):
            made = apply(self._origin.output(), self._steps)
        return made if is_recorded else made.detach().requires_grad_()


class Replay:
    """A call of a graph, to be run once more without a compiler.

    Args:
        run: the graph as Dynamo captured it.
        given: its arguments.
        lazy: those among them whose gradients may be asked for, by their place.
        results: the places of the results that gradients come from.
        refusal: why it can't be run again, if that is known.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        given: tuple[Any, ...],
        lazy: dict[int, LazyLogits],
        results: list[int],
        refusal: str | None,
    ) -> None:
        self._run, self._results = run, results
        self._bytes = sum(logits.nbytes for logits in lazy.values())
        self._logits = {place: _Logits(logits) for place, logits in lazy.items()}
        device = next(iter(lazy.values())).device.type
        self._autocast = partial(
            torch.autocast,
            device,
            torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device),
        )
        self._given = [None if at in lazy else each for at, each in enumerate(given)]
        self._others = [each for each in self._given if isinstance(each, Tensor)]
        self._versions = list(map(version_of, self._others))
        self._refusal: str | None = None
        if (refusal := refusal or self._too_large()) is not None:
            self.refuse(refusal)

    def refuse(self, why: str) -> None:
        """Notes why it can't be run again, and keeps nothing."""
        self._refusal = why
        self._given, self._others, self._versions, self._logits = [], [], [], {}

    def _too_large(self) -> str | None:
        """To run it again, its inputs are kept: as many bytes as the logits would take, at most."""
        kept = sum(t.nbytes for t in self._others if not (t.is_leaf and t.requires_grad))
        return "its other inputs are larger than the logits" if kept > self._bytes else None

    def gradients(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """The gradients of the lazy logits, from those of the results; differentiable if enabled.

        Raises:
            RuntimeError: the graph can't be run again.
        """
        if self._refusal is not None:
            _refuse(self._refusal)
        if self._versions != list(map(version_of, self._others)):
            _refuse("its inputs were changed in place since")
        if len(grads) != len(self._results):
            _refuse("somebody asked for it when its backward had begun")
        is_recorded = torch.is_grad_enabled()
        given: list[Any] = list(self._given)
        with recording(), torch.enable_grad():
            for place, each in self._logits.items():
                given[place] = each.compute(is_recorded)
            logits: list[Tensor] = [given[place] for place in self._logits]
            try:
                with _Pure([*logits, *self._others]), self._autocast():
                    results = self._run(*given)
            except _ImpureError as error:
                _refuse(str(error), error)
            pairs = [
                (results[place], grad)
                for place, grad in zip(self._results, grads, strict=True)
                if grad is not None and results[place].requires_grad
            ]
            if not pairs:
                return [None] * len(logits)
            outputs, grads_of = zip(*pairs, strict=True)
            return list(
                torch.autograd.grad(
                    outputs, logits, grads_of, allow_unused=True, create_graph=is_recorded
                )
            )


def _refuse(why: str, error: Exception | None = None) -> NoReturn:
    raise RuntimeError(
        "the gradient of logits was asked for which a compiled graph did not compute: it computed "
        f"its loss from the head of these logits, and can't be run again, because {why}. Register "
        "hooks and call retain_grad() before the graph is called, or compile with "
        f"options={{{LAZY_LOGITS!r}: False}}, which keeps all logits"
    ) from error
