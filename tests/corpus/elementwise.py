"""Losses without an op of their own: sums of any function of each element."""

from __future__ import annotations

import torch

from benchmarks.elementwise import LOSSES
from tests.corpus.program import Program, programs


def inputs_of(name, shape, dtype=torch.float32):
    kinds = LOSSES[name][1]
    made = [torch.rand(shape) * 0.9 + 0.05 if k in "pP" else torch.randn(shape) for k in kinds]
    return [t.to(dtype).requires_grad_(k.isupper()) for t, k in zip(made, kinds, strict=True)]


def pair(*shape, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(shape, dtype=dtype)]


def charbonnier(x, t):
    return ((x - t) ** 2 + 1e-3).sqrt().mean()


def of_each_row(x, t):
    return ((x - t) ** 2 + 1e-3).sqrt().sum(-1).mean()


def of_blocks(x, t):
    return charbonnier(x.view(4, 8, 64), t.view(4, 8, 64))


#: The sum of all elements, with arguments left out or given.
SUMS_OF_ALL = {
    "sum()": lambda a: a.sum(),
    "mean()": lambda a: a.mean(),
    "sum(None)": lambda a: torch.sum(a, dim=None),
    "sum([])": lambda a: a.sum([]),
    "mean(None, keepdim)": lambda a: torch.mean(a, dim=None, keepdim=True).view(()),
    "sum(all)": lambda a: a.sum(list(range(a.dim()))),
    "sum(all, keepdim)": lambda a: a.sum(list(range(a.dim())), keepdim=True).view(()),
}


def _inputs(name):
    return lambda: inputs_of(name, (32, 48))


PROGRAMS = [
    *(Program(f"elementwise: {name}", LOSSES[name][0], _inputs(name)) for name in LOSSES),
    *programs(
        __name__,
        {
            name: lambda x, t, f=f: f(((x - t) ** 2 + 1e-3).sqrt())
            for name, f in SUMS_OF_ALL.items()
        },
        lambda: pair(32, 48),
    ),
    *programs(__name__, {"of each row": of_each_row}, lambda: pair(32, 48)),
    *programs(__name__, {"of blocks": of_blocks}, lambda: pair(32, 64)),
]
