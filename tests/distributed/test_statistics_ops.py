"""The ops behind statistics of sharded classes, called on plain tensors: accuracy, opcheck."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import compile_losses.ops  # noqa: F401
from compile_losses.ops.row_statistics import entropy_of
from compile_losses.ops.vocabulary_parallel_statistics import Merged
from tests.accuracy import assert_accurate
from tests.constants import set_constants
from tests.linear_problems import LargestStorage

fused = torch.ops.fused
ROWS, HIDDEN, CLASSES, SHARDS = 9, 24, 37, 4
IGNORED = -1
#: As torch.chunk deals them out.
PART = -(-CLASSES // SHARDS)
BOUNDS = [(i * PART, min((i + 1) * PART, CLASSES)) for i in range(SHARDS)]


def problem(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype)

    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[::4] = IGNORED
    return draw(ROWS, HIDDEN), draw(CLASSES, HIDDEN), target.to(device), draw(CLASSES)


def gathered(own, target):
    merged = Merged(torch.stack(own), CLASSES)
    return -merged.nll(target, IGNORED), merged.entropy, merged.stats


def of_layer(input, weight, target, bias, grads, softcap=None):
    """By shards: log-probabilities, entropies and the gradients of a linear layer."""
    options = (CLASSES, IGNORED, softcap)
    layers = [(weight[a:b], target, bias[a:b]) for a, b in BOUNDS]
    own = [
        fused.vocabulary_parallel_linear_statistics(input, *layer, first, *options)
        for layer, (first, _) in zip(layers, BOUNDS, strict=True)
    ]
    log_probs, entropy, stats = gathered(own, target)
    found = [
        fused.vocabulary_parallel_linear_statistics_gradient(
            -grads[0], grads[1], input, *layer, stats, first, *options, True, True, True
        )
        for layer, (first, _) in zip(layers, BOUNDS, strict=True)
    ]
    of_input = sum(g.double() for g, _, _ in found).to(input.dtype)
    return log_probs, entropy, of_input, *(torch.cat([g[i] for g in found]) for i in (1, 2))


def torchs(input, weight, target, bias, grads, softcap=None):
    tensors = [t.detach().requires_grad_() for t in (input, weight, bias)]
    logits = F.linear(tensors[0], tensors[1], tensors[2])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    picked = F.log_softmax(logits, -1).gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    picked = torch.where(target == IGNORED, 0, picked)
    results = picked, entropy_of(logits)
    total = sum((r * g.to(r.dtype)).sum() for r, g in zip(results, grads, strict=True))
    return *(r.detach() for r in results), *torch.autograd.grad(total, tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_accuracy_of_a_layer(softcap, dtype, device, monkeypatch):
    set_constants(monkeypatch, least_rows=4, logits_bytes=1)
    tensors = problem(dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    grads = [torch.linspace(a, 1.5, ROWS, device=device, dtype=wide) for a in (0.5, -1.0)]
    ours = of_layer(*tensors, grads, softcap)
    eager = torchs(*tensors, grads, softcap)
    exact = torchs(*(t.double() if t.is_floating_point() else t for t in tensors), grads, softcap)
    for i, (a, b, true) in enumerate(zip(ours, eager, exact, strict=True)):
        assert a.dtype == (wide if i < 2 else dtype)
        assert_accurate(a, b.to(a.dtype), true, f"result {i}")


def of_logits(logits, target, index, grads):
    """By shards: the log-probabilities of one class and of several, and the entropy."""
    shards = [(logits[:, a:b], a) for a, b in BOUNDS]
    own = [
        fused.vocabulary_parallel_statistics(x, target, index, a, CLASSES, IGNORED)
        for x, a in shards
    ]
    log_probs, entropy, stats = gathered(own, target)
    several = Merged(torch.stack(own), CLASSES).log_probs(index)
    gradient = fused.vocabulary_parallel_statistics_gradient
    found = [
        gradient(
            -grads[0], grads[1], grads[2], x, target, index, stats, a, CLASSES, IGNORED
        )
        for x, a in shards
    ]  # fmt: skip
    return log_probs, entropy, several, torch.cat(found, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_accuracy_of_logits(scale, dtype, device):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, CLASSES, generator=generator, dtype=torch.float64) * scale
    logits = logits.to(device, dtype)
    *_, target, _ = problem(dtype, device)
    index = torch.randint(CLASSES, (ROWS, 3), generator=generator).to(device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    grads = [torch.linspace(a, 1.5, ROWS, device=device, dtype=wide) for a in (0.5, -1.0)]
    grads.append(torch.linspace(0.1, 1.0, ROWS * 3, device=device, dtype=wide).view(ROWS, 3))

    def expected(x):
        x = x.detach().requires_grad_()
        logarithms = F.log_softmax(x.to(torch.promote_types(x.dtype, torch.float32)), -1)
        picked = logarithms.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
        picked = torch.where(target == IGNORED, 0, picked)
        results = picked, entropy_of(logarithms), logarithms.gather(1, index)
        total = sum((r * g.to(r.dtype)).sum() for r, g in zip(results, grads, strict=True))
        return *(r.detach() for r in results), torch.autograd.grad(total, x)[0]

    ours = of_logits(logits, target, index, grads)
    eager, exact = expected(logits), expected(logits.double())
    for i, (a, b, true) in enumerate(zip(ours, eager, exact, strict=True)):
        assert a.dtype == (wide if i < 3 else dtype)
        assert_accurate(a, b.to(a.dtype), true.double(), f"result {i}")


@pytest.mark.parametrize("bounds", [(10, 20), (37, 37)], ids=str)
def test_opcheck(bounds):
    """Of a shard with classes, and of an empty one."""
    input, weight, target, bias = problem(torch.float32)
    first, last = bounds
    layer = (input, weight[first:last], target, bias[first:last])
    options = (first, CLASSES, IGNORED, 4.0)
    statistics = fused.vocabulary_parallel_linear_statistics
    opcheck(statistics.default, (*layer, *options))
    stats, grads = torch.rand(ROWS, 3), (torch.rand(ROWS), torch.rand(ROWS))
    for given in (grads, (grads[0], None), (None, grads[1])):
        for needs in ((True, True, True), (True, False, False), (False, True, False)):
            opcheck(
                fused.vocabulary_parallel_linear_statistics_gradient.default,
                (*given, *layer, stats, *options, *needs),
            )
    logits, index = torch.randn(ROWS, last - first), torch.randint(CLASSES, (ROWS, 3))
    shard = (first, CLASSES, IGNORED)
    gradient = fused.vocabulary_parallel_statistics_gradient.default
    for picks, of_picks in (((target, None), (grads[0], grads[1], None)),
                            ((None, index), (None, grads[1], torch.rand(ROWS, 3))),
                            ((None, None), (None, grads[1], None))):  # fmt: skip
        opcheck(fused.vocabulary_parallel_statistics.default, (logits, *picks, *shard))
        opcheck(gradient, (*of_picks, logits, *picks, stats, *shard))


def test_the_same_bits(device, monkeypatch):
    set_constants(monkeypatch, least_rows=4, logits_bytes=1)
    tensors = problem(torch.float32, device)
    grads = [torch.ones(ROWS, device=device)] * 2
    runs = [of_layer(*tensors, grads) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_no_logits_of_all_rows(monkeypatch):
    """The largest tensor that the forward and the backward make is smaller than a rank's logits."""
    set_constants(monkeypatch, least_rows=4, logits_bytes=1)
    rows, classes = 64, 400
    from compile_losses.ops.linear import vocabulary_parallel_statistics as leaf_ops

    input, weight = torch.randn(rows, 2), torch.randn(classes // 4, 2)
    target, ones = torch.randint(classes // 4, (rows,)), torch.ones(rows)
    with LargestStorage() as largest:
        options = (None, 0, classes, IGNORED, None)
        own = leaf_ops.statistics_kernel(input, weight, target, *options)
        stats = Merged(own.unsqueeze(0), classes).stats
        rest = (None, stats, *options[1:], True, True, False)
        leaf_ops.gradient_kernel(ones, ones, input, weight, target, *rest)
    assert largest.bytes == 16 * (classes // 4) * 4  # a CPU takes 16 rows or more at a time


def test_errors():
    input, weight, target, _ = problem(torch.float32)
    with pytest.raises(IndexError, match="target 40 is out of bounds"):
        fused.vocabulary_parallel_linear_statistics(
            input, weight[:10], target.clamp(min=40), None, 0, CLASSES, IGNORED, None
        )
    with pytest.raises(IndexError, match="target 40 is out of bounds"):
        fused.vocabulary_parallel_statistics(
            input[:, :0], target.clamp(min=40), None, CLASSES, CLASSES, IGNORED
        )
    with pytest.raises(RuntimeError, match="is not differentiable"):
        fused.vocabulary_parallel_statistics(
            input.requires_grad_(), None, None, 0, CLASSES, IGNORED
        )
