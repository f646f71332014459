"""Ranks and largest logits of each row by a linear layer, without its output and a gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_losses.linear import linear_log_probs
from compile_losses.ops.linear.row_statistics import (
    LOG_PROBS,
    LOG_SQUARES,
    RANK,
    TOP_INDICES,
    TOP_VALUES,
)
from compile_losses.ops.linear_row_statistics import in_order
from tests.accuracy import assert_accurate
from tests.linear_problems import largest_allocation

fused = torch.ops.fused
ROWS, HIDDEN, CLASSES, TOP = 60, 24, 37, 5

pytestmark = pytest.mark.usefixtures("chunks")


def problem(device="cpu", dtype=torch.float64, leading=(ROWS,)):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_()

    index = torch.randint(CLASSES, leading, generator=generator)
    return draw(*leading, HIDDEN), draw(CLASSES, HIDDEN), index.to(device), draw(CLASSES)


def logits_of(input, weight, bias, softcap=None, temperature=1.0):
    logits = F.linear(input, weight, bias).detach()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return logits / temperature


def ours(input, weight, index, bias=None, **options):
    _, *found = linear_log_probs(
        input, weight, index, bias, **options, return_log_squares=True, return_rank=True, top_k=TOP
    )
    return found


def torchs(input, weight, index, bias=None, **options):
    logits = logits_of(input, weight, bias, **options)
    own = logits.gather(-1, index.clamp(min=0).unsqueeze(-1))
    rank = torch.where(index < 0, -1, (logits > own).sum(-1))
    return [logits.log_softmax(-1).exp().square().sum(-1).log(), rank, *logits.topk(TOP)]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"softcap": 3.0, "temperature": 2.0}], ids=str
)
@pytest.mark.parametrize("leading", [(), (5,), (6, 15), (0, 3)], ids=str)
def test_against_torch(leading, options, device):
    input, weight, index, bias = problem(device, leading=leading)
    if index.dim() and index.numel():
        index.view(-1)[::4] = -100
    for tensors in ((input, weight, index), (input, weight, index, bias)):
        found = ours(*tensors, **options)
        torch.testing.assert_close(found, torchs(*tensors, **options), rtol=1e-12, atol=1e-12)
        assert not any(each.requires_grad for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_accuracy(dtype, device):
    input, weight, index, bias = problem(device, dtype)
    squares, rank, values, places = ours(input, weight, index, bias)
    exact = logits_of(input.double(), weight.double(), bias.double())
    of_torch = torchs(input, weight, index, bias)
    wide = torchs(input.double(), weight.double(), index, bias.double())
    assert values.dtype == squares.dtype == torch.float32
    assert_accurate(squares, of_torch[0], wide[0])
    assert_accurate(values, of_torch[2], wide[2])
    # The same logits, and no class is taken twice.
    torch.testing.assert_close(exact.gather(-1, places).float(), values, rtol=2e-2, atol=2e-2)
    assert all(len(set(row)) == TOP for row in places.tolist())
    if dtype == torch.float32:
        assert torch.equal(rank, wide[1])
        assert torch.equal(places, wide[3])


def test_ties(device):
    """Equal logits count if that is asked for; nan counts never."""
    input = torch.eye(4, device=device)
    rows = [[1.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0], [5.0, 1.0, 2.0, 2.0], [1.0, 2.0, 3.0, 0.0]]
    weight = torch.tensor(rows, device=device).t().contiguous()
    classes = torch.tensor([1, 0, 2, 3], device=device)
    layer = (input, weight, None, None, -100, None)
    found = [
        fused.linear_row_statistics_forward(*in_order(*layer, ranked=classes, ties=ties))[RANK]
        for ties in (False, True)
    ]
    assert [each.tolist() for each in found] == [[0, 0, 1, 3], [2, 4, 3, 4]]


def test_capped_logits_that_are_equal(device):
    """A soft-cap makes large logits equal, of which none is larger."""
    input = torch.eye(2, device=device)
    weight = torch.tensor([[200.0, 1.0], [300.0, 2.0], [-1.0, 3.0]], device=device)
    index = torch.zeros(2, dtype=torch.int64, device=device)
    _, rank = linear_log_probs(input, weight, index, softcap=2.0, return_rank=True)
    _, uncapped = linear_log_probs(input, weight, index, return_rank=True)
    assert rank.tolist() == [0, 2]
    assert uncapped.tolist() == [1, 2]


def test_several_classes_of_a_row(device):
    input, weight, _, bias = problem(device)
    several = torch.randint(CLASSES, (ROWS, 3), device=device)
    log_probs, values, places = linear_log_probs(input, weight, several, bias, top_k=TOP)
    logits = logits_of(input, weight, bias)
    torch.testing.assert_close((values, places), tuple(logits.topk(TOP)))
    torch.testing.assert_close(log_probs.detach(), logits.log_softmax(-1).gather(-1, several))


def test_gradients_beside(device):
    """The numbers change nothing in the results and gradients of others."""
    input, weight, index, bias = problem(device)
    found = []
    for options in ({}, {"return_rank": True, "top_k": 3}):
        result = linear_log_probs(input, weight, index, bias, return_entropy=True, **options)
        loss = (result[0].exp() + result[1].square()).sum()
        found.append([loss, *torch.autograd.grad(loss, (input, weight, bias))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_transforms():
    input, weight, index, _ = problem(leading=(4, 5))
    batched = torch.func.vmap(lambda x, i: tuple(ours(x, weight, i)))(input, index)
    torch.testing.assert_close([*batched], torchs(input, weight, index))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, no_code):
    def step(input, weight, index, bias):
        log_probs, rank, values, places = linear_log_probs(
            input, weight, index, bias, return_rank=True, top_k=TOP
        )
        margin = values[..., 0] - values[..., 1]
        return -log_probs.mean(), rank, margin, places

    tensors = problem()
    compiled = torch.compile(step, backend="compile_losses", fullgraph=True, dynamic=dynamic)
    leaves = [tensors[0], tensors[1], tensors[3]]
    results, expected = compiled(*tensors), step(*tensors)
    torch.testing.assert_close(results, expected)
    gradients = [torch.autograd.grad(found[0], leaves) for found in (results, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_opcheck(softcap, device, opcheck):
    input, weight, index, bias = problem(device, torch.float32, (20,))
    numbers = {"squares": True, "rank": True, "top_k": 3}
    opcheck(
        fused.linear_log_probs.default, (input, weight, index),
        {"linear_bias": bias, "softcap": softcap, **numbers},
    )  # fmt: skip
    arguments = in_order(
        input, weight, index, bias, -100, softcap, ranked=index, top_k=3, ties=True
    )
    opcheck(fused.linear_row_statistics_forward.default, arguments)
    each = torch.rand(20, device=device)
    gradients = (each, None, each, None, None, None)
    needs = (True, True, True)
    opcheck(fused.linear_row_statistics_backward.default, (*gradients, *arguments, *needs))


def test_what_nobody_asks_for_is_empty():
    input, weight, index, bias = problem()
    found = fused.linear_row_statistics_forward(*in_order(input, weight, index, bias, -100, None))
    for place in (LOG_PROBS, LOG_SQUARES, RANK, TOP_VALUES, TOP_INDICES):
        assert found[place].shape == (0,)


def test_no_logits_are_held():
    input, _, index, _ = problem(dtype=torch.float32)
    weight = torch.randn(8000, HIDDEN)
    assert largest_allocation(lambda: ours(input, weight, index)) < 2 * 16 * 8000 * 4  # of 60 rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": CLASSES + 1}, f"expected top_k from 0 to the number of classes, {CLASSES}, got"),
        ({"top_k": -1}, "expected top_k from 0 to"),
        ({"index": torch.zeros(ROWS, 2, dtype=torch.int64)}, "expected one class of each row with"),
    ],
)
def test_errors(change, message):
    input, weight, index, bias = problem()
    given = {"index": index, "return_rank": True} | change
    with pytest.raises(RuntimeError, match=f"linear_log_probs: {message}"):
        linear_log_probs(input, weight, bias=bias, **given)


def test_errors_of_the_op():
    input, weight, _, _ = problem()
    layer = (input, weight, None, None, -100, None)
    with pytest.raises(RuntimeError, match=r"expected ranked to be int64 of shape \[60\], got"):
        fused.linear_row_statistics_forward(*in_order(*layer, ranked=torch.zeros(3)))
    bad = torch.full((ROWS,), CLASSES)
    with pytest.raises(IndexError, match=f"pick {CLASSES} is out of bounds"):
        fused.linear_row_statistics_forward(*in_order(*layer, ranked=bad))
