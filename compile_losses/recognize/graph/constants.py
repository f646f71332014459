"""Numbers that a graph holds as tensors: ``beta = torch.tensor(0.1)``, ``torch.log1p(-beta)``.

They are computed in float64 from the numbers in the source. Torch rounds them to their dtype. If
the tensor that they are combined with is not wider, that is rounding like any other: two weights
that are meant to add up to 1 do add up to 1 here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from compile_losses.recognize.graph.aten_replay import AtenReplay, aten
from compile_losses.recognize.graph.symbolic_tensors import Value, example
from compile_losses.torch_internals.ops import packet_of

_FUNCTIONS: dict[Any, Callable[..., float]] = {
    aten.neg: lambda x: -x,
    aten.add: lambda x, y: x + y,
    aten.sub: lambda x, y: x - y,
    aten.rsub: lambda x, y: y - x,
    aten.mul: lambda x, y: x * y,
    aten.div: lambda x, y: x / y,
    aten.reciprocal: lambda x: 1 / x,
    aten.log: math.log,
    aten.log1p: math.log1p,
    aten.exp: math.exp,
}
_SOURCES = (torch.tensor, torch.as_tensor, torch.scalar_tensor)


def constant(argument: Any, dtype: torch.dtype, replay: AtenReplay) -> float | None:
    """The number of an argument, also of a tensor without dimensions that certainly holds one; None
    if it is not known.

    Args:
        dtype: of the tensor that it is combined with.
    """
    if isinstance(argument, int | float):
        return None if isinstance(argument, bool) else float(argument)
    if not isinstance(argument, Value):
        return None
    fake = argument.fake
    if fake.dim() > 0 or not fake.is_floating_point() or not dtype.is_floating_point:
        return None
    if torch.finfo(fake.dtype).eps > torch.finfo(dtype).eps:
        return None
    value = replay.resolve(argument)
    if value.op is None:
        return _source(value)
    packet = packet_of(value.op)
    if packet is aten._to_copy:
        return constant(value.args[0], dtype, replay)
    if packet not in _FUNCTIONS or value.kwargs:
        return None
    numbers = [constant(inner, dtype, replay) for inner in value.args]
    if None in numbers:
        return None
    try:
        result = _FUNCTIONS[packet](*numbers)
    except (ArithmeticError, ValueError, TypeError):  # out of range, or with further options
        return None
    return result if math.isfinite(result) else None


def _source(value: Value) -> float | None:
    """The number that a tensor is made of. A tensor with gradients is a parameter, whose number is
    None, as one that is not known."""
    node = value.node
    if node.op != "call_function" or node.target not in _SOURCES or len(node.args) != 1:
        return None
    number = node.args[0]
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    if getattr(example(node), "requires_grad", True) or not math.isfinite(number):
        return None
    return float(number)
