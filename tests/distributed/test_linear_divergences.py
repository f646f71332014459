"""Divergences of softmaxes and of layers, sharded by rows or classes, are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.library import opcheck

import compile_losses
import compile_losses.functional as F
from compile_losses.ops.softmax_kl_div import reference
from compile_losses.ops.vocabulary_parallel_divergence import merged
from tests.accuracy import RATIO, assert_accurate
from tests.constants import set_constants
from tests.distributed.test_communication import GATHER, collectives, dtensor
from tests.distributed.test_exact import check, rand
from tests.distributed.world import compare

fused = torch.ops.fused

DIVERGENCES = {
    "forward": (compile_losses.linear_softmax_kl_div, {}),
    "reverse": (compile_losses.linear_softmax_kl_div, {"reverse": True}),
    "Jensen-Shannon": (compile_losses.linear_softmax_js_div, {"beta": 0.3}),
}
REDUCTIONS = ("none", "sum", "mean", "batchmean")
#: Of hidden, linear_weight and the teacher's logits, or the input of its layer.
LAYOUTS = ["0 R 0", "R R R", "0 R R", "R R 0", "P R 0", "1 R R", "0R RR 0R", "00 RR 00", "0R RR R0"]


#: The same with sharded classes; C is the dimension of the teacher's classes.
CLASS_LAYOUTS = ["R 0 R", "R 0 C", "0 0 0", "P 0 C", "1 0 R", "0R R0 0R", "0R R0 0C", "R0 0R C0"]
SHAPES = [(7, 5), (3, 2)]


def check_layers(layouts, teacher, divergence, reduction, shape=(7, 5)):
    function, options = DIVERGENCES[divergence]
    rows, classes = shape
    of_hidden, of_layer, of_target = layouts.split()
    of_logits = teacher == "logits"
    of_target = of_target.replace("C", "1" if of_logits else "R")
    features = classes if of_logits else 4
    tensors = [rand(rows, 6), rand(classes, 6, seed=3), rand(rows, features, seed=4)]
    tensors.append(rand(classes, seed=5))
    placed = [of_hidden, of_layer, of_target, of_layer]
    if not of_logits:
        tensors += [rand(classes, 4, seed=6), rand(classes, seed=7)]
        placed += [of_layer] * 2

    def loss(input, weight, target, bias, *layer):
        names = ("target_weight", "target_bias")
        return function(
            input, weight, target, reduction, linear_bias=bias, temperature=1.5,
            **dict(zip(names, layer, strict=False)), **options,
        )  # fmt: skip

    check(loss, tensors, placed, (0, 1, 3))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("teacher", ["logits", "layer"])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_sharded_rows(layouts, teacher, divergence, reduction, monkeypatch):
    set_constants(monkeypatch, least_rows=2, logits_bytes=1)
    check_layers(layouts, teacher, divergence, reduction)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
@pytest.mark.parametrize("teacher", ["logits", "layer"])
@pytest.mark.parametrize("layouts", CLASS_LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sharded_classes(shape, layouts, teacher, divergence, reduction, monkeypatch):
    set_constants(monkeypatch, least_rows=2, logits_bytes=1)
    check_layers(layouts, teacher, divergence, reduction, shape)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduction", range(4))
@pytest.mark.parametrize("layouts", ["1 1", "1 R", "R 1", "01 01", "10 1R", "R1 0R", "P1 RR"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_of_sharded_classes(shape, layouts, reduction):
    tensors = [rand(*shape), rand(*shape, seed=3)]
    check(
        lambda x, t: fused.softmax_kl_div(x, t, reduction, temperature=1.5),
        tensors,
        layouts.split(),
        (0, 1),
    )


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("layouts", ["1 1", "01 01", "21 2R", "12 12"])
def test_classes_in_another_dimension(layouts, reduction):
    def loss(x, t):
        return F.softmax_kl_div(x, t, reduction, dim=1)

    check(loss, [rand(3, 6, 5), rand(3, 6, 5, seed=3)], layouts.split(), (0, 1))


def test_impossible_classes():
    """Shards of -inf alone in one of both; a nan; an infinity; divergences of infinity."""
    x, t = rand(6, 8), rand(6, 8, seed=3)
    t[0, :2] = -torch.inf
    t[1, 2:] = -torch.inf
    t[2, :] = -torch.inf
    t[3, 5] = torch.nan
    x[4, 2] = torch.inf
    x[5, :2] = -torch.inf
    assert fused.softmax_kl_div(x, t, 0)[5] == torch.inf
    check(lambda x, t: fused.softmax_kl_div(x, t, 0).neg().exp(), [x, t], ["1", "1"])


def test_padding_adds_nothing():
    """Shards of -inf alone in both, where one process has the nan of torch's kl_div."""
    x, t = rand(6, 8), rand(6, 8, seed=3)
    x[:, 6:] = t[:, 6:] = -torch.inf

    def loss(x, t):
        return fused.softmax_kl_div(x, t, 0)

    def without(x, t):
        return loss(x[:, :6], t[:, :6])

    assert max(compare(loss, [x, t], ["1", "1"], exact=without).values()) <= 1e-12


