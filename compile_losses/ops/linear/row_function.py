"""From an op's results for each row to the gradients of these results: a function, as a text.

A loss that is made of one number a row, such as a masked mean or PPO's clipped ratio, has for each
row a gradient that depends on that row's own loss and on tensors that are known before it. An op
that computes rows a chunk at a time evaluates such a function between the loss of a chunk and its
gradient. Ops take no functions. They take a text, JSON, with one step for each ATen op::

    {"steps": [["aten.exp.default", [{"value": 0}], {}],
               ["aten.mul.Tensor", [{"value": 2}, {"value": 1}], {}]],
     "results": [3]}

The first values are the op's results for each row: the loss alone, or several statistics. Then come
the known tensors, and each step makes one more value. ``results`` are the numbers of those values
that are the gradients, in the order of the op's results; null stands for no gradient. All steps
work element by element, so that a row knows nothing of others. If an op computes several numbers of
each row, [rows, K], a step may also sum them up, take the largest, take some of them, put more
beside them, or repeat one number of each row. :func:`encode` refuses any other op.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from compile_losses.op_traits import CASTS, FILLED, is_pointwise
from compile_losses.ops.linear.steps import Operand, Step, call, decode
from compile_losses.ops.linear.steps import encode as encode_step
from compile_losses.torch_internals.ops import OpOverload, is_pure

aten = torch.ops.aten

#: Ops that work on the numbers of each row: [rows, K] becomes [rows]; [rows] becomes [rows, 1],
#: which is repeated as often as another value has numbers; several values stand side by side, or
#: some numbers of each row are kept.
SUM, LARGEST = aten.sum.dim_IntList, aten.amax.default
COLUMN, REPEAT = aten.unsqueeze.default, aten.expand_as.default
JOIN, SLICE = aten.cat.default, aten.slice.Tensor


def is_of_elements(op: Any) -> bool:
    """Whether an op works element by element, and always with the same result."""
    if not isinstance(op, OpOverload) or op.namespace not in ("aten", "prims"):
        return False
    return is_pure(op) and (op in CASTS or op in FILLED or is_pointwise(op))


def _is_of_rows(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a step works on the numbers of each row."""
    if kwargs or len(args) < 2:
        return False
    first, second, *rest = args
    if op is JOIN:
        return all(isinstance(value, Operand) for value in first) and [second, *rest] == [1]
    if op is REPEAT:
        return isinstance(first, Operand) and isinstance(second, Operand) and not rest
    dims = {SUM: [1], LARGEST: [1], COLUMN: 1, SLICE: 1}
    bounds = 2 if op is SLICE else 0
    return isinstance(first, Operand) and dims.get(op) == second and len(rest) == bounds


def encode(steps: Sequence[Step], results: Sequence[int | None]) -> str | None:
    """The text of a function; None if a step is no op of elements or of the numbers of each row, or
    has other arguments than values, numbers and dtypes.

    Args:
        results: the numbers of the values that are the gradients.
    """
    try:
        written = [encode_step(step, _may_be) for step in steps]
    except TypeError:
        return None
    return json.dumps({"steps": written, "results": [*results]})


def _may_be(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if _is_of_rows(op, args, kwargs):
        return True
    return is_of_elements(op) and not any(type(a) is list for a in (*args, *kwargs.values()))


@dataclass(frozen=True)
class RowFunction:
    """A function with the known tensors of the rows.

    Attributes:
        text: see the module.
        known: each [rows] or [rows, K], or one number as [1] or [].
    """

    text: str
    known: tuple[Tensor, ...]

    def keep(self, rows: Tensor) -> RowFunction:
        """The same for some of the rows, int64 [kept]."""
        return replace(self, known=tuple(_of_rows(tensor, rows) for tensor in self.known))

    def __call__(self, rows: slice, computed: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the results computed for some rows, each of its result's shape."""
        values = [*computed, *(_of_rows(tensor, rows) for tensor in self.known)]
        steps, results = _decoded(self.text)
        for step in steps:
            values.append(call(step, values))

        def gradient(number: int | None, result: Tensor) -> Tensor | None:
            # A result that nobody asked for is empty.
            shape = (result if len(result) == len(computed[-1]) else computed[-1]).shape
            return None if number is None else values[number].expand(shape)

        return list(map(gradient, results, computed))


def known_gradients(gradients: Sequence[Tensor | None], computed: int = 1) -> RowFunction:
    """A function whose gradients are known, each [rows] or one number.

    Args:
        computed: how many values the op computes of each row.
    """
    known = [gradient for gradient in gradients if gradient is not None]
    numbers = iter(range(computed, computed + len(known)))
    results = [None if gradient is None else next(numbers) for gradient in gradients]
    text = encode([], results)
    assert text is not None
    return RowFunction(text, tuple(known))


def _of_rows(tensor: Tensor, rows: Any) -> Tensor:
    return tensor if tensor.numel() == 1 else tensor[rows]


@lru_cache(maxsize=128)
def _decoded(text: str) -> tuple[list[Step], list[int | None]]:
    written = json.loads(text)
    steps = [decode(step, _may_be, "row_function") for step in written["steps"]]
    return steps, written["results"]
