"""TRL's fused head and ours in its place: ``python -m benchmarks.known_heads``.

Each line is a step of the head alone: log-probabilities, with or without TRL's other numbers of
each row, their weighted sum and its gradients, in milliseconds and MiB above the inputs. Ways:

- ``theirs``: TRL's function as it is;
- ``ours_eager``: the same call after ``enable()``, where nothing is compiled;
- ``ours_compiled``: the same call in a function that ``torch.compile`` compiles for us.

Of masked labels TRL's trainers leave the rows out before the call, on a GPU. So 60% masked are 40%
of the rows for all ways. The ways take turns in a random order, and each has a step of its own
first, since the clock of a GPU depends on what ran just before.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

import compile_losses
from compile_losses.programs.measuring import peak_memory, synchronize

ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OUTPUTS = {"log_probs": ("log_probs",), "all": ALL}
WAYS = ("theirs", "ours_eager", "ours_compiled")


@dataclass
class Row:
    """A way's time and memory, and both by those of TRL's."""

    shape: str
    dtype: str
    head: str
    masked: float
    outputs: str
    way: str
    milliseconds: float
    mebibytes: float
    time_ratio: float
    memory_ratio: float


def step_of(way: str, given: tuple[Tensor, Tensor, Tensor], outputs: tuple[str, ...]) -> Callable:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction as Head

    hidden, weight, target = given
    factors = torch.rand(len(hidden), device=hidden.device)

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        log_probs, *_ = Head.apply(hidden, weight, None, target, 1.0, 32768, None, 1.0, outputs)
        return (log_probs * factors).sum()

    if way == "ours_compiled":
        torch._dynamo.reset()
        loss = torch.compile(loss, backend="compile_losses", dynamic=False)

    def step() -> None:
        hidden.grad = weight.grad = None
        loss(hidden, weight, target).backward()

    return step


def met(way: str) -> AbstractContextManager[object]:
    """In which eager calls are met, if that is the way."""
    return compile_losses.enable() if way == "ours_eager" else nullcontext()


def measure(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    samples: int,
    *,
    frozen: bool,
    masked: float,
    outputs: str,
) -> list[Row]:
    rows, features, classes = shape
    rows = round(rows * (1 - masked))
    hidden = torch.randn(rows, features, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(classes, features, device=device) * features**-0.5).to(dtype)
    weight.requires_grad_(not frozen)
    given = (hidden, weight, torch.randint(classes, (rows,), device=device))
    steps = {way: step_of(way, given, OUTPUTS[outputs]) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(samples):
        for way in random.sample(WAYS, len(WAYS)):
            with met(way):
                for _ in range(2):
                    synchronize(device)
                    start = time.perf_counter()
                    steps[way]()
                    synchronize(device)
                    end = time.perf_counter()
            times[way].append((end - start) * 1e3)
    memory = dict[str, float]()
    for way, step in steps.items():
        with met(way):
            memory[way] = peak_memory(step, device) / 2**20
    base, least = statistics.median(times["theirs"]), memory["theirs"]
    head = "frozen" if frozen else "trained"
    name = f"{shape[0]}x{features}x{classes}"
    kind = str(dtype).removeprefix("torch.")
    found = []
    for way in WAYS:
        took = statistics.median(times[way])
        ratios = (took / base, memory[way] / least)
        found.append(Row(name, kind, head, masked, outputs, way, took, memory[way], *ratios))
    return found


def _shape(text: str) -> tuple[int, int, int]:
    rows, features, classes = map(int, text.split("x"))
    return rows, features, classes


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks.known_heads", description=__doc__)
    large = [(8192, 4096, 151936), (8192, 2048, 128256)]
    options.add_argument("--shape", type=_shape, nargs="+", default=large)
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--samples", type=int, default=10)
    options.add_argument("--output", type=Path, required=True)
    given = options.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # of the profiler that counts a CPU's memory
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    with given.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        cases = itertools.product(given.shape, (False, True), (0.0, 0.6), OUTPUTS)
        for shape, frozen, masked, outputs in cases:
            case = {"frozen": frozen, "masked": masked, "outputs": outputs}
            for row in measure(shape, dtype, device, given.samples, **case):
                writer.writerow(asdict(row))
                print(row, flush=True)
            file.flush()


if __name__ == "__main__":
    main()
