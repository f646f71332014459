"""Two processes: DTensors, compiled steps, DDP, FSDP2 and HSDP give what one process gives.

On CPUs through gloo, and on two GPUs through NCCL.
"""

from __future__ import annotations

import time

import pytest
import torch

from tests.distributed.chosen import chosen
from tests.distributed.processes import assert_passed, run, start, wait
from tests.distributed.ranks import CHECKS, WORLD

TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} CUDA devices"),
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def reports(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    names = chosen(test_two_processes, request)
    run("tests.distributed.ranks", folder, request.param, WORLD, names)
    return folder


def writes_slowly(rank, folder):
    for i in range(8):
        time.sleep(0.5)
        (folder / f"slow.{i}").touch()


def hangs(rank):
    time.sleep(60)


def test_ranks_that_are_slow_and_ranks_that_hang(tmp_path):
    """Those that write reports may take longer in all than ranks that wait for each other."""
    ranks = start(writes_slowly, "cpu", 1, tmp_path)
    wait(ranks, tmp_path, patience=3)
    assert [rank.exitcode for rank in ranks] == [0]
    ranks = start(hangs, "cpu", 1)
    wait(ranks, tmp_path, patience=1)
    assert ranks[0].exitcode < 0


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(name, reports):
    assert_passed(reports, name, WORLD)
