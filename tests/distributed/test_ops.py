"""The ops of a shard of the classes, called on plain tensors: opcheck, layouts, dtypes, errors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.library import opcheck

import compile_losses.ops  # noqa: F401

fused = torch.ops.fused
CLASSES = 11
#: Where the shards of the classes begin; one of them is empty.
BOUNDS = (0, 4, 8, 8, 11)
SUM, NONE = 2, 0
#: Shapes of logits, and what is done to them.
LAYOUTS = {
    "rows": ((7, CLASSES), lambda x: x),
    "transposed": ((CLASSES, 7), lambda x: x.t()),
    "images": ((2, CLASSES, 3, 4), lambda x: x),
    "channels last": ((2, CLASSES, 3, 4), lambda x: x.to(memory_format=torch.channels_last)),
    "sliced": ((7, 2 * CLASSES), lambda x: x[:, ::2]),
    "one row": ((CLASSES,), lambda x: x),
    "many lanes": ((1, CLASSES, 150), lambda x: x),
    "no rows": ((0, CLASSES), lambda x: x),
}


def problem(layout, dtype, *, weighted=False, device="cpu"):
    shape, arrange = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    logits = arrange(values.to(device, dtype))
    dim = 0 if logits.dim() == 1 else 1
    rows = [*logits.shape[:dim], *logits.shape[dim + 1 :]]
    target = torch.randint(CLASSES, rows, generator=generator)
    if target.numel() > 2:
        target.view(-1)[1] = -100
    weight = torch.rand(CLASSES, generator=generator, dtype=torch.float64) if weighted else None
    return logits, dim, target.to(device), None if weight is None else weight.to(device)


def by_shards(logits, dim, target, weight, reduction, smoothing, grad_output):
    """Loss and gradient through the three ops."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    shards = list(pairwise(BOUNDS))
    options = (-100, smoothing)
    parts, masses = [], []
    for begin, end in shards:
        own = logits.narrow(dim, begin, end - begin)
        parts.append(fused.vocabulary_parallel_parts(own, target, weight, begin, CLASSES, *options))
        every = logits.new_ones(CLASSES, dtype=wide) if weight is None else weight
        masses.append(every[begin:end].sum())
    loss, stats, total = fused.vocabulary_parallel_merge(
        torch.stack(parts), target, weight, torch.stack(masses), CLASSES, reduction, *options, wide
    )
    gradients = [
        fused.vocabulary_parallel_gradient(
            grad_output.to(wide), logits.narrow(dim, begin, end - begin), target, weight, stats,
            begin, CLASSES, reduction, *options,
        )
        for begin, end in shards
    ]  # fmt: skip
    over = logits.clone()
    for begin, end in shards:
        fused.vocabulary_parallel_gradient_(
            grad_output.to(wide), over.narrow(dim, begin, end - begin), target, weight, stats,
            begin, CLASSES, reduction, *options,
        )  # fmt: skip
    gradient = torch.cat(gradients, dim)
    assert torch.equal(over, gradient)
    return loss, gradient, total


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [NONE, SUM])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_make_the_whole(layout, reduction, weighted, smoothing, dtype, device):
    logits, dim, target, weight = problem(layout, dtype, weighted=weighted, device=device)
    exact = logits.double().detach().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        exact, target, weight, reduction=("none", "mean", "sum")[reduction],
        label_smoothing=smoothing,
    )  # fmt: skip
    grad_output = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64)
    grad_output = grad_output.view(expected.shape).to(device)
    expected.backward(grad_output)
    loss, gradient, total = by_shards(
        logits, dim, target, weight, reduction, smoothing, grad_output
    )
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert torch.allclose(loss.double(), expected, rtol=64 * wide, atol=64 * wide)
    eps = torch.finfo(dtype).eps
    assert gradient.dtype == dtype
    assert torch.allclose(gradient.double(), exact.grad, rtol=4 * eps, atol=4 * eps)
    kept = target[target != -100]
    count = kept.numel() if weight is None else weight[kept].sum()
    assert abs(total - count) <= 64 * wide * max(1, kept.numel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_squared_logsumexp(layout, by_row, smoothing, softcap, dtype, device):
    """Its gradient, added to a weighted cross entropy's. Ignored rows have none."""
    logits, dim, target, weight = problem(layout, dtype, weighted=True, device=device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    grad_output, grad_squares = (
        torch.linspace(first, 1.5, target.numel(), dtype=torch.float64, device=device)
        .view(target.shape)
        .to(wide)
        for first in (0.5, -0.2)
    )
    if not by_row:
        grad_squares = torch.tensor(0.3, dtype=wide, device=device)
    exact = logits.double().detach().requires_grad_()
    capped = exact if softcap is None else softcap * torch.tanh(exact / softcap)
    loss = torch.nn.functional.cross_entropy(
        capped, target, weight, reduction="none", label_smoothing=smoothing
    )
    squares = capped.logsumexp(dim).square() * (target != -100)
    ((loss * grad_output).sum() + (squares * grad_squares).sum()).backward()
    options = (0, CLASSES, -100, smoothing)
    weight = weight.to(wide)
    parts = fused.vocabulary_parallel_parts(logits, target, weight, *options, softcap)
    _, stats, _ = fused.vocabulary_parallel_merge(
        parts.unsqueeze(0), target, weight, weight.sum().reshape(1), CLASSES, NONE, -100, smoothing,
        wide,
    )  # fmt: skip
    over, gradients = logits.clone(), []
    for begin, end in pairwise(BOUNDS):
        given = (target, weight, stats, begin, CLASSES, NONE, -100, smoothing, softcap)
        own = logits.narrow(dim, begin, end - begin)
        gradients.append(fused.vocabulary_parallel_gradient(grad_output, own, *given, grad_squares))
        own = over.narrow(dim, begin, end - begin)
        fused.vocabulary_parallel_gradient_(grad_output, own, *given, grad_squares)
    gradient = torch.cat(gradients, dim)
    assert torch.equal(over, gradient)
    eps = torch.finfo(dtype).eps
    assert torch.allclose(gradient.double(), exact.grad, rtol=4 * eps, atol=4 * eps)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_opcheck(layout, smoothing):
    logits, dim, target, weight = problem(layout, torch.float32, weighted=True)
    weight = weight.float()
    own = logits.narrow(dim, 4, 4)
    options = (-100, smoothing)
    opcheck(fused.vocabulary_parallel_parts.default, (own, target, weight, 4, CLASSES, *options))
    parts = fused.vocabulary_parallel_parts(logits, target, weight, 0, CLASSES, *options)
    masses = weight.sum().reshape(1)
    arguments = (target, weight, masses, CLASSES, SUM, *options, torch.float32)
    opcheck(fused.vocabulary_parallel_merge.default, (parts.unsqueeze(0), *arguments))
    _, stats, _ = fused.vocabulary_parallel_merge(parts.unsqueeze(0), *arguments)
    arguments = (own, target, weight, stats, 4, CLASSES, SUM, *options)
    for squares in (None, torch.ones(())):
        given = (torch.ones(()), *arguments, None, squares)
        opcheck(fused.vocabulary_parallel_gradient.default, given)
        opcheck(fused.vocabulary_parallel_gradient_.default, given)


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)])
def test_opcheck_linear(needs):
    generator = torch.Generator().manual_seed(0)
    input, head = torch.randn(7, 3, generator=generator), torch.randn(4, 3, generator=generator)
    bias, weight = torch.randn(4, generator=generator), torch.rand(CLASSES, generator=generator)
    target = torch.randint(CLASSES, (7,), generator=generator)
    tensors, shard = (input, head, target, bias, weight), (4, CLASSES)
    options = (-100, 0.1, 5.0)
    opcheck(fused.vocabulary_parallel_linear_parts.default, (*tensors, *shard, *options))
    stats = torch.tensor([[1.0, 2.0]]).expand(7, 2).contiguous()
    for squares in (None, torch.ones(7), torch.ones(())):
        opcheck(
            fused.vocabulary_parallel_linear_gradient.default,
            (torch.ones(()), squares, *tensors, stats, *shard, SUM, *options, *needs),
        )


