"""The time and the memory of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class PeakMemory:
    """The highest total of what is allocated on a device and not freed, from ``start`` to ``stop``.

    On a CPU this follows torch's allocator through the profiler: the process's resident size would
    mix both runs, the compiler, and whatever malloc has kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = 0
        self._profiler: torch.profiler.profile | None = None

    def start(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
            torch.accelerator.memory.reset_peak_memory_stats(self.device)
            self._before = torch.accelerator.memory.memory_allocated(self.device)
            return
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        self._profiler.__enter__()

    def stop(self) -> int:
        """In bytes, beyond what was allocated at the start."""
        if self._profiler is None:
            torch.accelerator.synchronize(self.device)
            return torch.accelerator.memory.max_memory_allocated(self.device) - self._before
        self._profiler.__exit__(None, None, None)
        recorded = self._profiler.profiler
        assert recorded is not None
        assert recorded.kineto_results is not None
        found: list[Any] = recorded.kineto_results.events()
        events = [event for event in found if event.name() == "[memory]"]
        held = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        return peak


def peak_memory(function: Callable[[], object], device: torch.device) -> int:
    """The peak of ``function``, in bytes beyond what was allocated before."""
    peak = PeakMemory(device)
    peak.start()
    function()
    return peak.stop()
