"""The benchmark of a vocabulary-parallel step, with contenders that break in every way.

Run by tests/distributed/test_benchmark.py.
"""

import os
import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from benchmarks import vocabulary_parallel
from benchmarks.clock import CpuClock
from benchmarks.vocabulary_parallel_contenders import CONTENDERS, megatron, stock


def wrong_on_one(hidden, weight, target):
    return megatron(hidden, weight, target) * (1 + dist.get_rank())


def nan(hidden, weight, target):
    return megatron(hidden, weight, target) * float("nan")


def raises(hidden, weight, target):
    raise ValueError("it never works")


def raises_on_one(hidden, weight, target):
    """The other rank waits for it in a collective."""
    if dist.get_rank() == 1:
        raise ValueError("it fails here")
    # A contender that compiles may need all of --timeout. Here no rank is late.
    _set_pg_timeout(timedelta(seconds=1), weight.device_mesh.get_group())
    return megatron(hidden, weight, target)


def raises_with_many_rows(hidden, weight, target):
    if hidden.shape[0] > vocabulary_parallel.CHECKED_ROWS:
        return raises(hidden, weight, target)
    return megatron(hidden, weight, target)


BROKEN = (wrong_on_one, nan, raises, raises_on_one, raises_with_many_rows)


def measure(rank: int, world: int, port: int, options: list[str]) -> None:
    """The benchmark on a rank.

    Args:
        port: of the store of the process that has started the ranks, as torchrun has one.
        options: of the command line.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    sys.argv[1:] = options
    CpuClock.warm_up_ms = 0.0  # no test compares times
    contenders = dict(CONTENDERS)
    CONTENDERS.clear()
    for function in BROKEN:
        build = partial(lambda f: f, function)
        CONTENDERS[function.__name__] = replace(contenders["megatron"], build=build)
    CONTENDERS.update(contenders)
    assert contenders["loss_parallel"].build() is stock
    raise SystemExit(vocabulary_parallel.main())
