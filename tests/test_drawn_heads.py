"""Drawn programs of a head and its readers: values, gradients, dtypes and strides are torch's."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import compile_losses
from compile_losses.switches import counters
from tests.accuracy import assert_accurate, similar
from tests.drawn_heads import Inputs, Program
from tests.graphs import Compiled

pytestmark = pytest.mark.usefixtures("no_code", "chunks", "kernels_for_small_losses")

IN_CI, ALL, AT_ONCE = 100, 2000, 100
#: Torch's own error in one call says little where terms cancel: that of a few calls like it does.
LIKE_IT = 3
#: Of 100 programs so many have a loss that is rewritten together with its head, at least.
WITH_HEAD = 25


def results(function, given: Inputs) -> list[torch.Tensor]:
    """What a program returns, and its gradients."""
    leaves = given.leaves()
    returned = function(*vars(given).values())
    found = [r.detach() for r in returned]
    if not returned[0].requires_grad:
        return found
    grads = torch.autograd.grad(returned[0], leaves, allow_unused=True)
    zeros = (torch.zeros_like(leaf) for leaf in leaves)
    return found + [zero if g is None else g for g, zero in zip(grads, zeros, strict=True)]


def error_of_torch(program: Program, in_float64: Program, inputs: Inputs) -> list[float]:
    """The worst error of each result of a few calls on nearly the same numbers."""
    generator, errors = torch.Generator().manual_seed(0), []

    def near(tensor):
        if tensor is None:
            return None
        found = similar(tensor, generator, tensor.dtype).detach()
        return found.requires_grad_(tensor.requires_grad)

    for _ in range(LIKE_IT):
        given = Inputs(*map(near, vars(inputs).values()))
        pairs = zip(
            results(program, given), results(in_float64, given.like(torch.float64)), strict=True
        )
        each = ((a.double() - b.double()).abs().flatten() for a, b in pairs)
        errors.append([max(e[e.isfinite()].tolist(), default=0.0) for e in each])
    return [max(each) for each in zip(*errors, strict=True)]


def assert_like_torch(program: Program, compiled, inputs: Inputs) -> None:
    ours, eager = results(compiled, inputs), results(program, inputs)
    returned = len(ours) - len(inputs.leaves())  # a gradient lies as a compiler likes it
    assert [r.dtype for r in ours] == [r.dtype for r in eager]
    assert [r.stride() for r in ours[:returned]] == [r.stride() for r in eager[:returned]]
    in_float64 = replace(program, autocast=False, dtype=torch.float64)
    exact = results(in_float64, inputs.like(torch.float64))
    if program.infinite == "class":  # where torch has products of 0 and an infinity, we have none
        undefined = [each.isnan() for each in exact]
        triples = (ours, eager, exact)
        ours, eager, exact = (
            [t.masked_fill(u, 0) for t, u in zip(each, undefined, strict=True)] for each in triples
        )
    if program.dtype == torch.float64:
        torch.testing.assert_close(ours, eager, rtol=1e-9, atol=1e-10, equal_nan=True)
        return
    errors = error_of_torch(program, in_float64, inputs)
    for place, (*tensors, error) in enumerate(zip(ours, eager, exact, errors, strict=True)):
        assert_accurate(*tensors, f"result {place}", like=error)


def check(seed: int) -> set[str]:
    """Compares a program, compiled in one of the two ways; the ops that it was rewritten to."""
    program = Program.draw(seed)
    dynamic = program.dynamic or None
    by_backend = seed % 3 != 0
    before = counters()["rewritten"].copy()
    with nullcontext() if by_backend else compile_losses.enable():
        if by_backend:
            compiled = Compiled(program, dynamic=dynamic)
        else:
            compiled = torch.compile(program, dynamic=dynamic)
        for tokens in (18, 23, 18) if program.dynamic else (18,):
            assert_like_torch(program, compiled, program.inputs(tokens=tokens))
    return set(counters()["rewritten"] - before)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("first", range(0, IN_CI, 5))
def test_drawn_programs_are_like_torch(first):
    for seed in range(first, first + 5):
        torch._dynamo.reset()
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(IN_CI, ALL, AT_ONCE))
def test_many_drawn_programs_are_like_torch(first):
    found = []
    for seed in range(first, first + AT_ONCE):
        torch._dynamo.reset()
        found += check(seed)
    assert sum(op.startswith("linear_") for op in found) >= WITH_HEAD
