"""Two processes: DTensors, compiled steps, DDP, FSDP2 and HSDP give what one process gives.

On CPUs through gloo, and on two GPUs through NCCL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from tests import ROOT
from tests.distributed.chosen import chosen
from tests.distributed.ranks import CHECKS, WORLD

TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} CUDA devices"),
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def reports(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.distributed.ranks"]
    given = [str(folder), request.param, *chosen(test_two_processes, request)]
    ranks = [
        subprocess.Popen([*command, str(rank), *given], env=environment, cwd=ROOT)
        for rank in range(WORLD)
    ]
    wait(ranks, folder)
    return folder


def wait(ranks, folder, patience=400, pause=0.2):
    """Until all ranks end. If none ends or writes a report for so many seconds, they are killed: a
    machine with other work may take long for all checks, but not for one."""
    before, since = None, time.monotonic()
    while any(rank.poll() is None for rank in ranks):
        progress = ([rank.poll() for rank in ranks], len(list(folder.iterdir())))
        if progress != before:
            before, since = progress, time.monotonic()
        elif time.monotonic() - since > patience:
            for rank in ranks:
                rank.kill()
                rank.wait()
        time.sleep(pause)


def test_ranks_that_are_slow_and_ranks_that_hang(tmp_path):
    """Those that write reports may take longer in all than ranks that wait for each other."""
    slow = "import time\nfor i in range(8): time.sleep(0.5); open(f'slow.{i}', 'w')"
    ranks = [subprocess.Popen([sys.executable, "-c", slow], cwd=tmp_path)]
    wait(ranks, tmp_path, patience=3)
    assert [rank.returncode for rank in ranks] == [0]
    ranks = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])]
    wait(ranks, tmp_path, patience=1)
    assert ranks[0].returncode < 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(name, reports):
    for rank in range(WORLD):
        path = reports / f"{name}.{rank}"
        assert path.exists(), f"rank {rank} ended, or was killed because it hung, before it"
        assert json.loads(path.read_text()) == "passed"
