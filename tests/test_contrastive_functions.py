"""Functions of contrastive losses: torch's values and gradients, without the matrix of pairs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from compile_losses import functional
from compile_losses.contrastive import contrastive_cross_entropy, contrastive_sigmoid_cross_entropy
from tests.accuracy import assert_accurate
from tests.contrastive_programs import autocast
from tests.heads import errors_on_similar
from tests.linear_problems import largest_allocation

fused = torch.ops.fused
ROWS, COLUMNS, HIDDEN = 40, 56, 8

pytestmark = pytest.mark.usefixtures("chunks")


def problem(dtype=torch.float64, device="cpu", columns=COLUMNS):
    """Embeddings, a scale, a bias of all logits, one of each column, and targets, labels, mask."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(device, dtype).requires_grad_()

    scale, bias = (torch.tensor(x, dtype=dtype, device=device) for x in (1.7, -1.3))
    of_columns = normal(columns)
    target = torch.randint(columns, (ROWS,), generator=generator)
    target[::7] = -100
    mask = torch.rand(ROWS, columns, generator=generator) < 0.3
    leaves = (normal(ROWS, HIDDEN), normal(columns, HIDDEN))
    each = (*leaves, scale.requires_grad_(), bias.requires_grad_(), of_columns)
    return (*each, target.to(device), mask.to(device))


def logits_of(a, b, scale, bias=0.0):
    return scale * a @ b.T + bias


def own(logits):
    return torch.arange(len(logits), device=logits.device)


def info_nce(a, b, scale, bias, of_columns, target, mask):
    return F.cross_entropy(logits_of(a, b, scale), own(a), label_smoothing=0.1)


def labelled(a, b, scale, bias, of_columns, target, mask):
    return F.cross_entropy(logits_of(a, b, scale, of_columns), target, reduction="sum")


def false_negatives(a, b, scale, bias, of_columns, target, mask):
    logits = logits_of(a, b, scale, of_columns)
    left_out = mask & (target.unsqueeze(1) != torch.arange(len(b), device=a.device))
    return F.cross_entropy(logits.masked_fill(left_out, -math.inf), target)


def each_row(a, b, scale, bias, of_columns, target, mask):
    logits = logits_of(a, b, scale)
    left_out = mask & (target.unsqueeze(1) != torch.arange(len(b), device=a.device))
    losses = F.cross_entropy(logits.masked_fill(left_out, -math.inf), target, reduction="none")
    return (losses * torch.linspace(0.5, 1, ROWS, device=a.device)).sum()


def clip(a, b, scale, bias, of_columns, target, mask):
    logits = logits_of(a, b[:ROWS], scale, of_columns[:ROWS])
    return (F.cross_entropy(logits, own(a)) + F.cross_entropy(logits.T, own(a))) / 2


def clip_masked(a, b, scale, bias, of_columns, target, mask):
    left_out = mask[:, :ROWS] & ~torch.eye(ROWS, dtype=torch.bool, device=a.device)
    logits = logits_of(a, b[:ROWS], scale).masked_fill(left_out, -math.inf)
    each = (F.cross_entropy(x, own(a), reduction="none") for x in (logits, logits.T))
    return (sum(each) / 2).square().sum()


def sigmoid_of(labels, logits, reduction="mean"):
    """As big_vision and open_clip write it."""
    losses = -F.logsigmoid(labels * logits).sum(1)
    return losses.mean() if reduction == "mean" else losses


def siglip(a, b, scale, bias, of_columns, target, mask):
    labels = 2 * torch.eye(ROWS, len(b), device=a.device, dtype=a.dtype) - 1
    return sigmoid_of(labels, logits_of(a, b, scale, bias))


def sigmoid_labels(a, b, scale, bias, of_columns, target, mask):
    labels = torch.where(mask, 1.0, -1.0).to(a.dtype)
    return sigmoid_of(labels, logits_of(a, b, scale, bias)) * ROWS


