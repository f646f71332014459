"""Losses of a layer that get their logits back: the same numbers, of torch's own product."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lower.held_logits import (
    grad_outputs_of,
    leaf_arguments,
    name_of,
    take_logits_back,
)
from compile_losses.ops.linear.row_statistics import VARIANCE
from compile_losses.ops.linear_row_statistics import in_order
from tests.corpus.capture import inputs_for
from tests.passes.graphs import fused, of_aten, text
from tests.passes.outcomes import assert_same, results_of

ROWS, HIDDEN, CLASSES, OF_TEACHER = 6, 3, 5, 4
F64 = torch.float64


def tensors(*shapes):
    return [torch.randn(shape, dtype=F64) for shape in shapes]


def check(function, *inputs):
    """The graph with held logits, whose results are those of the op."""
    gm = of_aten(function, *inputs)
    given = inputs_for(gm)
    right = results_of(gm, given)
    linear = [n for n in gm.graph.nodes if "linear_" in str(n.target)]
    forward, *backwards = linear
    take_logits_back(forward, backwards)
    gm.graph.lint()
    gm.recompile()
    assert not any("linear_" in str(n.target) for n in gm.graph.nodes)
    assert_same(results_of(gm, given), right)
    return gm


CROSS_ENTROPY = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "capped": {"softcap": 2.0},
    "ignored": {"ignore_index": 1},
    "both": {"label_smoothing": 0.2, "softcap": 1.5},
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CROSS_ENTROPY)
def test_cross_entropy(name, bias):
    chosen = {"ignore_index": -100, "label_smoothing": 0.0, "softcap": None} | CROSS_ENTROPY[name]
    options = (None, 0, *chosen.values(), 0.0, F64)

    def step(h, w, b, t, g):
        given = (h, w, t, b if bias else None, *options)
        losses = fused.linear_cross_entropy_forward(*given)
        gradients = fused.linear_cross_entropy_backward(g, *given, True, True, bias)
        return losses, *gradients[: 2 + bias]

    shapes = (ROWS, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)
    gm = check(step, *tensors(*shapes), torch.randint(CLASSES, (ROWS,)), *tensors((ROWS,)))
    assert ("aten.addmm" in text(gm.graph)) == bias


def test_class_indices_of_8_bits():
    def step(h, w, t):
        return fused.linear_cross_entropy_forward(h, w, t, None, None, 0, -100, 0.0, None, 0.0, F64)

    labels = torch.randint(CLASSES, (ROWS,)).byte()
    check(step, *tensors((ROWS, HIDDEN), (CLASSES, HIDDEN)), labels)


#: The kind of divergence, whether a class and several are picked, and the soft-caps.
STATISTICS = {
    "entropy": (None, True, False, None),
    "no class": (None, False, False, None),
    "capped": (None, True, False, 2.0),
    "picks": (None, True, True, None),
    "capped picks": (None, False, True, 2.0),
    "squares": (None, True, False, None),
    "capped squares": (None, False, False, 2.0),
    "variance": (None, True, False, None),
    "capped variance": (None, False, False, 2.0),
    "kl": ("kl", True, False, None),
    "capped kl": ("kl", False, False, 3.0),
    "reverse": ("reverse_kl", True, False, None),
    "js": ("js", False, False, None),
    "soft targets": ("cross_entropy", False, False, None),
    "all": ("kl", True, True, None),
    "finite": ("finite_kl", False, False, None),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics(name):
    kind, has_class, has_picks, softcap = STATISTICS[name]

    def step(h, w, t, picks, teacher, teacher_weight, *given):
        temperature = 1.0 if kind == "cross_entropy" else 2.0
        of_teacher = (teacher, teacher_weight, None), kind, 0.3, temperature
        args = in_order(
            h, w, t if has_class else None, None, -100, softcap,
            *(() if kind is None else of_teacher),
            picks=picks if has_picks else None, squares="squares" in name,
            variance="variance" in name,
        )  # fmt: skip
        values = fused.linear_row_statistics_forward(*args)
        needed = [*given[:4], given[4] if kind else None, given[5] if has_picks else None]
        needed[0] = needed[0] if has_class else None
        gradients = fused.linear_row_statistics_backward(*needed, *args, True, True, False)
        kept = [v for i, v in enumerate(values) if v.numel() and i <= VARIANCE]
        return *kept, gradients[0], gradients[1]

    shapes = (ROWS, HIDDEN), (CLASSES, HIDDEN)
    teacher = (ROWS, OF_TEACHER), (CLASSES, OF_TEACHER)
    given = [*[(ROWS,)] * 5, (ROWS, 2)]
    labels, picks = torch.randint(CLASSES, (ROWS,)), torch.randint(CLASSES, (ROWS, 2))
    check(step, *tensors(*shapes), labels, picks, *tensors(*teacher, *given))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_divergences(softcap, reverse):
    def step(h, w, t, tw, g):
        given = (h, w, t, None, tw, None, 0, reverse, 2.0, softcap, None, 1, F64)
        losses = fused.linear_softmax_kl_div_forward(*given)
        gradients = fused.linear_softmax_kl_div_backward(g, *given, True, True, False)
        return losses, gradients[0], gradients[1]

    shapes = (ROWS, HIDDEN), (CLASSES, HIDDEN), (ROWS, OF_TEACHER), (CLASSES, OF_TEACHER), (ROWS,)
    check(step, *tensors(*shapes))


def test_arguments():
    def step(h, w, t, g):
        options = (None, None, 0, -100, 0.0, None, 0.0, F64)
        losses = fused.linear_cross_entropy_forward(h, w, t, *options)
        return losses, fused.linear_cross_entropy_backward(g, h, w, t, *options, True, True, False)[
            0
        ]

    gm = of_aten(
        step,
        *tensors((ROWS, HIDDEN), (CLASSES, HIDDEN)),
        torch.zeros(ROWS).long(),
        *tensors((ROWS,)),
    )
    forward, backward = (n for n in gm.graph.nodes if "linear_" in str(n.target))
    assert name_of(forward) == name_of(backward) == "linear_cross_entropy"
    assert leaf_arguments(forward) == leaf_arguments(backward) == tuple(forward.args)
    assert [n.name for n in grad_outputs_of(backward)] == ["g_1"]
