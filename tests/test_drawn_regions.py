"""Drawn programs that read logits in unknown ways: values and gradients are torch's."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lower import one_weight, regions
from compile_losses.torch_internals.dynamo import maybe_mark_dynamic
from tests.drawn_regions import Program
from tests.graphs import Compiled
from tests.heads import small_chunks  # noqa: F401

IN_CI, ALL, AT_ONCE = 24, 1024, 50
#: Without recognition all readers of logits are torch's ops.
PASSES = "rewrite.known_heads,plan.regions,plan.one_weight,in_place"
#: Of 50 programs so many have a head without its logits, at least.
TAKEN = 8

pytestmark = pytest.mark.usefixtures("no_code", "heads_are_joined")


def results(function, inputs):
    """What a program returns, each result by its numbers' places, and its gradients."""
    leaves = [t for t in inputs if t.requires_grad]
    found = function(*inputs)
    total = sum(
        (1 + place) * (each * torch.arange(1, each.numel() + 1).view(each.shape)).sum()
        for place, each in enumerate(found)
        if each.requires_grad
    )
    values = [each.detach() for each in found]
    if not isinstance(total, torch.Tensor):
        return values
    return [*values, *torch.autograd.grad(total * 0.5, leaves, allow_unused=True)]


@pytest.fixture
def heads_are_joined(monkeypatch):
    """Also heads whose rows are more than their few classes."""
    monkeypatch.setattr(one_weight, "_may_wait", lambda call: True)


@pytest.fixture
def taken(monkeypatch):
    """The products of heads that are replaced; none of them is left in its graph."""
    found, erase = [], regions._erase

    def erases(rows):
        graph = rows.product.graph
        erase(rows)
        left = rows.heads.keys() & set(graph.nodes)
        assert not left, f"logits are computed beside the region too: {left}"
        found.extend(rows.heads)

    monkeypatch.setattr(regions, "_erase", erases)
    return found


def check(seed: int, *, dynamic: bool = False) -> None:
    """Compares a program with torch's.

    Args:
        dynamic: whether the numbers of rows are symbols.
    """
    program = Program.draw(seed)
    inputs = program.inputs()
    if dynamic:
        for tensor in inputs:
            for dim in program.dims_of_rows(tensor):
                maybe_mark_dynamic(tensor, dim)
    ours = results(Compiled(program, prefer_memory=True), inputs)
    tolerance = 1e-5 if "narrow and wide" in program.between else 1e-9
    for found, expected in zip(ours, results(program, inputs), strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(
                found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=str(program)
            )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", range(0, IN_CI, 3))
@pytest.mark.usefixtures("taken")
def test_drawn_programs_are_like_torch(first, monkeypatch):
    if first % 2:
        monkeypatch.setenv("COMPILE_LOSSES_PASSES", PASSES)
    for seed in range(first, first + 3):
        torch._dynamo.reset()
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("first", range(IN_CI, ALL, AT_ONCE))
def test_many_drawn_programs_are_like_torch(first, dynamic, taken, monkeypatch):
    monkeypatch.setenv("COMPILE_LOSSES_PASSES", PASSES)
    for seed in range(first, first + AT_ONCE):
        torch._dynamo.reset()
        check(seed, dynamic=dynamic)
    assert len(taken) >= TAKEN
