"""The benchmark of a vocabulary-parallel step, with contenders that break in every way.

Run by tests/distributed/test_benchmark.py.
"""

from dataclasses import replace
from functools import partial

import torch.distributed as dist

from benchmarks import vocabulary_parallel
from benchmarks.vocabulary_parallel import CONTENDERS, megatron, stock


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
    return megatron(hidden, weight, target)


def raises_with_many_rows(hidden, weight, target):
    if hidden.shape[0] > vocabulary_parallel.CHECKED_ROWS:
        return raises(hidden, weight, target)
    return megatron(hidden, weight, target)


BROKEN = (wrong_on_one, nan, raises, raises_on_one, raises_with_many_rows)

if __name__ == "__main__":
    contenders = dict(CONTENDERS)
    CONTENDERS.clear()
    for function in BROKEN:
        build = partial(lambda f: f, function)
        CONTENDERS[function.__name__] = replace(contenders["megatron"], build=build)
    CONTENDERS.update(contenders)
    assert contenders["loss_parallel"].build() is stock
    raise SystemExit(vocabulary_parallel.main())
