"""A program of the corpus: a small function and what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Program:
    """A step that computes losses.

    Attributes:
        name: the module of the corpus and the program's own name.
        function: of tensors.
        make: makes what the function is called with, from torch's random numbers.
        around: what is around that and all that is made of the program.
    """

    name: str
    function: Callable[..., Any]
    make: Callable[[], Iterable[Any]]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def programs(
    module: str,
    functions: Mapping[str, Any] | Iterable[Callable[..., Any]],
    make: Callable[[], Iterable[Any]],
) -> list[Program]:
    """Programs of the same inputs.

    Args:
        module: the last part of ``__name__``.
        functions: with names, or with the names that they have. Of a tuple the first is meant.
    """
    if not isinstance(functions, Mapping):
        functions = {function.__name__: function for function in functions}
    module = module.rpartition(".")[2]
    first = {n: f[0] if isinstance(f, tuple) else f for n, f in functions.items()}
    return [Program(f"{module}: {name}", function, make) for name, function in first.items()]
