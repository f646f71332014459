"""Ranks that measure together: a failure or a time of one of them counts for all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _abort_process_group

from benchmarks.contenders import reason_of

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
Result = TypeVar("Result")


class FailedError(Exception):
    """A failure on a rank; the message says where and why. All ranks raise it."""


class Ranks:
    """The processes that torchrun started, a mesh of them, and how they agree.

    They agree through gloo on the host, without the mesh's own collectives. So a rank that failed
    does not wait for ranks inside a collective, and those ranks don't wait for their device.

    Attributes:
        mesh: of all ranks. A failure replaces it by another mesh, because some ranks may still be
            waiting in a collective of the old mesh, which is aborted.
    """

    def __init__(self, device_type: str, timeout_s: float) -> None:
        dist.init_process_group("gloo")
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(device_type)
        self.timeout = timedelta(seconds=timeout_s)
        if device_type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        self._meshes = itertools.count()
        self._renew()

    def _renew(self) -> None:
        self._group = dist.new_group(backend=BACKENDS[self.device.type], timeout=self.timeout)
        # DTensor's caches hold groups; the name distinguishes this mesh from the one before.
        name = f"vocabulary{next(self._meshes)}"
        self.mesh = DeviceMesh.from_group(self._group, self.device.type, mesh_dim_names=(name,))

    def together(self, function: Callable[[], Result]) -> Result:
        """The function's result, if it raises on no rank.

        Raises:
            FailedError: it raised on some ranks.
        """
        try:
            result = function()
            reason = ""
        except Exception as error:  # whatever it is, the others are still measured
            reason = reason_of(error)
        reason = self.agreed(reason)
        if reason:
            _abort_process_group(self._group)
            self._renew()
            raise FailedError(reason)
        return result

    def agreed(self, reason: str) -> str:
        """The objections of all ranks, the same on all; empty if there are none."""
        reasons: list[str] = [""] * self.count
        dist.all_gather_object(reasons, reason)
        if len(set(reasons)) == 1:
            return reasons[0]
        return "; ".join(f"rank {i}: {text}" for i, text in enumerate(reasons) if text)

    def largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        values = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values.item()
