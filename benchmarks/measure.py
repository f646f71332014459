"""All contenders of one problem: each is checked, then all are timed in turns."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks import accuracy
from benchmarks.cases import Case, Pass, Size, bytes_moved
from benchmarks.clock import Clock, NextCall, time_in_turns
from benchmarks.contenders import CONTENDERS, Contender, Step, UnavailableError, failure

MOST_INPUT_SETS = 4096


@dataclass(frozen=True)
class Problem:
    """A case at one size, with its inputs and reference.

    ``input_sets`` are several copies of the inputs, if one copy would stay in the cache.
    """

    case: Case
    shape: tuple[int, int]
    dtype: torch.dtype
    input_sets: list[tuple[Tensor, ...]]
    reference: accuracy.Reference

    def moved(self, which: Pass) -> int:
        return bytes_moved(self.input_sets[0], which)

    def __str__(self) -> str:
        rows, cols = self.shape
        return f"{self.case.name} {rows}x{cols} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Measurement:
    """One contender's figures, or the reason why it has none."""

    contender: Contender
    ms: float | None
    peak_mib: float | None = None
    reason: str = ""
    not_run: bool = False  # not for this device or loss, or not installed

    @property
    def broken(self) -> bool:
        return self.ms is None and not self.not_run


def make_problem(case: Case, size: Size, clock: Clock) -> Problem:
    shape, dtype = size
    torch.manual_seed(0)
    inputs = case.make_inputs(shape, dtype, clock.device)
    nbytes = sum(tensor.nbytes for tensor in inputs)
    sets = min(MOST_INPUT_SETS, -(-32 * clock.cache_bytes // nbytes))
    copies = [tuple(tensor.clone() for tensor in inputs) for _ in range(sets - 1)]
    return Problem(case, shape, dtype, [inputs, *copies], accuracy.reference(case, inputs))


def measure(
    problem: Problem,
    which: Pass,
    contenders: Iterable[Contender],
    clock: Clock,
    budget_s: float,
    report: Callable[[str], None],
) -> list[Measurement]:
    """Figures of the contenders, in their order.

    Args:
        budget_s: about how long to sample, for each contender.
        report: is called with the current activity.
    """
    torch._dynamo.reset()
    contenders = list(contenders)
    eager_errors = _eager_errors(problem, which)
    ready: dict[Contender, NextCall] = {}
    results: dict[str, Measurement] = {}
    for position, contender in enumerate(contenders):
        report(f"{problem} {which}: checking {contender.name}")
        reason: str | None
        not_run = False
        try:
            step = contender.build(problem.case, which)
            result = step(*_prepare(problem.input_sets[0], which, contender))
            first = problem.input_sets[0][0]
            reason = accuracy.complaint(result, which, first, problem.reference, eager_errors)
            del result
        except (ImportError, UnavailableError) as error:
            reason, not_run = str(error), True
        except Exception as error:  # whatever it is, the others are still measured
            reason = failure(error)
        results[contender.name] = Measurement(contender, None, None, reason or "", not_run)
        if reason is None:
            sets = [_prepare(inputs, which, contender) for inputs in problem.input_sets]
            # Each begins with other inputs, since the cache holds the ones read just before.
            begin = position * len(sets) // len(contenders)
            ready[contender] = _in_turn(step, sets[begin:] + sets[:begin])
    report(f"{problem} {which}: timing {len(ready)} contenders")
    times = time_in_turns(list(ready.values()), clock, budget_s)
    for (contender, next_call), samples in zip(ready.items(), times, strict=True):
        peak = clock.peak_mib(next_call())
        results[contender.name] = Measurement(contender, statistics.median(samples), peak)
    return list(results.values())


def _in_turn(step: Step, sets: list[tuple[Tensor, ...]]) -> NextCall:
    """The step on one set of inputs after the other."""
    cycle = itertools.cycle(sets)
    return lambda: partial(step, *next(cycle))


def _prepare(inputs: tuple[Tensor, ...], which: Pass, contender: Contender) -> tuple[Tensor, ...]:
    """Inputs as a step takes them: aliases, or a copy if the step overwrites one."""
    first, *rest = inputs
    backward = which == "fwd_bwd"
    first = first.clone() if contender.overwrites_input and backward else first.detach()
    return (first.requires_grad_(backward), *rest)


def _eager_errors(problem: Problem, which: Pass) -> accuracy.Errors:
    eager = CONTENDERS["eager"]
    step = eager.build(problem.case, which)
    result = step(*_prepare(problem.input_sets[0], which, eager))
    return accuracy.errors(result, problem.reference)