def test_the_same_bits(device):
    arguments = problem("rows", torch.float32, device=device)
    grad_output = torch.ones((), device=device)
    runs = [by_shards(*arguments, SUM, 0.1, grad_output) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_errors():
    logits, _, target, weight = problem("rows", torch.float32, weighted=True)
    own = logits[:, :4]
    parts = fused.vocabulary_parallel_parts(own, target, None, 0, CLASSES, -100, 0.0)
    with pytest.raises(IndexError, match="is out of bounds for 11 classes"):
        fused.vocabulary_parallel_parts(own, target + 11, None, 0, CLASSES, -100, 0.0)
    with pytest.raises(RuntimeError, match="expected first_class to be one of 11 classes, got 12"):
        fused.vocabulary_parallel_parts(own, target, None, 12, CLASSES, -100, 0.0)
    with pytest.raises(RuntimeError, match=r"expected weight of shape \[11\], got \[4\]"):
        fused.vocabulary_parallel_parts(own, target, weight[:4], 0, CLASSES, -100, 0.0)
    merge = fused.vocabulary_parallel_merge
    with pytest.raises(RuntimeError, match=r"expected parts of shape \[shards, 7, 3\]"):
        merge(parts, target, None, None, CLASSES, SUM, -100, 0.0, torch.float32)
    wide = torch.cat([parts, parts[:, :1]], 1).unsqueeze(0)
    with pytest.raises(RuntimeError, match="expected shard_weights of shape"):
        merge(wide, target, None, None, CLASSES, SUM, -100, 0.1, torch.float32)
    stats = torch.zeros(7, 2)
    with pytest.raises(RuntimeError, match=r"expected reduction to be 0 \(none\) or 2 \(sum\)"):
        fused.vocabulary_parallel_gradient(
            torch.ones(()), own, target, None, stats, 0, CLASSES, 1, -100, 0.0
        )
    with pytest.raises(RuntimeError, match=r"expected stats as vocabulary_parallel_merge returns"):
        fused.vocabulary_parallel_gradient_(
            torch.ones(()), own, target, None, stats[1:], 0, CLASSES, SUM, -100, 0.0
        )
    with pytest.raises(
        RuntimeError, match=r"expected grad_squares of shape \[\] or \[7\], got \[6\]"
    ):
        fused.vocabulary_parallel_gradient(
            torch.ones(()), own, target, None, stats, 0, CLASSES, SUM, -100, 0.0, None, stats[1:, 0]
        )
    with pytest.raises(RuntimeError, match="is not differentiable"):
        fused.vocabulary_parallel_parts(own.requires_grad_(), target, None, 0, CLASSES, -100, 0.0)