@pytest.mark.parametrize("alike", [False, True])
def test_float32_far_from_zero(alike):
    x = (rand(16, 64) * 3 + 700).float()
    t = x + rand(16, 64, seed=3).float() * (1e-3 if alike else 1.0)

    def loss(x, t):
        return fused.softmax_kl_div(x, t, 0)

    def exact(x, t):
        return loss(x.double(), t.double())

    found = compare(loss, [x, t], ["1", "1"], (0, 1), exact)
    assert found["grad 0"] <= 1e-6
    assert found["grad 1"] <= 1e-6
    assert found["loss"] <= 1e-6


def test_sharded_classes_take_one_gather():
    x, t = torch.randn(8, 12), torch.randn(8, 12)
    expected = [(GATHER, 8 * 6)]
    assert collectives(fused.softmax_kl_div, (x, t), "11") == (expected, [])

    def loss(hidden, layer, target):
        return compile_losses.linear_softmax_kl_div(hidden, layer, target.detach())

    tensors = torch.randn(8, 6), torch.randn(12, 6), t
    for layouts in ("R01", "R0R"):
        assert collectives(loss, tensors, layouts) == (expected, [])


def test_second_derivatives_of_sharded_classes_are_refused():
    x = dtensor(8, 12, placements=[Shard(1)]).requires_grad_()
    loss = fused.softmax_kl_div(x, dtensor(8, 12, placements=[Shard(1)]))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        grad.sum().backward()


def of_shards(input, weight, target, grad, *, reverse):
    """The divergences by row and the gradients, from shards of 10 of 37 classes."""
    options, fused_ops = (reverse, 2.0), fused.vocabulary_parallel_linear_divergence
    gradient = fused.vocabulary_parallel_linear_divergence_gradient
    bounds = [(i, min(i + 10, 37)) for i in range(0, 37, 10)]
    layers = [(weight[a:b], target[:, a:b], None, None, None, *options) for a, b in bounds]
    loss, stats = merged(torch.stack([fused_ops(input, *layer) for layer in layers]), 2.0)
    found = [gradient(grad, stats, input, *layer, True, True, False) for layer in layers]
    of_input = sum(g.double() for g, _, _ in found).to(input.dtype)
    return loss.to(grad.dtype), of_input, torch.cat([g for _, g, _ in found])


