"""Cells of a benchmark of compiled code: several processes compile, and one at a time measures."""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch

from benchmarks.clock import make_clock
from benchmarks.contenders import failure

Cell = TypeVar("Cell", bound=Hashable)
Figures = dict[str, Any]  # as a kind of worker makes them


class Worker(ABC, Generic[Cell]):
    """Compiles and measures cells in one process. One process at a time is ``alone``."""

    def __init__(
        self, arguments: argparse.Namespace, alone: AbstractContextManager[object]
    ) -> None:
        self.arguments, self.alone = arguments, alone
        with alone:
            self.clock = make_clock(torch.device(arguments.device))

    @abstractmethod
    def compile(self, cell: Cell) -> object:
        """Compiles the functions of a cell, into the compiler's caches."""

    @abstractmethod
    def measure(self, cell: Cell) -> Figures:
        """A cell's figures, by the columns of the CSV file; the clock runs within ``alone``."""

    @abstractmethod
    def failed(self, reason: str) -> Figures:
        """The figures of a cell that raised an error."""


_this: Worker[Any]


def _start(kind: type[Worker[Any]], arguments: argparse.Namespace, alone: Any) -> None:
    global _this
    _this = kind(arguments, alone)


def _compile(cell: Any) -> None:
    with contextlib.suppress(Exception):  # reported when it is measured
        _this.compile(cell)
    leave_memory()


def _measure(cell: Any) -> Figures:
    try:
        return _this.measure(cell)
    except Exception as error:  # the other cells are still measured
        return _this.failed(failure(error))
    finally:
        leave_memory()


def leave_memory() -> None:
    """Frees memory for the other processes, of which the next one measures."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def all_figures(
    kind: type[Worker[Cell]], arguments: argparse.Namespace, cells: Sequence[Cell]
) -> Iterator[Iterable[tuple[Cell, Figures]]]:
    """The cells, and the figures of each as soon as it and those before it are measured.

    With ``arguments.jobs`` above 1, so many processes first compile all cells. Then they compile
    each again from the compiler's caches, and one process at a time measures.
    """
    if arguments.jobs == 1:
        _start(kind, arguments, contextlib.nullcontext())
        yield zip(cells, map(_measure, cells), strict=True)
        return
    spawn = multiprocessing.get_context("spawn")
    alone = spawn.Lock()
    with ProcessPoolExecutor(arguments.jobs, spawn, _start, (kind, arguments, alone)) as pool:
        list(pool.map(_compile, cells))
        yield zip(cells, pool.map(_measure, cells), strict=True)
