"""Ranks as processes, on CPUs through gloo or on GPUs through NCCL.

A rank reports each check in a file: gloo sometimes ends a process abruptly when all of them are
through.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.kernels import plan_bodies_as_kernels

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
#: What takes longer to import than most checks take: one process does, and all ranks on CPUs are
#: forked from it.
IMPORTED = [
    *(f"tests.distributed.{name}" for name in ("ranks", "trainers", "contrastive", "contenders")),
    "torch._inductor.compile_fx",
]
#: Of this rank.
device = torch.device("cpu")


def start(function: Callable[..., None], kind: str, world: int, *given: Any) -> list[BaseProcess]:
    """Processes that call a function of a module with the rank of each, and with what is given.

    Args:
        kind: of device. Ranks on GPUs are not forked: CUDA does not work in a process that is
            forked from one that has looked for GPUs.
    """
    context = multiprocessing.get_context("forkserver" if kind == "cpu" else "spawn")
    if kind == "cpu":
        context.set_forkserver_preload(IMPORTED)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        context.Process(target=_call, args=(environment, function, rank, *given))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def _call(environment: dict[str, str], function: Callable[..., None], *given: Any) -> None:
    os.environ.clear()  # of the process that this one is forked from
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*given)


def run(module: str, folder: Path, kind: str, world: int, names: Sequence[str]) -> None:
    """Starts so many processes for checks of a module, and waits for them.

    Args:
        module: has a dictionary ``CHECKS``.
        folder: for the reports.
        names: of the checks.
    """
    wait(start(report_checks, kind, world, module, folder, kind, world, names), folder)


def wait(
    ranks: Sequence[BaseProcess], folder: Path, patience: float = 400, pause: float = 0.2
) -> None:
    """Until all ranks end. If none ends or writes a report for so many seconds, they are killed: a
    machine with other work may take long for all checks, but not for one."""
    before, since = None, time.monotonic()
    while any(rank.exitcode is None for rank in ranks):
        progress = ([rank.exitcode for rank in ranks], len(list(folder.iterdir())))
        if progress != before:
            before, since = progress, time.monotonic()
        elif time.monotonic() - since > patience:
            for rank in ranks:
                rank.kill()
                rank.join()
        time.sleep(pause)


def assert_passed(folder: Path, name: str, world: int) -> None:
    """By what each rank reports of a check."""
    for rank in range(world):
        path = folder / f"{name}.{rank}"
        assert path.exists(), f"rank {rank} ended, or was killed because it hung, before it"
        found = json.loads(path.read_text())
        assert found == "passed", f"rank {rank}: {found}"


def checks_in(module: Mapping[str, Any]) -> dict[str, Callable[[], None]]:
    """The functions ``check_X`` among a module's globals, by ``X``."""
    return {
        name.removeprefix("check_"): check
        for name, check in module.items()
        if name.startswith("check_")
    }


def report_checks(
    rank: int,
    module: str,
    folder: Path,
    kind: str,
    world: int,
    names: Sequence[str],
    patience: float = 300,
) -> None:
    """What a rank does: it joins the others, and runs the checks that it is asked for.

    Args:
        patience: a collective that waits longer for another rank raises; in seconds.
    """
    global device
    checks = importlib.import_module(module).CHECKS
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
    for name in names:
        try:
            with pytest.MonkeyPatch.context() as patch:
                plan_bodies_as_kernels(patch)
                checks[name]()
            found = "passed"
        except Exception:
            found = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