def sigmoid_rows(a, b, scale, bias, of_columns, target, mask):
    columns = torch.arange(len(b), device=a.device)
    labels = torch.where(target.unsqueeze(1) == columns, 1.0, -1.0).to(a.dtype)
    return sigmoid_of(labels, logits_of(a, b, scale), "none").square().mean()


def negatives(a, b, scale, bias, of_columns, target, mask):
    return sigmoid_of(-torch.ones_like(mask, dtype=a.dtype), logits_of(a, b, scale, bias))


def our_info_nce(a, b, scale, bias, of_columns, target, mask):
    return contrastive_cross_entropy(a, b, scale=scale, label_smoothing=0.1)


def our_labelled(a, b, scale, bias, of_columns, target, mask):
    return contrastive_cross_entropy(a, b, target, scale=scale, bias=of_columns, reduction="sum")


def our_false_negatives(a, b, scale, bias, of_columns, target, mask):
    return contrastive_cross_entropy(a, b, target, scale=scale, bias=of_columns, mask=mask)


def our_each_row(a, b, scale, bias, of_columns, target, mask):
    losses = contrastive_cross_entropy(a, b, target, scale=scale, mask=mask, reduction="none")
    return (losses * torch.linspace(0.5, 1, ROWS, device=a.device)).sum()


def our_clip(a, b, scale, bias, of_columns, target, mask):
    return contrastive_cross_entropy(
        a, b[:ROWS], scale=scale, bias=of_columns[:ROWS], symmetric=True
    )


def our_clip_masked(a, b, scale, bias, of_columns, target, mask):
    losses = contrastive_cross_entropy(
        a, b[:ROWS], scale=scale, mask=mask[:, :ROWS], symmetric=True, reduction="none"
    )
    return losses.square().sum()


def our_siglip(a, b, scale, bias, of_columns, target, mask):
    return contrastive_sigmoid_cross_entropy(a, b, scale=scale, bias=bias)


def our_sigmoid_labels(a, b, scale, bias, of_columns, target, mask):
    return contrastive_sigmoid_cross_entropy(a, b, mask, scale=scale, bias=bias, reduction="sum")


def our_sigmoid_rows(a, b, scale, bias, of_columns, target, mask):
    losses = contrastive_sigmoid_cross_entropy(a, b, target, scale=scale, reduction="none")
    return losses.square().mean()


def our_negatives(a, b, scale, bias, of_columns, target, mask):
    none = torch.full_like(target, -1)
    return contrastive_sigmoid_cross_entropy(a, b, none, scale=scale, bias=bias)


PAIRS = [
    (our_info_nce, info_nce),
    (our_labelled, labelled),
    (our_false_negatives, false_negatives),
    (our_each_row, each_row),
    (our_clip, clip),
    (our_clip_masked, clip_masked),
    (our_siglip, siglip),
    (our_sigmoid_labels, sigmoid_labels),
    (our_sigmoid_rows, sigmoid_rows),
    (our_negatives, negatives),
]


def outcome(function, inputs):
    leaves = [t for t in inputs if t.requires_grad]
    loss = function(*inputs)
    gradients = torch.autograd.grad(0.5 * loss, leaves, allow_unused=True)
    return [loss.detach(), *(each for each in gradients if each is not None)]


def check(ours, torchs, dtype, device, around=lambda f: f):
    inputs = problem(dtype, device)
    eager = around(torchs)
    likes = errors_on_similar(eager, inputs, outcome)
    wide = [t.detach().double() if t.is_floating_point() else t for t in inputs]
    wide = [w.requires_grad_(t.requires_grad) for w, t in zip(wide, inputs, strict=True)]
    found, expected, right = (
        outcome(around(ours), inputs),
        outcome(eager, inputs),
        outcome(torchs, wide),
    )
    for mine, theirs, exact, like in zip(found, expected, right, likes, strict=True):
        assert_accurate(mine, theirs.to(mine.dtype), exact, like=like)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_accuracy(ours, torchs, dtype, device):
    check(ours, torchs, dtype, device)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_autocast(ours, torchs, device):
    check(ours, torchs, torch.float32, device, autocast)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_compiled(ours, torchs):
    """In one graph."""
    inputs = problem()
    compiled = torch.compile(ours, backend="compile_losses", fullgraph=True)
    torch.testing.assert_close(outcome(compiled, inputs), outcome(torchs, inputs))


