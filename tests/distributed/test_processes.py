"""Two processes: DTensors, compiled steps, DDP, FSDP2 and HSDP give what one process gives.

On CPUs through gloo, and on two GPUs through NCCL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests import ROOT
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
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder), request.param], env=environment, cwd=ROOT
        )
        for rank in range(WORLD)
    ]
    try:
        ranks[0].wait(timeout=400)
        ranks[1].wait(timeout=30)  # it has nothing left to do, or nobody left to do it with
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
    return folder


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(name, reports):
    for rank in range(WORLD):
        path = reports / f"{name}.{rank}"
        assert path.exists(), f"rank {rank} ended before it"
        assert json.loads(path.read_text()) == "passed"
