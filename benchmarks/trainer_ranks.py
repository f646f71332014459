"""One rank of a benchmark of trainers, which :mod:`benchmarks.trainers` starts.

Each contender trains for some steps, whose losses are compared with stock's. Then all are timed in
turns, in a random order each turn: a sample is the mean of two steps after an untimed one, of the
slowest rank. After each part rank 0 writes down what is known, so that a contender that never ends
costs no more than its own figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import compile_losses
from benchmarks import data_parallel, titan
from benchmarks.clock import make_clock, range_of, ratio_of
from benchmarks.contenders import reason_of, version_of

#: What trains: a module with WAYS, CONTENDERS, LIBRARY, Size and Run.
TRAINERS: dict[str, ModuleType] = {"torchtitan": titan, "transformers": data_parallel}
UNTIMED, TIMED = 1, 2
STOCK = "stock"


class Group:
    """All ranks, which agree through gloo whatever else their device waits for."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rank, self.count = arguments.rank, arguments.ranks
        self.device = torch.device(arguments.device)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        values = (self.rank, self.rank, self.count, self.count)
        os.environ.update({name: str(value) for name, value in zip(names, values, strict=True)})
        backend = "gloo"
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self.rank)
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            init_method=f"file://{arguments.store}",
            rank=self.rank,
            world_size=self.count,
            timeout=timedelta(seconds=arguments.timeout),
        )

    def gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def agreed(self, reason: str) -> str:
        """The objections of all ranks; empty if there are none."""
        reasons = self.gathered(reason)
        if len(set(reasons)) == 1:
            return reasons[0]
        return "; ".join(f"rank {i}: {text}" for i, text in enumerate(reasons) if text)

    def largest(self, value: float) -> float:
        return max(self.gathered(value))

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def held(self) -> int:
        """Bytes of tensors on this rank's device; 0 on a CPU, where they are not counted."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0


def ops_found() -> str:
    """What became of the losses of the graphs that were compiled since the counters were empty."""
    found = compile_losses.counters()
    words = [f"{op} x{count}" for op, count in found["rewritten"].items()]
    words += [f"declined {op} x{count}" for op, count in found["declined"].items()]
    return ", ".join(words)


def objections_of(figures: Path, rank: int) -> Path:
    """Where a rank says what failed on it, for as long as the others have not heard: those that did
    not fail may wait for it in a collective."""
    return figures.with_suffix(f".{rank}")


class Measurement:
    """The contenders of one way, their figures so far, and where they are written.

    Attributes:
        figures: the columns of each contender.
        doing: what a rank that never ends was doing.
    """

    def __init__(self, arguments: argparse.Namespace, group: Group) -> None:
        self.group, self.path = group, Path(arguments.figures)
        self.objections = objections_of(self.path, group.rank)
        self.trainer = TRAINERS[arguments.trainer]
        way = self.trainer.WAYS[arguments.way]
        self.way, self.budget_s = arguments.way, arguments.budget
        self.size = self.trainer.Size(**{**way.size, **json.loads(arguments.size)})
        self.names = list(arguments.contender or way.contenders)
        self.steps = arguments.curve
        self.figures: dict[str, dict[str, str]] = {name: {} for name in self.names}
        self.curves: dict[str, list[float]] = {}
        self.runs: dict[str, Any] = {}
        self.random = Random(0)  # every rank draws the same order

    def save(self, doing: str) -> None:
        if self.group.rank == 0:
            text = json.dumps({"doing": doing, "figures": self.figures, "size": str(self.size)})
            self.path.with_suffix(".part").write_text(text)
            self.path.with_suffix(".part").replace(self.path)

    def train(self) -> None:
        """Builds each contender and trains it for the steps whose losses are compared."""
        order = list(self.names)
        self.random.shuffle(order)
        for name in order:
            self.save(f"training {name}")
            compile_losses.counters().clear()
            before, run, curve, reason = self.group.held(), None, [], ""
            try:
                run = self.trainer.Run(self.way, name, self.size, self.group.device)
                curve = [run.step(record=True) for _ in range(self.steps)]
                run.clear()
                self.group.wait()
            except Exception as error:  # whatever it is, the others are still measured
                reason = reason_of(error)
                self.objections.write_text(json.dumps({name: reason}))
            # A pipeline's last rank alone knows its loss, and has a loss to rewrite.
            last = self.group.gathered((curve, ops_found()))[-1]
            own = self.figures[name]
            own["reason"] = self.group.agreed(reason)
            self.objections.unlink(missing_ok=True)
            own["ops"] = last[1]
            if own["reason"]:
                del run
                gc.collect()
                continue
            self.runs[name], self.curves[name] = run, last[0]
            state = self.group.largest((self.group.held() - before) / 2**20)
            own["state_mib"] = f"{state:.0f}" if state else ""
            own["curve_steps"] = str(self.steps)
            own["first_loss"], own["last_loss"] = f"{last[0][0]:.6g}", f"{last[0][-1]:.6g}"
            gc.collect()
        for name, curve in self.curves.items():
            if name != STOCK and STOCK in self.curves:
                pairs = zip(curve, self.curves[STOCK], strict=True)
                worst = max(abs(a - b) / abs(b) for a, b in pairs)
                self.figures[name]["curve_difference"] = f"{worst:.2g}"

    def sample(self, name: str) -> float:
        """Milliseconds of a step, of the slowest rank."""
        run = self.runs[name]
        for _ in range(UNTIMED):
            run.step()
        self.group.wait()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(TIMED):
            run.step()
        self.group.wait()
        elapsed = time.perf_counter() - start
        run.clear()
        return self.group.largest(elapsed * 1e3 / TIMED)

    def time(self) -> None:
        """Samples of the contenders in turns, as many as the budget allows; and peak memory."""
        clock = make_clock(self.group.device)
        order, ready = list(self.runs), list(self.runs)
        samples: dict[str, list[float]] = {name: [] for name in ready}
        readings: dict[str, list[Any]] = {name: [] for name in ready}
        for name in ready:
            self.save(f"measuring the memory of {name}")
            self.figures[name]["peak_mib"] = self.peak(name)
        spent_ms = 0.0
        while ready and (len(samples[ready[0]]) < 3 or spent_ms < self.budget_s * 1e3 * len(ready)):
            self.random.shuffle(order)
            for name in order:
                self.save(f"timing {name}")
                sample = self.sample(name)
                samples[name].append(sample)
                spent_ms += sample * (UNTIMED + TIMED)
                reading = clock.reading()
                readings[name] += [reading] if reading else []
            self.note(samples)
        clock.readings = [readings[name] for name in ready]
        for index, name in enumerate(ready):
            self.figures[name] |= clock.conditions(index)

    def note(self, samples: Mapping[str, list[float]]) -> None:
        for name, own in samples.items():
            ms = statistics.median(own)
            rate = self.runs[name].tokens / ms * 1e3 / self.group.count
            self.figures[name] |= {"ms": f"{ms:.4g}", "tokens_per_s": f"{rate:.0f}"}
            if name != STOCK and STOCK in samples:
                self.figures[name]["ratio"] = f"{ratio_of(samples[STOCK], own):.3f}"
                self.figures[name]["range"] = range_of(samples[STOCK], own)

    def peak(self, name: str) -> str:
        """The peak memory of a step above weights and the optimizer's state, the largest rank's."""
        before = self.group.held()
        if self.group.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.runs[name].step()
        self.group.wait()
        peak = torch.cuda.max_memory_allocated() if self.group.device.type == "cuda" else 0
        self.runs[name].clear()
        return f"{self.group.largest((peak - before) / 2**20):.0f}" if peak else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("trainer", "way", "device", "store", "figures", "size"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("rank", "ranks", "curve"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("timeout", "budget"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--contender", nargs="*")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    # The blocks of all contenders share their code.
    torch._dynamo.config.recompile_limit = 64
    group = Group(arguments)
    measurement = Measurement(arguments, group)
    measurement.train()
    measurement.time()
    packages = {STOCK: "torch"}
    for name, figures in measurement.figures.items():
        package = packages.get(name, "compile_losses" if name.startswith("ours") else "torch")
        figures["contender_version"] = version_of(package)
    measurement.save("")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