def of_torch(input, weight, target, grad, *, reverse):
    tensors = [t.detach().requires_grad_() for t in (input, weight)]
    logits = torch.nn.functional.linear(*tensors)
    wide = torch.promote_types(logits.dtype, grad.dtype)
    rows = [logits.to(wide), target.to(wide)]
    loss = reference(*(rows[::-1] if reverse else rows), 0, 2.0, -1)
    return loss.detach(), *torch.autograd.grad((loss * grad).sum(), tensors)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_accuracy(dtype, reverse, device, monkeypatch):
    set_constants(monkeypatch, least_rows=4, logits_bytes=1)
    shapes = (9, 24), (37, 24), (9, 37)
    tensors = [rand(*shape, seed=i).to(device, dtype) for i, shape in enumerate(shapes)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    grad = torch.linspace(0.5, 1.5, 9, device=device, dtype=wide)
    ours = of_shards(*tensors, grad, reverse=reverse)
    eager = of_torch(*tensors, grad, reverse=reverse)
    exact = of_torch(*(t.double() for t in tensors), grad.double(), reverse=reverse)
    # Torch's results in float64 are the reference: there its errors in float32 count.
    rounded = [t.float() for t in (*tensors, grad)]
    low = of_torch(*rounded, reverse=reverse)
    near = of_torch(*(t.double() for t in rounded), reverse=reverse)
    for i, triple in enumerate(zip(ours, eager, exact, strict=True)):
        assert triple[0].dtype == (dtype if i else wide)
        like = RATIO * (low[i] - near[i]).abs().max().item() if dtype == torch.float64 else 0.0
        assert_accurate(*triple, f"result {i}", like)


@pytest.mark.parametrize("bounds", [(10, 20), (37, 37)], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_opcheck(reverse, bounds):
    """Of a shard with classes, and of an empty one."""
    own = bounds[1] - bounds[0]
    logits = torch.randn(9, own), torch.randn(9, own)
    opcheck(fused.vocabulary_parallel_divergence.default, (*logits, 2.0))
    layer = (torch.randn(9, 6), torch.randn(own, 6))
    options = (reverse, 2.0)
    stats, grad = torch.rand(9, 6) + 0.1, torch.rand(9)
    for teacher in (
        (logits[0], None, None, None),
        (torch.randn(9, 4), torch.randn(own), torch.randn(own, 4), torch.randn(own)),
    ):
        opcheck(fused.vocabulary_parallel_linear_divergence.default, (*layer, *teacher, *options))
        for needs in ((True, True, teacher[1] is not None), (False, True, False)):
            opcheck(
                fused.vocabulary_parallel_linear_divergence_gradient.default,
                (grad, stats, *layer, *teacher, *options, *needs),
            )


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
EVERYWHERE = [Replicate()]


@pytest.mark.parametrize("name", ["kl", "js"])
def test_refusals(name):
    function = getattr(compile_losses, f"linear_softmax_{name}_div")
    hidden, teacher = dtensor(*HIDDEN, placements=EVERYWHERE), dtensor(*TEACHER)
    whole = dtensor(*LAYER, placements=EVERYWHERE)
    op = f"linear_softmax_{name}_div: "
    with pytest.raises(RuntimeError, match=rf"{op}.*sharded by Shard\(0\)"):
        function(hidden, dtensor(*LAYER, placements=[Shard(1)]), teacher)
    with pytest.raises(RuntimeError, match=f"{op}.*of student and teacher to be sharded alike"):
        function(hidden, whole, dtensor(*TEACHER, placements=[Shard(1)]))
    with pytest.raises(RuntimeError, match=f"{op}.*of student and teacher to be sharded alike"):
        function(hidden, whole, dtensor(8, 4), target_weight=dtensor(12, 4))
    with pytest.raises(RuntimeError, match="is a DTensor and linear_weight a plain tensor"):
        function(hidden, torch.randn(LAYER), teacher)
    with pytest.raises(RuntimeError, match="not to require grad"):
        function(hidden, whole, teacher.requires_grad_())


def test_a_mixture_of_sharded_classes_is_refused():
    with pytest.raises(RuntimeError, match="linear_softmax_js_div: the classes are sharded"):
        compile_losses.linear_softmax_js_div(
            dtensor(*HIDDEN, placements=EVERYWHERE), dtensor(*LAYER), dtensor(*TEACHER)
        )


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
def test_softcaps_of_sharded_rows(reduction, divergence):
    function, options = DIVERGENCES[divergence]

    def loss(h, w, t):
        caps = {"softcap": 1.5, "target_softcap": 2.0}
        return function(h, w, t, reduction, **caps, **options)

    tensors = [rand(7, 6), rand(5, 6, seed=3), rand(7, 5, seed=4)]
    check(loss, tensors, ["0", "R", "0"], (0, 1))


@pytest.mark.parametrize("cap", ["softcap", "target_softcap"])
def test_softcaps_of_sharded_classes_are_refused(cap):
    with pytest.raises(RuntimeError, match="linear_softmax_kl_div: the classes are sharded"):
        compile_losses.linear_softmax_kl_div(
            dtensor(*HIDDEN, placements=EVERYWHERE),
            dtensor(*LAYER),
            dtensor(*TEACHER, placements=[Shard(1)]),
            **{cap: 3.0},
        )


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
