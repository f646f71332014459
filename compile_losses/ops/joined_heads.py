"""Several heads of one weight, whose gradients of the weight are one sum.

``fused::joined_heads(Tensor[] tensors, str calls) -> Tensor[]`` is what the pass
``plan.one_weight`` puts into graphs. It runs calls of heads one after another. What these would add
up to a gradient of the weight each, they add to one sum, which is the last result. The other
results of all calls come before it, in their order. The text says which calls
(:mod:`compile_losses.ops.linear.joined_calls`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.ops.linear.joined_calls import JoinedCall, parsed
from compile_losses.ops.linear.steps import call
from compile_losses.ops.linear.weight_sum import WeightSum, adds_to

joined_heads = library.define("joined_heads(Tensor[] tensors, str calls) -> Tensor[]")


def _results(each: JoinedCall, tensors: list[Tensor]) -> list[Tensor]:
    return list(call(each.step, tensors))


def _kernel(tensors: list[Tensor], calls: str) -> list[Tensor]:
    program = parsed(calls)
    rows = sum(len(tensors[each.rows]) * len(each.places) for each in program.calls)
    total = WeightSum(rows, program.dtype)
    results = []
    with torch.no_grad():
        for each in program.calls:
            with adds_to(total, each.places):
                found = _results(each, tensors)
            results += [r for place, r in enumerate(found) if place not in each.places]
    return [*results, total.result()]


def _fake(tensors: list[Tensor], calls: str) -> list[Tensor]:
    program = parsed(calls)
    results, sums = [], []
    for each in program.calls:
        found = _results(each, tensors)
        sums += [found[place] for place in each.places]
        results += [r for place, r in enumerate(found) if place not in each.places]
    return [*results, torch.empty_like(sums[0], dtype=program.dtype)]


library.compose(joined_heads, _kernel, _fake)
