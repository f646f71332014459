"""How the benchmarks hand out inputs."""

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.cases import CASES, Case, Pass
from benchmarks.clock import Clock, NextCall
from benchmarks.contenders import CONTENDERS, Contender, Step
from benchmarks.measure import make_problem, measure


class NoClock(Clock):
    def sample(self, next_call: NextCall, lead_ms: float) -> float:
        next_call()()
        next_call()()
        return 1.0


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
