"""How the benchmarks hand out inputs, and how often they sample."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.cases import CASES, Case, Pass
from benchmarks.clock import (
    FEWEST_ROUNDS,
    MOST_ROUNDS,
    WARM_UP,
    Clock,
    NextCall,
    host_in_turns,
    range_of,
    time_in_turns,
)
from benchmarks.contenders import CONTENDERS, Contender, Step
from benchmarks.measure import make_problem, measure


class NoClock(Clock):
    calls = (1, 1)

    def sample(self, next_call: NextCall, lead_ms: float, untimed: int, timed: int) -> float:
        for _ in range(untimed + timed):
            next_call()()
        return 1.0

    def calls_of(self, sample_ms: float) -> tuple[int, int]:
        return self.calls


def test_no_contender_reads_what_another_has_just_read() -> None:
    read: dict[str, set[int]] = {}

    def recorded(name: str) -> Contender:
        eager = CONTENDERS["eager"]

        def build(case: Case, which: Pass) -> Step:
            step = eager.build(case, which)

            def record(*inputs: Tensor) -> tuple[Tensor, Tensor | None]:
                read.setdefault(name, set()).add(inputs[0].data_ptr())
                return step(*inputs)

            return record

        return replace(eager, name=name, build=build)

    clock = NoClock(torch.device("cpu"), cache_bytes=4096, buffer_numel=1)
    problem = make_problem(CASES["mse_loss"], ((8, 8), torch.float32), clock)
    names = ["first", "second", "third"]
    results = measure(problem, "fwd", map(recorded, names), clock, 0.0, lambda text: None)
    assert [result.ms for result in results] == [1.0, 1.0, 1.0]
    checked = {problem.input_sets[0][0].data_ptr()}  # by each, before anything is timed
    timed = [read[name] - checked for name in names]
    assert min(map(len, timed)) > 10
    assert len(set.union(*timed)) == sum(map(len, timed))


@pytest.mark.parametrize(
    ("budget_s", "warm_up_ms", "rounds"),
    [(0.0, 0.0, FEWEST_ROUNDS), (0.04, 0.0, 20), (1e3, 0.0, MOST_ROUNDS), (0.04, 60.0, 20)],
)
def test_rounds(budget_s: float, warm_up_ms: float, rounds: int) -> None:
    clock = NoClock(torch.device("cpu"), cache_bytes=1, buffer_numel=1)
    clock.warm_up_ms = warm_up_ms
    calls = Counter[str]()
    runs = [lambda name=name: partial(calls.update, [name]) for name in ("first", "second")]
    times = time_in_turns(runs, clock, budget_s)
    assert [len(samples) for samples in times] == [rounds] * 2
    # A sample, of a millisecond, is two calls, and so is the one that tells how long the step is.
    before = WARM_UP + 2 + 2 * int(warm_up_ms / 2)
    assert calls == dict.fromkeys(("first", "second"), before + 2 * rounds)


def test_samples_of_long_steps() -> None:
    """Several calls each, all of one step; the steps in changing order."""
    clock = NoClock(torch.device("cpu"), cache_bytes=1, buffer_numel=1)
    clock.calls = (2, 4)
    called: list[str] = []
    runs = [lambda name=name: partial(called.append, name) for name in ("first", "second")]
    times = time_in_turns(runs, clock, 0.12)
    assert [len(samples) for samples in times] == [20, 20]
    samples = called[2 * (WARM_UP + 2) :]
    turns = [tuple(samples[i : i + 12 : 6]) for i in range(0, len(samples), 12)]
    assert all(len(set(samples[i : i + 6])) == 1 for i in range(0, len(samples), 6))
    assert set(turns) == {("first", "second"), ("second", "first")}


def test_conditions() -> None:
    """Medians of what the device told after each sample, of one step or of all; or nothing."""
    clock = NoClock(torch.device("cpu"), cache_bytes=1, buffer_numel=1)
    runs = [lambda: lambda: None] * 2
    time_in_turns(runs, clock, 0.0)
    assert clock.conditions() == clock.conditions(1) == {"clock_mhz": "", "power_w": ""}
    told = iter((1000.0 + i, 100.0 + i) for i in range(2 * FEWEST_ROUNDS))
    clock.reading = lambda: next(told)  # type: ignore[method-assign]
    time_in_turns(runs, clock, 0.0)
    assert [len(readings) for readings in clock.readings] == [FEWEST_ROUNDS] * 2
    middle = FEWEST_ROUNDS - 0.5
    assert clock.conditions() == {
        "clock_mhz": f"{1000 + middle:.0f}",
        "power_w": f"{100 + middle:.0f}",
    }
    first, second = (float(clock.conditions(step)["clock_mhz"]) for step in (0, 1))
    assert {first, second} <= set(range(1000, 1000 + 2 * FEWEST_ROUNDS))


def test_host_in_turns() -> None:
    """After warm-up calls, in changing order; nothing where the host is the device."""
    clock = NoClock(torch.device("cpu"), cache_bytes=1, buffer_numel=1)
    called: list[str] = []
    runs = [lambda name=name: partial(called.append, name) for name in ("first", "second")]
    assert host_in_turns(runs, clock, 4) == [[], []]
    assert not called
    told = {"first": 1.0, "second": 2.0}

    def host_us(next_call: NextCall) -> float:
        next_call()()
        return told[called[-1]]

    clock.host_us = host_us  # type: ignore[method-assign]
    assert host_in_turns(runs, clock, 20) == [[1.0] * 20, [2.0] * 20]
    assert len(called) == 2 * (WARM_UP + 20)
    assert {called[i] for i in range(0, len(called), 2)} == {"first", "second"}


def test_range() -> None:
    stock = [1.0] * 20
    ours = [*(0.9 + i / 100 for i in range(18)), 0.1, 9.0]
    assert range_of(stock, ours) == "0.910-1.060"
