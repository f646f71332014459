"""Divergences of layers whose rows are sharded are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import compile_losses
from tests.constants import set_constants
from tests.distributed.test_communication import collectives, dtensor
from tests.distributed.test_exact import check, rand

DIVERGENCES = {
    "forward": (compile_losses.linear_softmax_kl_div, {}),
    "reverse": (compile_losses.linear_softmax_kl_div, {"reverse": True}),
    "Jensen-Shannon": (compile_losses.linear_softmax_js_div, {"beta": 0.3}),
}
REDUCTIONS = ("none", "sum", "mean", "batchmean")
#: Of hidden, linear_weight and the teacher's logits, or the input of its layer.
LAYOUTS = ["0 R 0", "R R R", "0 R R", "R R 0", "P R 0", "1 R R", "0R RR 0R", "00 RR 00", "0R RR R0"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("teacher", ["logits", "layer"])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_sharded_rows(layouts, teacher, divergence, reduction, monkeypatch):
    set_constants(monkeypatch, least_rows=2, logits_bytes=1)
    function, options = DIVERGENCES[divergence]
    placed = layouts.split()
    tensors = [rand(7, 6), rand(5, 6, seed=3), rand(7, 4 if teacher == "layer" else 5, seed=4)]
    tensors.append(rand(5, seed=5))
    placed.append(placed[1])
    if teacher == "layer":
        tensors += [rand(5, 4, seed=6), rand(5, seed=7)]
        placed += [placed[1]] * 2

    def loss(input, weight, target, bias, *layer):
        names = ("target_weight", "target_bias")
        return function(
            input, weight, target, reduction, linear_bias=bias, temperature=1.5,
            **dict(zip(names, layer, strict=False)), **options,
        )  # fmt: skip

    check(loss, tensors, placed, (0, 1, 3))


@pytest.mark.parametrize("reduction", ["none", "batchmean"])
@pytest.mark.parametrize("layouts", ["1R RR 1R", "01 RR 01"])
def test_sequences(layouts, reduction):
    tensors = [rand(3, 5, 4), rand(6, 4, seed=3), rand(3, 5, 6, seed=4)]
    check(
        lambda h, w, t: compile_losses.linear_softmax_kl_div(h, w, t, reduction),
        tensors,
        layouts.split(),
        (0, 1),
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_is_communicated(reduction):
    weight = torch.randn(12, 6)

    def loss(hidden, target):
        layer = dtensor(12, 6, placements=[Replicate()]).requires_grad_()
        return compile_losses.linear_softmax_kl_div(hidden, layer, target.detach(), reduction)

    assert collectives(loss, (torch.randn(8, 6), weight.repeat(1, 2)[:8]), "00") == ([], [])


HIDDEN, LAYER, TEACHER = (8, 6), (12, 6), (8, 12)
REFUSED = {
    "sharded classes": ([Replicate(), Shard(0), Replicate()], "classes of student or teacher"),
    "a teacher of sharded classes": (
        [Replicate(), Replicate(), Shard(1)],
        "classes of student or teacher",
    ),
    "features sharded": ([Replicate(), Shard(1), Replicate()], r"sharded by Shard\(0\)"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", ["kl", "js"])
def test_refusals(name, case):
    function = getattr(compile_losses, f"linear_softmax_{name}_div")
    placements, message = REFUSED[case]
    tensors = [
        dtensor(*shape, placements=[p])
        for shape, p in zip((HIDDEN, LAYER, TEACHER), placements, strict=True)
    ]
    with pytest.raises(RuntimeError, match=f"linear_softmax_{name}_div: .*{message}"):
        function(*tensors)
    whole = dtensor(*TEACHER, placements=[Replicate()])
    with pytest.raises(RuntimeError, match="is a DTensor and linear_weight a plain tensor"):
        function(dtensor(*HIDDEN), torch.randn(LAYER), whole)
    with pytest.raises(RuntimeError, match="not to require grad"):
        function(
            dtensor(*HIDDEN), dtensor(*LAYER, placements=[Replicate()]), whole.requires_grad_()
        )


def test_a_teacher_s_layer_of_sharded_classes():
    everywhere = [Replicate()]
    with pytest.raises(RuntimeError, match="classes of student or teacher are sharded"):
        compile_losses.linear_softmax_kl_div(
            dtensor(*HIDDEN), dtensor(*LAYER, placements=everywhere), dtensor(8, 4),
            target_weight=dtensor(12, 4),
        )  # fmt: skip


def test_dtypes():
    hidden, layer = dtensor(*HIDDEN), dtensor(*LAYER, placements=[Replicate()])
    teacher = dtensor(*TEACHER)
    half = hidden.bfloat16().requires_grad_()
    loss = compile_losses.linear_softmax_kl_div(half, layer.bfloat16(), teacher.bfloat16())
    assert loss.dtype == torch.bfloat16
    loss.backward()
    assert half.grad.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        under = compile_losses.linear_softmax_kl_div(hidden, layer, teacher, "none")
    assert under.dtype == torch.float32
