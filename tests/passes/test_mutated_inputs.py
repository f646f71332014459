"""What a forward saves of inputs that it changes."""

from __future__ import annotations

import torch

from compile_losses.lower.mutated_inputs import save_before_mutation
from compile_losses.torch_internals.graphs import RECOMPUTE
from tests.passes.graphs import aten, indexed, of_aten, one


def test_what_a_mutated_input_made_is_saved():
    def step(x, w, tangents_1):
        y = x.sin()
        z = x.cos()
        x.copy_(w)
        return z.sum(), tangents_1 * y

    gm = of_aten(step, *[torch.randn(3) for _ in range(2)], torch.tensor(1.0))
    save_before_mutation(indexed(gm))
    assert RECOMPUTE in one(gm.graph, aten.sin.default).meta
    assert RECOMPUTE not in one(gm.graph, aten.cos.default).meta


def test_unmutated_inputs():
    gm = of_aten(
        lambda x, tangents_1: (x.sum(), tangents_1 * x.sin()), torch.ones(3), torch.tensor(1.0)
    )
    save_before_mutation(indexed(gm))
    assert RECOMPUTE not in one(gm.graph, aten.sin.default).meta
