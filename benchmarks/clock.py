"""Times calls, and measures the bandwidth of the device's memory.

A sample is one call, right after an untimed call of the same step on other inputs. So a step pays
for writing back its own gradient from the cache, and not another contender's gradient. The cache
holds no inputs: neither of the call before nor, in measure.py, of another contender's call.

For a long step a sample is the mean of several calls after several untimed calls, since a GPU's
clock and power depend on the load in the milliseconds before: right after a lighter step, the same
step was up to 15% faster on an H100. Each turn draws a random order of the steps. If nvidia-ml-py
is installed, the clock and the power after each sample are kept.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch

Call = Callable[[], object]
NextCall = Callable[[], Call]
Reading = tuple[float, float]  # a device's clock in MHz, and its power in W
FEWEST_ROUNDS, MOST_ROUNDS, WARM_UP = 7, 200, 2
#: A step that takes so many milliseconds on a GPU is long. Its samples have so many untimed and
#: so many timed calls; samples of other steps, and all on a CPU, have 1 and 1. A step of so many
#: milliseconds decides by itself at which clock it ends: no call before it is needed.
LONG_MS = 2.0
LONG_CALLS = (2, 4)
LONGEST_MS = 500.0


class Clock(ABC):
    """Times calls on one device. A ``next_call`` prepares and returns the next call of a step.

    Attributes:
        warm_up_ms: the time of each step's first samples, which don't count.
        readings: for each step of the last ``time_in_turns``, one after each of its samples.
    """

    warm_up_ms = 0.0
    readings: Sequence[Sequence[Reading]] = ()

    def __init__(self, device: torch.device, cache_bytes: int, buffer_numel: int) -> None:
        self.device = device
        self.cache_bytes = cache_bytes
        self.buffer_numel = buffer_numel  # for the bandwidth measurement, in float32

    @abstractmethod
    def sample(self, next_call: NextCall, lead_ms: float, untimed: int, timed: int) -> float:
        """Milliseconds of a call, the mean of ``timed``, after ``untimed`` calls."""

    def calls_of(self, sample_ms: float) -> tuple[int, int]:
        """The numbers of untimed and timed calls in a sample of a step that takes so long."""
        return 1, 1

    def lead_ms(self, next_call: NextCall) -> float:
        """How long to keep the device busy before a sample of this step."""
        return 0.0

    def next_lead_ms(self, lead_ms: float, sample_ms: float) -> float:
        """The same after a sample: longer if the host was late with a short step."""
        return lead_ms

    def peak_mib(self, call: Call) -> float | None:
        """The peak memory during ``call`` above the memory in use before, in MiB."""
        return None

    def host_us(self, next_call: NextCall) -> float | None:
        """Microseconds until a call of a device that has nothing to do returns; None on a CPU."""
        return None

    def reading(self) -> Reading | None:
        """The device's clock and power now; None if unknown."""
        return None

    def conditions(self, *steps: int) -> dict[str, str]:
        """The median clock and power of the last ``time_in_turns``, as columns of a CSV file.

        Args:
            steps: their indices; all of them if none is named.
        """
        chosen = [self.readings[step] for step in steps] if steps else self.readings
        readings = [reading for each in chosen for reading in each]
        if not readings:
            return {"clock_mhz": "", "power_w": ""}
        clock, power = (statistics.median(column) for column in zip(*readings, strict=True))
        return {"clock_mhz": f"{clock:.0f}", "power_w": f"{power:.0f}"}


