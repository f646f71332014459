"""Losses and gradients of DTensors equal those of a single process, in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import compile_losses.ops  # noqa: F401
from tests.constants import set_constants
from tests.distributed.world import compare

fused = torch.ops.fused
NONE, MEAN, SUM = range(3)
REDUCTIONS = pytest.mark.parametrize("reduction", [NONE, MEAN, SUM], ids=("none", "mean", "sum"))


def rand(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def labels(*shape, classes, ignored=(), seed=1):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(classes, shape, generator=generator)
    target.view(-1)[list(ignored)] = -100
    return target


def check(loss, tensors, layouts, differentiable=(0,)):
    found = compare(loss, tensors, layouts, differentiable)
    assert max(found.values()) <= 1e-12, found


#: Of logits, rows by classes: uneven shards, empty ones, even ones.
SHAPES = [(7, 5), (3, 2), pytest.param((8, 12), marks=pytest.mark.slow)]

#: Of logits [N, C] and of target: rows, classes, both or neither sharded; sharded apart; Partial.
CLASS_LAYOUTS = [
    *(("0", "0"), ("1", "R"), ("R", "R"), ("P", "R"), ("P", "0"), ("0", "R"), ("R", "0")),
    ("1", "0"),
    *(("01", "0R"), ("10", "R0"), ("0R", "0R"), ("00", "00"), ("R1", "RR"), ("1P", "RR")),
    *(("P1", "0R"), ("0P", "00"), ("01", "00")),
]  # fmt: skip


@pytest.mark.sampled(3)
@REDUCTIONS
@pytest.mark.parametrize("options", ["plain", "weighted and smoothed"])
@pytest.mark.parametrize("layouts", CLASS_LAYOUTS, ids=" ".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_entropy(shape, layouts, options, reduction):
    rows, classes = shape
    # With rows 0 and 1 ignored a rank of four has none that counts.
    target = labels(rows, classes=classes, ignored=(0, 1))
    tensors, placed = [rand(rows, classes), target], list(layouts)
    smoothing = 0.0
    if options != "plain":
        tensors.append(rand(classes, seed=2).abs() + 0.1)
        placed.append("R0"[-len(layouts[0]) :])
        smoothing = 0.1

    def loss(input, target, weight=None):
        return fused.cross_entropy(input, target, weight, reduction, -100, smoothing)

    check(loss, tensors, placed)


@REDUCTIONS
@pytest.mark.parametrize("layouts", [("S", "S"), ("S", "R"), ("RS", "RS")], ids=" ".join)
def test_flattened_sequences(layouts, reduction):
    """Rows that are sharded with a stride."""
    tensors = [rand(8, 6), labels(8, classes=6, ignored=(0, 1))]
    check(lambda x, t: fused.cross_entropy(x, t, None, reduction), tensors, layouts)


@REDUCTIONS
@pytest.mark.parametrize("layouts", [("0", "0"), ("1", "R"), ("01", "0R")], ids=" ".join)
def test_all_rows_are_ignored(layouts, reduction):
    target = torch.full((5,), -1)
    check(
        lambda x, t: fused.cross_entropy(x, t, None, reduction, -1), [rand(5, 6), target], layouts
    )


@pytest.mark.sampled(2)
@REDUCTIONS
@pytest.mark.parametrize(
    "layouts",
    [("0", "0"), ("1", "R"), ("2", "1"), ("01", "0R"), ("21", "1R"), ("12", "R1"), ("3", "2")],
    ids=" ".join,
)  # fmt: skip
def test_cross_entropy_of_images(layouts, reduction):
    """Logits [N, C, H, W]: the rows lie side by side."""
    target = labels(3, 4, 5, classes=6, ignored=(0, 7, 50))
    check(
        lambda x, t: fused.cross_entropy(x, t, None, reduction, label_smoothing=0.2),
        [rand(3, 6, 4, 5), target],
        layouts,
    )


def test_cross_entropy_of_one_row():
    check(lambda x, t: fused.cross_entropy(x, t), [rand(10), torch.tensor(7)], ["0", "R"])


def logits_of_impossible_classes():
    """Shards of logits of -inf alone, a nan, an infinity."""
    logits = rand(6, 8)
    logits[0, :4] = -torch.inf
    logits[1, 4:] = -torch.inf
    logits[2, :] = -torch.inf
    logits[3, 5] = torch.nan
    logits[4, 2] = torch.inf
    return logits


@pytest.mark.parametrize("layouts", [("1", "R"), ("01", "0R")], ids=" ".join)
def test_impossible_classes(layouts):
    logits = logits_of_impossible_classes()
    target = torch.tensor([5, 1, 0, 2, 3, 4])
    check(lambda x, t: fused.cross_entropy(x, t, None, NONE), [logits, target], layouts)


def test_a_target_on_no_rank_is_refused():
    with pytest.raises(IndexError, match="target 9 is out of bounds for 8 classes"):
        check(fused.cross_entropy, [rand(4, 8), torch.tensor([0, 9, 1, 2])], ["1", "R"])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("layouts", [("1", "R"), ("01", "0R")], ids=" ".join)
def test_float32_far_from_zero(layouts, smoothing):
    """Logits near 700: with their logsumexp in one number gradients would be off by 5e-5."""
    logits, target = (rand(16, 64) * 3 + 700).float(), labels(16, classes=64)

    def loss(input, target):
        return fused.cross_entropy(input, target, None, SUM, -100, smoothing)

    def exact(input, target):
        return torch.nn.functional.cross_entropy(
            input.double(), target, reduction="sum", label_smoothing=smoothing
        )

    assert compare(loss, [logits, target], layouts, exact=exact)["grad 0"] <= 1e-6


ELEMENT_LAYOUTS = [
    *(("0", "0"), ("1", "1"), ("R", "R"), ("0", "R"), ("R", "0"), ("P", "0"), ("P", "R")),
    *(("01", "01"), ("00", "00"), ("0R", "R0"), ("S", "S"), ("10", "1R"), ("0P", "00")),
]  # fmt: skip
ELEMENTWISE = {
    "mse_loss": {},
    "l1_loss": {},
    "smooth_l1_loss": {"beta": 0.5},
    "huber_loss": {"delta": 0.5},
    "kl_div": {"log_target": True},
    "binary_cross_entropy_with_logits": {},
}


@pytest.mark.sampled(3)
@REDUCTIONS
@pytest.mark.parametrize("op", ELEMENTWISE)
@pytest.mark.parametrize("layouts", ELEMENT_LAYOUTS, ids=" ".join)
def test_elementwise(op, layouts, reduction):
    shape = (8, 6) if "S" in layouts[0] else (7, 5)
    loss = partial(getattr(fused, op), reduction=reduction, **ELEMENTWISE[op])
    check(loss, [rand(*shape), rand(*shape, seed=3)], layouts, (0, 1))


@pytest.mark.parametrize("layouts", [("0", "0"), ("1", "1"), ("01", "0R")], ids=" ".join)
def test_batchmean(layouts):
    tensors = [rand(7, 5), rand(7, 5, seed=3)]
    check(lambda a, b: fused.kl_div(a, b, 3, log_target=True), tensors, layouts, (0, 1))


@pytest.mark.sampled(2)
@REDUCTIONS
@pytest.mark.parametrize("shapes", [((7, 5), (5,)), ((7, 1), (1, 5)), ((7, 5), ())], ids=str)
@pytest.mark.parametrize("layout", ["0", "1", "01", "RR"])
def test_broadcasting(shapes, layout, reduction):
    """An argument that is broadcast along a sharded dimension has a part of its gradient."""
    tensors = [rand(*shape, seed=i) for i, shape in enumerate(shapes)]
    layouts = []
    for tensor in tensors:
        missing = 2 - tensor.dim()
        kept = (c if c != "R" and int(c) >= missing else "R" for c in layout)
        layouts.append("".join("R" if c == "R" else str(int(c) - missing) for c in kept))
    check(lambda a, b: fused.mse_loss(a, b, reduction), tensors, layouts, (0, 1))


@pytest.mark.sampled(3)
@REDUCTIONS
@pytest.mark.parametrize("op", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
@pytest.mark.parametrize(
    "layouts", [("0", "0", "0"), ("0", "0", "R"), ("10", "10", "RR")], ids=" ".join
)
@pytest.mark.parametrize("shape", [(7, 5), (5,), ()], ids=str)
def test_element_weights(shape, layouts, op, reduction):
    weight = rand(*shape, seed=5).abs() + 0.5
    layouts = (*layouts[:2], layouts[2] if len(shape) == 2 else "R" * len(layouts[0]))

    def loss(a, b, w):
        return getattr(fused, op)(a, b, reduction, weight=w)

    check(loss, [rand(7, 5), rand(7, 5, seed=3), weight], layouts, (0, 1, 2))


@REDUCTIONS
@pytest.mark.parametrize("layouts", [("0", "0"), ("10", "1R")], ids=" ".join)
def test_weights_of_binary_cross_entropy(layouts, reduction):
    tensors = [
        rand(7, 5),
        rand(7, 5, seed=1).sigmoid(),
        rand(5, seed=2).abs(),
        rand(7, 1, seed=3).abs(),
    ]
    placed = [*layouts, "R" * len(layouts[0]), "R" * len(layouts[0])]
    check(
        lambda a, b, w, p: fused.binary_cross_entropy_with_logits(a, b, w, p, reduction),
        tensors,
        placed,
    )


@REDUCTIONS
@pytest.mark.parametrize(
    "layouts", [("0", "0"), ("0R", "R0"), ("2", "2"), ("02", "02")], ids=" ".join
)
def test_class_probabilities(layouts, reduction):
    target = rand(5, 4, 6, seed=1).softmax(1)
    tensors = [rand(5, 4, 6), target, rand(4, seed=2).abs()]
    placed = [*layouts, "R" * len(layouts[0])]
    check(
        lambda x, q, w: fused.cross_entropy(x, q, w, reduction, label_smoothing=0.1),
        tensors,
        placed,
        (0, 1, 2),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduction", range(4))
@pytest.mark.parametrize(
    "layouts", [("0", "0"), ("0R", "R0"), ("01", "01"), ("P", "1")], ids=" ".join
)
@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b, reduction: fused.softmax_kl_div(a, b, reduction, temperature=2.0),
        lambda a, b, reduction: fused.softmax_js_div(a, b, reduction, beta=0.3, temperature=2.0),
        lambda a, b, reduction: fused.softmax_finite_kl_div(a, b, reduction, temperature=2.0),
        lambda a, b, reduction: fused.softmax_finite_kl_div(a, b, reduction, entropy=False),
    ],
    ids=["kl", "js", "finite kl", "finite cross entropy"],
)
def test_softmax_divergence(loss, layouts, reduction):
    tensors = [rand(5, 6, 4), rand(5, 6, 4, seed=1)]
    check(lambda a, b: loss(a, b, reduction), tensors, layouts, (0, 1))


@REDUCTIONS
@pytest.mark.parametrize(
    "layouts", [("0", "0"), ("0R", "R0"), ("P", "0"), ("S", "S")], ids=" ".join
)
def test_nll_loss(layouts, reduction):
    tensors = [rand(8, 6), labels(8, classes=6, ignored=(0, 1)), rand(6, seed=2).abs()]
    placed = [*layouts, "R" * len(layouts[0])]
    check(lambda x, t, w: fused.nll_loss(x, t, w, reduction), tensors, placed)


#: Of hidden, linear_weight and target.
LINEAR_LAYOUTS = [
    *("0 R 0", "R 0 R", "0 0 0", "P 0 R", "P R 0", "R R R", "1 0 R"),
    *("0R R0 0R", "0R R0 00", "00 R0 00", "R0 0R R0", "01 RR 0R", "0R R0 RR"),
]


@pytest.mark.sampled(3)
@REDUCTIONS
@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("layouts", LINEAR_LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_cross_entropy(shape, layouts, options, reduction, monkeypatch):

    set_constants(monkeypatch, least_rows=2, logits_bytes=1)
    rows, classes = shape
    placed = layouts.split()
    tensors = [
        rand(rows, 6),
        rand(classes, 6, seed=3),
        labels(rows, classes=classes, ignored=(0, 1)),
    ]
    differentiable = [0, 1]
    if options == "all":
        tensors += [rand(classes, seed=4), rand(classes, seed=5).abs() + 0.1]
        bias = placed[1]
        placed += [bias, "R" * len(bias)]
        differentiable.append(3)

    def loss(input, linear_weight, target, bias=None, weight=None):
        more = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.01} if options == "all" else {}
        return fused.linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=bias,
            weight=weight,
            reduction=reduction,
            **more,
        )

    check(loss, tensors, placed, differentiable)


@REDUCTIONS
@pytest.mark.parametrize("layouts", ["1R R0 1R", "01 RR 01", "0R R0 R1", "11 0R 11"])
def test_sequences(layouts, reduction):
    """Hidden [batch, sequence, features]: of batch or sequence, or both."""
    tensors = [rand(3, 5, 4), rand(6, 4, seed=3), labels(3, 5, classes=6, ignored=(0, 3))]
    check(
        lambda h, w, t: fused.linear_cross_entropy(h, w, t, reduction=reduction, z_loss=0.01),
        tensors,
        layouts.split(),
        (0, 1),
    )


@pytest.mark.parametrize("layouts", [("0", "0"), ("0R", "RR"), ("R", "R")], ids=" ".join)
@pytest.mark.parametrize("op", ["cross_entropy", "mse_loss"])
def test_second_derivatives_of_sharded_rows(op, layouts):
    """The gradient of a penalty on the gradient."""
    # Even shards: with others torch's own cross entropy can't be simulated.
    other = labels(8, classes=5, ignored=(0,)) if op == "cross_entropy" else rand(8, 5, seed=3)
    layouts = (layouts[0], layouts[1] if op == "cross_entropy" else layouts[0])

    def penalty(input, other):
        loss = getattr(fused, op)(input, other)
        (grad,) = torch.autograd.grad(loss, input, torch.ones_like(loss), create_graph=True)
        return (grad * grad).sum()

    check(penalty, [rand(8, 5), other], layouts)