@pytest.mark.parametrize("ours", [our_false_negatives, our_each_row, our_siglip, our_sigmoid_rows])
def test_gradcheck(ours):
    *tensors, target, mask = problem()
    few = [tensors[0][:5], tensors[1][:7], *tensors[2:4], tensors[4][:7]]
    few = [each.detach().requires_grad_() for each in few]

    def function(*leaves):
        where = torch.where(target[:5] < 0, -1, target[:5] % 7)
        if ours is our_siglip:
            return contrastive_sigmoid_cross_entropy(*leaves[:2], scale=leaves[2], bias=leaves[3])
        if ours is our_sigmoid_rows:
            return contrastive_sigmoid_cross_entropy(*leaves[:2], where, reduction="none")
        return contrastive_cross_entropy(
            *leaves[:2], where, scale=leaves[2], bias=leaves[4], mask=mask[:5, :7],
            ignore_index=-1, reduction="none" if ours is our_each_row else "sum",
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, few)
    assert torch.autograd.gradgradcheck(function, few)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("reduction", [0, 1])
def test_opcheck(sigmoid, reduction):
    a, b, _, _, of_columns, target, mask = problem()
    options = {"bias": of_columns, "sigmoid": sigmoid, "reduction": reduction}
    if not sigmoid:
        options["mask"] = mask
    opcheck(fused.contrastive_loss.default, (a, b, target), options)
    more = (None if sigmoid else mask, reduction, -100, 0.0, sigmoid, torch.float64)
    arguments = (a, b, target, of_columns, *more)
    opcheck(fused.contrastive_pairs_forward.default, arguments)
    if reduction:
        opcheck(fused.contrastive_pairs_with_grad.default, (*arguments, True, True, True))


@pytest.mark.parametrize(
    "ours", [our_info_nce, our_clip, our_siglip, our_sigmoid_rows, our_negatives]
)
@pytest.mark.parametrize("compiles", [False, True])
def test_no_matrix_is_held(ours, compiles, chunks):
    chunks(8)
    inputs = problem()
    function = torch.compile(ours, backend="compile_losses") if compiles else ours
    outcome(function, inputs)
    most = largest_allocation(lambda: outcome(function, inputs))
    assert 0 < most <= 16 * COLUMNS * 8 < ROWS * ROWS * 8


def test_a_masked_positive_pair_is_kept():
    a, b, *_ = problem()
    every = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    losses = contrastive_cross_entropy(a, b, mask=every, reduction="none")
    torch.testing.assert_close(losses, torch.zeros_like(losses))


def test_large_logits():
    """Of pairs that are far apart no digits are lost, and none overflow."""
    a, b = (200 * torch.eye(4)[:, :3] for _ in range(2))
    loss = contrastive_sigmoid_cross_entropy(a, b, bias=-50.0, reduction="none")
    labels = 2 * torch.eye(4) - 1
    exact = -F.logsigmoid(labels.double() * (a.double() @ b.double().T - 50)).sum(1)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)


def test_numbers_as_scale_and_bias():
    a, b, *_ = problem(torch.float32)
    given = contrastive_sigmoid_cross_entropy(a, b, scale=2.0, bias=-3.0)
    tensors = contrastive_sigmoid_cross_entropy(
        a, b, scale=torch.tensor([2.0]), bias=torch.tensor([-3.0])
    )
    assert torch.equal(given, tensors)