def _map_large_buffers_anew() -> None:
    """Makes glibc give every buffer of a MiB or more new pages.

    By default glibc takes some buffers from freed memory, without page faults. Chance decides which
    of two steps gets them for as long as the process lives, and that may halve a step's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_mmap_threshold = -3
        mallopt(m_mmap_threshold, 1 << 20)


class CpuClock(Clock):
    """Wall-clock time of the calling thread."""

    # A virtual machine's host may have to supply memory first. Then, for some 50 calls, page faults
    # are several times as slow, most of all the faults of huge pages.
    warm_up_ms = 1e3

    def __init__(self, device: torch.device) -> None:
        _map_large_buffers_anew()
        try:
            cache = os.sysconf("SC_LEVEL3_CACHE_SIZE")
        except (ValueError, OSError):
            cache = 0
        super().__init__(device, cache or 64 << 20, 1 << 26)

    def sample(self, next_call: NextCall, lead_ms: float, untimed: int, timed: int) -> float:
        for _ in range(untimed):
            next_call()()
        elapsed = 0.0
        for _ in range(timed):
            call = next_call()
            start = time.perf_counter()
            result = call()
            elapsed += time.perf_counter() - start
            del result  # freeing the result is not part of the step
        return elapsed * 1e3 / timed


class CudaClock(Clock):
    """Device time between two events.

    The stream is kept busy before. So the host has issued the whole step when its first kernel
    starts, and the figure contains no launch latency.
    """

    LONGEST_LEAD_MS = 4.0

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, torch.cuda.get_device_properties(device).L2_cache_size, 1 << 30)
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.late = False  # whether the last timed call started before it was fully issued
        spin = 20_000_000
        self.cycles_per_ms = spin / min(
            self._milliseconds(lambda: torch.cuda._sleep(spin)) for _ in range(3)
        )

    def _milliseconds(self, call: Call) -> float:
        self.start.record()
        call()
        self.late = self.start.query()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end)

    def lead_ms(self, next_call: NextCall) -> float:
        host_ms = min(self.host_us(next_call) for _ in range(3)) / 1e3
        torch.cuda.synchronize()
        return min(3 * host_ms + 0.1, self.LONGEST_LEAD_MS)  # two calls, more of a long step

    def host_us(self, next_call: NextCall) -> float:
        call = next_call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def sample(self, next_call: NextCall, lead_ms: float, untimed: int, timed: int) -> float:
        torch.cuda._sleep(int(lead_ms * self.cycles_per_ms))
        for _ in range(untimed):
            next_call()()
        if timed == 1:
            return self._milliseconds(next_call())

        def calls() -> None:
            for _ in range(timed):
                next_call()()

        return self._milliseconds(calls) / timed

    def calls_of(self, sample_ms: float) -> tuple[int, int]:
        if sample_ms >= LONGEST_MS:
            return 0, 1
        return LONG_CALLS if sample_ms >= LONG_MS else (1, 1)

    def reading(self) -> Reading | None:
        """From nvidia-ml-py, if it is installed."""
        try:
            return float(torch.cuda.clock_rate()), torch.cuda.power_draw() / 1e3
        except (ImportError, RuntimeError):
            return None

    def next_lead_ms(self, lead_ms: float, sample_ms: float) -> float:
        short = sample_ms < lead_ms  # in a longer step other kernels hide a late host
        return min(2 * lead_ms, self.LONGEST_LEAD_MS) if self.late and short else lead_ms

    def peak_mib(self, call: Call) -> float | None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / (1 << 20)


def make_clock(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock(device)


class Sampler:
    """Times one step again and again, with the lead that earlier samples needed.

    Args:
        slowest: as for :func:`time_in_turns`.
    """

    def __init__(
        self,
        next_call: NextCall,
        clock: Clock,
        slowest: Callable[[float], float] = lambda value: value,
    ) -> None:
        self.next_call, self.clock, self.slowest = next_call, clock, slowest
        self.lead_ms = slowest(clock.lead_ms(next_call))
        self.calls = clock.calls_of(slowest(clock.sample(next_call, self.lead_ms, 1, 1)))

    def sample(self) -> float:
        """Milliseconds of one call."""
        elapsed = self.slowest(self.clock.sample(self.next_call, self.lead_ms, *self.calls))
        self.lead_ms = self.slowest(self.clock.next_lead_ms(self.lead_ms, elapsed))
        return elapsed


def time_in_turns(
    runs: Sequence[NextCall],
    clock: Clock,
    budget_s: float,
    slowest: Callable[[float], float] = lambda value: value,
) -> list[list[float]]:
    """Milliseconds of each run, one sample a turn, so that changes of the device affect all runs.

    Args:
        budget_s: about how long to sample each run; short runs at most ``MOST_ROUNDS`` times.
        slowest: returns the largest of several ranks' values to all ranks, so that all make the
            same number of rounds.
    """
    samplers = []
    for run in runs:
        for _ in range(WARM_UP):
            run()()
        samplers.append(Sampler(run, clock, slowest))
    times: list[list[float]] = [[] for _ in runs]
    clock.readings = readings = [list[Reading]() for _ in runs]
    spent = -clock.warm_up_ms * len(runs)
    order = list(range(len(runs)))
    random = Random(0)  # every rank draws the same order
    budget_ms = budget_s * 1e3 * len(runs)
    while runs and len(times[0]) < MOST_ROUNDS:
        if spent >= budget_ms and len(times[0]) >= FEWEST_ROUNDS:
            break
        counts = spent >= 0
        random.shuffle(order)
        for index in order:
            sample = samplers[index].sample()
            if counts:
                times[index].append(sample)
                reading = clock.reading()
                readings[index] += [reading] if reading else []
            spent += sum(samplers[index].calls) * sample
    return times


def host_in_turns(runs: Sequence[NextCall], clock: Clock, rounds: int) -> list[list[float]]:
    """Microseconds of the host for each run's call, one a turn, after warm-up calls.

    Returns:
        A list for each run, empty where the host is the device.
    """
    random, order = Random(0), list(range(len(runs)))
    found: list[list[float]] = [[] for _ in runs]
    for turn in range(WARM_UP + rounds):
        random.shuffle(order)
        for index in order:
            sample = clock.host_us(runs[index])
            if sample is not None and turn >= WARM_UP:
                found[index].append(sample)
    return found


def ratio_of(stock: list[float], ours: list[float]) -> float:
    """The median of ours over stock's of the same turn; other load affects both."""
    return statistics.median(b / a for a, b in zip(stock, ours, strict=True))


