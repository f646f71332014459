"""Log-probabilities and other numbers of a row are the same bits, whatever else is computed.

Reinforcement learning divides the probabilities of a pass without gradients by those of a training
pass. Where the weights are equal the ratio has to be exactly 1.
"""

from __future__ import annotations

import pytest
import torch

import compile_losses
from compile_losses import library, switches
from compile_losses.linear import linear_log_probs
from compile_losses.ops import linear_row_statistics
from compile_losses.ops.linear import matrix_products
from compile_losses.ops.linear.row_function import encode
from compile_losses.ops.linear.row_statistics import COUNT, ENTROPY, LOG_SQUARES, NLL

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
ROWS, HIDDEN, CLASSES = 75, 33, 777


def problem(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in (ROWS, CLASSES)
    )
    return hidden, weight, torch.randint(CLASSES, (ROWS,), generator=generator)


def arguments(hidden, weight, target):
    return linear_row_statistics.in_order(hidden, weight, target, None, -100, None, squares=True)


def numbers(statistics):
    """[rows, 3], the log-probabilities first."""
    return torch.stack([statistics[place] for place in (NLL, ENTROPY, LOG_SQUARES)], 1)


def forward(hidden, weight, target):
    return numbers(linear_row_statistics.forward(*arguments(hidden, weight, target)))


def with_gradients(hidden, weight, target):
    given = arguments(hidden, weight, target)
    text, ones = encode([], [COUNT, *[None] * 5]), hidden.new_ones(len(hidden))
    op = linear_row_statistics.rows_with_grad
    return numbers(op(*given, True, True, False, text, [ones]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_plans_and_chunks(dtype, chunks):
    given, found = problem(dtype), []
    for rows in (16, 32, 48, 64):
        chunks(rows)
        found += [forward(*given), with_gradients(*given)]
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows(dtype):
    """Which are one chunk in all plans."""
    for count in (1, 2, 3, 7, 30):
        hidden, weight, target = (x[:count] if len(x) == ROWS else x for x in problem(dtype))
        assert torch.equal(forward(hidden, weight, target), with_gradients(hidden, weight, target))


def same(found, expected):
    """Whether rows of two batches have the same bits.

    Of float64 only the log-probabilities: the last bit of a few classes' logits depends on where a
    row stands in a CPU's product, and sums over all classes show it.
    """
    if found.dtype == torch.float64:
        found, expected = found[:, 0], expected[:, 0]
    return torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches(dtype, chunks):
    """A row's bits are the same in another batch and in another place of it."""
    chunks(16)
    hidden, weight, target = problem(dtype)
    whole, order = forward(hidden, weight, target), torch.randperm(ROWS)
    assert same(forward(hidden[order], weight, target[order]), whole[order])
    for rows in (slice(0, 16), slice(5, 30), slice(50, 75)):
        assert same(forward(hidden[rows], weight, target[rows]), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_step(dtype, chunks, no_code):
    """The gradients in the forward, by row; eager code; and a pass without gradients."""
    chunks(16)
    hidden, weight, target = problem(dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    told = []

    def step(hidden, weight, target, before):
        log_probs = linear_log_probs(hidden, weight, target)
        ratio = (log_probs - before).exp()
        return -(ratio * 0.5).mean(), ratio.detach()

    with torch.no_grad():
        before = linear_log_probs(hidden, weight, target)
    compile_losses.counters().clear()
    for function in (step, torch.compile(step, backend="compile_losses")):
        loss, ratio = function(hidden, weight, target, before)
        loss.backward()
        told.append(ratio)
    assert compile_losses.counters()["plan"]["gradient in forward by row"] == 1
    assert all(bool((ratio == 1).all()) for ratio in told)


@pytest.fixture
def batch_invariant(monkeypatch):
    monkeypatch.setattr(switches, "_batch_invariant", True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_of_any_batch(dtype, batch_invariant):
    """Which are padded on a CPU if the option asks for it."""
    hidden, weight, target = problem(dtype)
    whole = forward(hidden, weight, target)
    for count in (1, 2, 7, 30):
        some = slice(3, 3 + count)
        assert same(forward(hidden[some], weight, target[some]), whole[some])


def of_cross_entropy(hidden, weight, target):
    return torch.ops.fused.linear_cross_entropy(hidden, weight, target, reduction=0)


def test_warning_without_kernels(batch_invariant, monkeypatch):
    monkeypatch.setattr(library, "no_kernels", lambda device: "none for it")
    matrix_products._warn_of_sums.cache_clear()
    hidden = torch.empty(4, 8, device="meta")
    with pytest.warns(UserWarning, match="expected kernels for meta, and there are none"):
        layout = matrix_products._layout(hidden, 4)
    assert layout.piece == matrix_products.PIECE


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("loss", [forward, of_cross_entropy])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("features", "classes"),
    [(896, 151936), (1024, 50257), (4096, 32000), (2048, 128256), (256, 1000)],
)
def test_heads_on_a_gpu(features, classes, dtype, loss, batch_invariant):
    """As many rows, features and classes as models have."""
    rows, options = 2500, {"device": "cuda", "dtype": dtype}
    hidden = torch.randn(rows, features, **options)
    weight = torch.randn(classes, features, **options) * features**-0.5
    target = torch.randint(classes, (rows,), device="cuda")
    different, whole = [], loss(hidden, weight, target)
    if loss is forward and not torch.equal(with_gradients(hidden, weight, target), whole):
        different.append("gradients")
    order = torch.randperm(rows, device="cuda")
    if not torch.equal(loss(hidden[order], weight, target[order]), whole[order]):
        different.append("order")
    for count in (1, 5, 16, 33, 128, 700, 1025, 2049):
        some = slice(7, 7 + count)
        if not torch.equal(loss(hidden[some], weight, target[some]), whole[some]):
            different.append(count)
    assert not different


def test_the_option(monkeypatch):
    """At both doors, for all of the process, until it is given otherwise."""
    monkeypatch.setattr(switches, "_batch_invariant", None)
    assert not switches.is_batch_invariant()
    monkeypatch.setenv("COMPILE_LOSSES_BATCH_INVARIANT", "1")
    assert switches.is_batch_invariant()
    with compile_losses.enable(batch_invariant=False):
        assert not switches.is_batch_invariant()
    torch.compile(lambda x: x + 1, backend="compile_losses", options={"batch_invariant": True})(
        torch.ones(2)
    )
    assert switches.is_batch_invariant()


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces(dtype, batch_invariant, monkeypatch):
    """Products of a piece of rows each, as on a GPU, in rows of logits with gaps between them."""
    hidden, weight, target = problem(dtype)
    hidden.requires_grad_()
    weight.requires_grad_()

    def results():
        log_probs = linear_log_probs(hidden, weight, target)
        loss = of_cross_entropy(hidden, weight, target) * torch.arange(ROWS)
        total = (log_probs * log_probs).sum() + loss.sum()
        return [log_probs, loss, *torch.autograd.grad(total, [hidden, weight])]

    expected = results()
    layouts = []

    def layout(*_):
        layouts.append(matrix_products.Layout(16, 16, 8))
        return layouts[-1]

    monkeypatch.setattr(matrix_products, "_layout", layout)
    rtol = {torch.bfloat16: 0.02, torch.float32: 1e-4, torch.float64: 1e-12}[dtype]
    for found, exact in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=rtol, atol=rtol)
    assert layouts
