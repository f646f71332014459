"""Losses and their gradients in torch's own ops: the same numbers, and no op is left."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lower.decompose import decompose_backward, decomposition_of, reference_of
from compile_losses.lower.fused_calls import find_losses, fused_op, has_part
from tests.corpus.capture import inputs_for
from tests.passes.graphs import fused, of_aten, one, text
from tests.passes.outcomes import assert_same, results_of
from tests.specs import SPECS

F64 = torch.float64


def joint(spec, reduction, options):
    """The loss of a spec's operands and the gradients of both."""
    input, target = spec.operands(6, 10)
    forward, backward = fused_op(spec.name, "forward"), fused_op(spec.name, "backward")

    def call(x, t, tangents_1):
        named = {"input": x, "target": t, "reduction": reduction, "dtype": F64, **options}

        def given(op, **more):
            known = {**named, **more}
            return [known[a.name] if a.name in known else _default(a) for a in op._schema.arguments]

        results = forward(*given(forward))
        loss, *saved = results if isinstance(results, tuple) else (results,)
        names = [a.name for a in backward._schema.arguments]
        stats = dict(
            zip(
                [n for n in ("stats", "statistics", "total_weight") if n in names],
                saved,
                strict=False,
            )
        )
        found = backward(*given(backward, grad_output=tangents_1, **stats))
        found = found if isinstance(found, tuple) else (found,)
        return loss, *(g for g in found if g.numel())

    shape = fused_op(spec.name, "forward")(*_call(spec, input, target, reduction, options))
    shape = (shape[0] if isinstance(shape, tuple) else shape).shape
    return of_aten(call, input, target, torch.rand(shape, dtype=F64) + 0.5)


def _call(spec, input, target, reduction, options):
    named = {"input": input, "target": target, "reduction": reduction, "dtype": F64, **options}
    schema = fused_op(spec.name, "forward")._schema
    return [named[a.name] if a.name in named else _default(a) for a in schema.arguments]


def _default(argument):
    if argument.has_default_value():
        return argument.default_value
    known = {
        "ignore_index": -100, "label_smoothing": 0.1, "log_target": False, "log_input": True,
        "beta": 0.5, "delta": 0.7, "temperature": 1.0, "dim": -1, "divisor": 6, "entropy": False,
        "needs_grad_input": True, "reverse": False,
    }  # fmt: skip
    return known.get(argument.name, False if "needs" in argument.name else None)


NAMES = [name for name in SPECS if reference_of(name) is not None and has_part(name, "with_grad_")]


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_numbers(name, reduction):
    gm = joint(SPECS[name], reduction, {})
    numbers = inputs_for(gm)
    numbers = [n.abs().clamp(0.05, 0.95) if n.is_floating_point() else n for n in numbers]
    right = results_of(gm, numbers)
    (loss,) = find_losses(gm.graph)
    before = text(gm.graph)
    decomposition = decomposition_of(loss)
    assert text(gm.graph) == before  # nothing changes before it is applied
    assert len(decomposition.replacements) == 2
    decomposition.apply()
    gm.graph.lint()
    gm.recompile()
    assert "fused" not in text(gm.graph)
    assert not any(
        n.target._schema.is_mutable
        for n in gm.graph.nodes
        if n.op == "call_function" and hasattr(n.target, "_schema")
    )
    assert_same(results_of(gm, numbers), right)


def test_collection():
    assert len(NAMES) > 8


def test_a_gradient_alone():
    def backward(g, x, t):
        return fused.huber_loss_backward(g, x, t, None, 2, 0.7, True, False, False)[0]

    gm = of_aten(backward, torch.tensor(2.0), torch.randn(4, 5), torch.randn(4, 5))
    numbers = inputs_for(gm)
    right = results_of(gm, numbers)
    assert decompose_backward(one(gm.graph, "fused.huber_loss_backward"))
    gm.recompile()
    assert_same(results_of(gm, numbers), right)


def test_statistics_that_are_read():
    """The forward's results are more than the loss: no other op gives them."""

    def step(x, t):
        loss, stats, _ = fused.cross_entropy_forward(x, t, None, 1, -100, 0.0, x.dtype)
        return loss, stats

    gm = of_aten(step, torch.randn(4, 5), torch.randint(5, (4,)))
    (loss,) = find_losses(gm.graph)
    assert decomposition_of(loss) is None