def range_of(stock: list[float], ours: list[float]) -> str:
    """The least and the largest of the same ratios, without a tenth of them at either end."""
    ratios = sorted(b / a for a, b in zip(stock, ours, strict=True))
    cut = len(ratios) // 10
    return f"{ratios[cut]:.3f}-{ratios[-1 - cut]:.3f}"


def cpu_peak_mib(call: Call) -> float:
    """The peak memory of torch's CPU allocator during a call, above the memory held before.

    The profiler keeps the allocator's records of every allocation and release. Buffers of Inductor
    and of the kernels come from this allocator.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    allocations: list[tuple[int, int]] = []
    work = list(results.experimental_event_tree())
    while work:
        event = work.pop()
        work += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            allocations.append((event.start_time_ns, event.extra_fields.alloc_size))
    held = itertools.accumulate(size for _, size in sorted(allocations, key=lambda pair: pair[0]))
    return max(held, default=0) / (1 << 20)


def peak_mib(run: NextCall, clock: Clock) -> float:
    """The peak memory during a call above the memory in use before, on any device, in MiB."""
    call = run()
    measured = clock.peak_mib(call)
    return cpu_peak_mib(call) if measured is None else measured


@dataclass(frozen=True)
class Bandwidth:
    """The memory's bandwidth in TB/s: a pure read, and a copy, with bytes read and written.

    A floor is a case's bytes over ``read`` if nothing is written, and over ``copy`` otherwise.
    """

    read: float
    copy: float

    def floor_ms(self, moved: int, *, writes: bool) -> float:
        return moved / (self.copy if writes else self.read) / 1e9


def measure_bandwidth(clock: Clock) -> Bandwidth:
    """The best of torch's reductions and its copy, over buffers far larger than the cache."""
    source = torch.randn(clock.buffer_numel, device=clock.device)
    target = torch.randn_like(source)

    def milliseconds(call: Call) -> float:
        call()
        sampler = Sampler(lambda: call, clock)
        return min(sampler.sample() for _ in range(20))

    compiled = torch.compile(torch.sum)
    reads: tuple[Call, ...] = (source.sum, source.amax, lambda: compiled(source))
    read = min(milliseconds(call) for call in reads)
    copy = milliseconds(lambda: target.copy_(source))
    return Bandwidth(source.nbytes / read / 1e9, 2 * source.nbytes / copy / 1e9)
