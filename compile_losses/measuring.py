"""The time and the memory of a step."""

from __future__ import annotations

from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(function: Callable[[], object], device: torch.device) -> int:
    """The highest total, in bytes, of what ``function`` allocates on ``device`` and has not freed.

    On a CPU this follows torch's allocator through the profiler: the process's resident size would
    mix both runs, the compiler, and whatever malloc has kept.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.memory.reset_peak_memory_stats(device)
        before = torch.accelerator.memory.memory_allocated(device)
        function()
        torch.accelerator.synchronize(device)
        return torch.accelerator.memory.max_memory_allocated(device) - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        function()
    recorded = profiler.profiler
    assert recorded is not None
    assert recorded.kineto_results is not None
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
