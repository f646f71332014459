"""What the passes are asked for: the options, as they hold for one compilation."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compile_losses import switches
from compile_losses.guard import is_strict
from compile_losses.switches import ELEMENTWISE

if TYPE_CHECKING:
    from compile_losses.recognize.returned_logits import Lazily


@dataclass(frozen=True)
class Request:
    """What is asked of the passes. One record goes from the door to the plan.

    Attributes:
        losses: the names of the ops to rewrite to; ``"elementwise"`` stands for losses without one.
        prefer_memory: whether a loss is taken together with its linear layer even if that saves
            less than half of the logits, computes them twice, or is no loss that has an op. Each
            may cost time.
        verify: whether every loss and its rewrite are evaluated on random numbers first.
        strict: whether an error inside this package is raised.
        lowers: whether the plan will work on AOTAutograd's graph of the rewritten one. It moves
            gradients by row into the forward if it can, and else has the logits computed as torch
            does.
        lazily: collects the outputs that the caller has to make lazy; None if returned logits stay.
    """

    losses: Container[str]
    prefer_memory: bool = False
    verify: bool = False
    strict: bool = False
    lowers: bool = False
    lazily: Lazily | None = None

    @classmethod
    def of(
        cls,
        *,
        losses: Container[str] | None = None,
        prefer_memory: bool | None = None,
        verify: bool | None = None,
        strict: bool | None = None,
        lowers: bool = False,
        lazily: Lazily | None = None,
    ) -> Request:
        """A request with what the environment says in the place of None."""

        def given(value: bool | None, variable: str) -> bool:
            return switches.is_set(variable) if value is None else value

        return cls(
            switches.chosen() if losses is None else losses,
            given(prefer_memory, "COMPILE_LOSSES_PREFER_MEMORY"),
            given(verify, "COMPILE_LOSSES_VERIFY"),
            is_strict(strict),
            lowers,
            lazily,
        )

    @property
    def elementwise(self) -> bool:
        """Whether gradients of losses without an op are moved into the forward."""
        return ELEMENTWISE in self.losses