def test_no_rows():
    a, b = torch.zeros(0, 4, requires_grad=True), torch.zeros(0, 4)
    for reduction in ("sum", "none", "mean"):
        loss = contrastive_sigmoid_cross_entropy(a, b, reduction=reduction)
        assert loss.sum() == 0


def test_under_func():
    a, b, *_ = (t.detach() for t in problem())
    batched = torch.func.vmap(lambda x: contrastive_sigmoid_cross_entropy(x, b))(a.view(4, 10, -1))
    apart = [contrastive_sigmoid_cross_entropy(x, b) for x in a.view(4, 10, -1)]
    torch.testing.assert_close(batched, torch.stack(apart))


def test_they_are_functions_of_the_package():
    assert functional.contrastive_cross_entropy is contrastive_cross_entropy
    assert {"contrastive_cross_entropy", "contrastive_sigmoid_cross_entropy"} <= {
        *functional.__all__
    }


A, B = torch.randn(4, 3), torch.randn(6, 3)
DIAGONAL = torch.arange(4)
MASK = torch.zeros(4, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((A[0], B), {}, RuntimeError, r"input of shape \[rows, hidden\]"),
        ((A, B[:, :2]), {}, RuntimeError, r"got \[4, 3\] and \[6, 2\]"),
        ((A, B.double()), {"mask": MASK}, RuntimeError, "input's dtype torch.float32, got"),
        ((B, A), {}, RuntimeError, "target for 6 rows and 4 columns, got None"),
        ((A, B), {"symmetric": True}, RuntimeError, "as many rows of input as of other"),
        ((A, A, DIAGONAL), {"symmetric": True}, RuntimeError, "no target with symmetric"),
        ((A, B, DIAGONAL[1:]), {}, ValueError, "target"),
        ((A, B, DIAGONAL[1:]), {"mask": MASK}, RuntimeError, r"target to be int64 \[4\], got"),
        ((A, B, DIAGONAL + 3), {"mask": MASK}, RuntimeError, "out of bounds"),
        ((A, B, DIAGONAL + 3), {}, IndexError, "out of"),
        ((A, B), {"mask": MASK.T}, RuntimeError, r"mask to be bool \[4, 6\], got torch.bool"),
        ((A, B), {"mask": MASK.float()}, RuntimeError, "mask to be bool"),
        ((A, B), {"mask": MASK, "label_smoothing": 0.1}, RuntimeError, "no mask with label_smoo"),
        ((A, B), {"mask": MASK, "bias": A[0]}, RuntimeError, r"bias of shape \[6\]"),
        ((A, B), {"scale": A[0]}, RuntimeError, "scale to be one number, got"),
        ((A, B), {"reduction": "batchmean"}, ValueError, "reduction"),
        ((A.long(), B.long()), {"mask": MASK}, NotImplementedError, "input to be float64"),
    ],
)
def test_errors_of_cross_entropy(arguments, options, error, message):
    with pytest.raises(error, match=message):
        contrastive_cross_entropy(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((A, B[:, :2]), {}, RuntimeError, r"got \[4, 3\] and \[6, 2\]"),
        ((A, B.double()), {}, RuntimeError, "input's dtype torch.float32, got"),
        ((B, A), {}, RuntimeError, "target for 6 rows and 4 columns, got None"),
        ((A, B, MASK.T), {}, RuntimeError, r"int64 \[4\], or \[4, 6\], got torch.bool \[6, 4\]"),
        ((A, B, DIAGONAL.float()), {}, RuntimeError, "target to be int64"),
        ((A, B, DIAGONAL + 3), {}, RuntimeError, "out of bounds"),
        ((A, B), {"bias": A[0]}, RuntimeError, "bias to be one number, got"),
        ((A, B), {"reduction": "each"}, ValueError, "reduction"),
        ((A.long(), B.long()), {}, NotImplementedError, "input to be float64"),
    ],
)
def test_errors_of_sigmoid(arguments, options, error, message):
    with pytest.raises(error, match=message):
        contrastive_sigmoid_cross_entropy(*arguments, **options)
