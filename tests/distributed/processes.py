"""Ranks as processes, on CPUs through gloo or on GPUs through NCCL.

A rank reports each check in a file: gloo sometimes ends a process abruptly when all of them are
through.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ROOT
from tests.kernels import plan_bodies_as_kernels

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def run(module: str, folder: Path, kind: str, world: int, names: Sequence[str]) -> None:
    """Starts so many processes of a module, and waits for them.

    Args:
        module: ends with ``report_checks``, of the checks that it has.
        folder: for the reports.
        names: of the checks.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", module, str(folder), kind, str(world)]
    ranks = [
        subprocess.Popen([*command, str(rank), *names], env=environment, cwd=ROOT)
        for rank in range(world)
    ]
    wait(ranks, folder)


def wait(
    ranks: Sequence[subprocess.Popen[bytes]],
    folder: Path,
    patience: float = 400,
    pause: float = 0.2,
) -> None:
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


def assert_passed(folder: Path, name: str, world: int) -> None:
    """By what each rank reports of a check."""
    for rank in range(world):
        path = folder / f"{name}.{rank}"
        assert path.exists(), f"rank {rank} ended, or was killed because it hung, before it"
        found = json.loads(path.read_text())
        assert found == "passed", f"rank {rank}: {found}"


def checks_in(module: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The functions ``check_X`` among a module's globals, by ``X``."""
    return {
        name.removeprefix("check_"): check
        for name, check in module.items()
        if name.startswith("check_")
    }


def report_checks(
    checks: Mapping[str, Callable[[torch.device], None]], patience: float = 300
) -> None:
    """What a rank does: it joins the others, and runs the checks that it is asked for.

    Args:
        checks: each is given the rank's device.
        patience: a collective that waits longer for another rank raises; in seconds.
    """
    folder, kind, world, rank = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5])
    device = torch.device(kind)
    if kind != "cpu":
        device = torch.device(kind, rank)
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        BACKENDS[kind],
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=patience),
    )
    for name in sys.argv[5:]:
        try:
            with pytest.MonkeyPatch.context() as patch:
                plan_bodies_as_kernels(patch)
                checks[name](device)
            found = "passed"
        except Exception:
            found = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
