"""A rank of the benchmark of trainers, with a trainer that breaks in every way beside the others.

Run by tests/distributed/test_trainer_benchmark.py, in place of ``benchmarks.trainer_ranks``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import trainer_ranks, trainers
from benchmarks.contenders import UnavailableError
from tests.constants import set_constants
from tests.graphs import interpreted


@dataclass(frozen=True)
class Size:
    rows: int = 8
    classes: int = 5

    def __str__(self) -> str:
        return f"{self.rows}x{self.classes}"


@dataclass(frozen=True)
class Way:
    contenders: tuple[str, ...]
    size: dict[str, int] = field(default_factory=dict)
    dtype: str = "float32"


class Run:
    """Trains logits; each rank has rows of its own, and the losses are those of all ranks."""

    def __init__(self, way: str, name: str, size: Size, device: torch.device) -> None:
        if name == "absent":
            raise UnavailableError("it is not installed")
        if name == "raises" or (name == "raises_on_one" and dist.get_rank() == 1):
            raise ValueError("it fails here")
        backend = "compile_losses" if name.startswith("ours") else "eager"
        self.loss = torch.compile(F.cross_entropy, backend=backend)
        self.tokens, self.name = size.rows * dist.get_world_size(), name
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.logits = torch.randn(size.rows, size.classes, generator=generator).requires_grad_()
        self.target = torch.randint(size.classes, (size.rows,), generator=generator)

    def step(self, *, record: bool = False) -> float | None:
        if self.name == "ends" and dist.get_rank() == 1:
            os._exit(3)
        loss = self.loss(self.logits, self.target)
        loss.backward()
        with torch.no_grad():
            self.logits -= self.logits.grad
        self.clear()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item() if record else None

    def clear(self) -> None:
        self.logits.grad = None


WAYS = {
    "whole": Way(("stock", "ours", "raises", "absent"), {"rows": 12}),
    "alone": Way(("raises_on_one",)),
    "ended": Way(("ends",)),
}
BROKEN: Any = SimpleNamespace(WAYS=WAYS, LIBRARY="torch", Size=Size, Run=Run)
trainer_ranks.TRAINERS["broken"] = BROKEN


def main() -> int:
    """What a rank runs; or, with ``trainers`` as the first argument, the whole benchmark."""
    if sys.argv[1:2] == ["trainers"]:
        from benchmarks.__main__ import main as of_all

        trainers.RANK = "tests.distributed.trainer_runs"
        trainers.PATIENCE_S = 1.0
        return of_all()
    # Compiling by Inductor on a CPU takes minutes for a Llama.
    with pytest.MonkeyPatch.context() as patch, interpreted(patch):
        set_constants(patch, least_rows=1, least_elements=1, logits_bytes=1, part_of_weight=0)
        return trainer_ranks.main()


if __name__ == "__main__":
    raise SystemExit(main())
