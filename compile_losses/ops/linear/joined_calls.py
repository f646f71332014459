"""Calls of heads that add to one gradient of a weight, as a text.

``calls``   each with its ``step``, see :mod:`compile_losses.ops.linear.steps`, whose operands are
            tensors; the ``places`` of those of its results that go into the sum; and ``rows``, a
            tensor that has the call's rows
``dtype``   of the sum
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from compile_losses.ops.linear.steps import Step, decode, encode, name_of
from compile_losses.torch_internals.ops import OpOverload, schema_of

_REGION = "fused::linear_region"


@dataclass(frozen=True)
class JoinedCall:
    """A call, see the module."""

    step: Step
    places: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class JoinedCalls:
    """See the module."""

    calls: tuple[JoinedCall, ...]
    dtype: torch.dtype

    def text(self) -> str:
        """
        Raises:
            TypeError: a call is none of a head, or has an argument that has no text.
        """
        calls = [
            {"step": encode(each.step, is_head), "places": each.places, "rows": each.rows}
            for each in self.calls
        ]
        return json.dumps({"calls": calls, "dtype": name_of(self.dtype)})


def is_head(op: Any, args: Sequence[Any] = (), kwargs: Any = None) -> bool:
    """Whether an op makes gradients of a head a chunk of rows at a time."""
    if not isinstance(op, OpOverload):
        return False
    return schema_of(op).name == _REGION or place_of_weight(op) is not None


def place_of_weight(op: OpOverload[..., Any]) -> int | None:
    """Which result of a loss of a head is the gradient of its weight; None if none is."""
    schema = schema_of(op)
    names = [argument.name for argument in schema.arguments]
    is_loss = schema.name.startswith("fused::linear_") and "needs_grad_linear_weight" in names
    return len(schema.returns) - 2 if is_loss else None


@lru_cache(maxsize=128)
def parsed(text: str) -> JoinedCalls:
    """The calls of a text."""
    written = json.loads(text)
    calls = (
        JoinedCall(decode(c["step"], is_head, "calls"), tuple(c["places"]), c["rows"])
        for c in written["calls"]
    )
    return JoinedCalls(tuple(calls), getattr(torch, written["dtype"]))
