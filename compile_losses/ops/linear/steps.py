"""Calls of ATen ops as a text, JSON: what an op takes that is to compute a function.

A step is ``["aten.mul.Tensor", [{"value": 2}, {"value": 0}], {}]``: an op's name, its arguments and
its keyword arguments. An argument is a number, a text, None, a list of arguments, a dtype as
``{"dtype": "float32"}``, or a value of the function by its number. Each step makes one more value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compile_losses.torch_internals.ops import OpOverload


@dataclass(frozen=True)
class Operand:
    """A value of a function by its number."""

    number: int


Step: TypeAlias = tuple[OpOverload[..., Any], Sequence[Any], dict[str, Any]]
#: Says of an op, its arguments and its keyword arguments whether they may be a step.
MayBe: TypeAlias = Callable[[Any, Sequence[Any], dict[str, Any]], bool]


def encode(step: Step, may_be: MayBe) -> Any:
    """A step for JSON.

    Raises:
        TypeError: it may be none, or has an argument that has no text.
    """
    op, args, kwargs = step
    if not may_be(*step):
        raise TypeError(f"{op} is no step")
    named = {name: _encoded(argument) for name, argument in kwargs.items()}
    return [str(op), [_encoded(argument) for argument in args], named]


def _encoded(argument: Any) -> Any:
    if type(argument) is list:
        return [_encoded(each) for each in argument]
    if isinstance(argument, Operand):
        return {"value": argument.number}
    if isinstance(argument, torch.dtype):
        return {"dtype": name_of(argument)}
    # By type: a symbol is an int to isinstance, and json would ask for its value.
    if argument is None or type(argument) in (bool, int, float, str):
        return argument
    raise TypeError(f"{type(argument).__name__} has no text")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decode(written: Any, may_be: MayBe, what: str) -> Step:
    """A step of a text.

    Args:
        what: the text's name, for the error.

    Raises:
        ValueError: it may be none.
    """
    name, args, kwargs = written
    namespace, packet, overload = name.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    step = op, [_decoded(a) for a in args], {key: _decoded(a) for key, a in kwargs.items()}
    if not may_be(*step):
        raise ValueError(f"{what} has {name}, which is no step of it")
    return step


def _decoded(argument: Any) -> Any:
    if isinstance(argument, list):
        return [_decoded(each) for each in argument]
    if not isinstance(argument, dict):
        return argument
    if "value" in argument:
        return Operand(argument["value"])
    return getattr(torch, argument["dtype"])


def call(step: Step, values: Sequence[Tensor]) -> Tensor:
    """The value that a step makes of the values before it."""
    op, args, kwargs = step
    values_of = [given(argument, values) for argument in args]
    made: Tensor = op(*values_of, **{name: given(a, values) for name, a in kwargs.items()})
    return made


def given(argument: Any, values: Sequence[Any]) -> Any:
    """An argument of a step, with values, or the nodes that hold them, in the operands' place."""
    if isinstance(argument, list):
        return [given(each, values) for each in argument]
    return values[argument.number] if isinstance(argument, Operand) else argument
