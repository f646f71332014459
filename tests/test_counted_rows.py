"""Rows that do not count are left out of a head, and what is computed stays the same."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses.ops.counted_rows import CountedRows
from tests.constants import set_constants
from tests.corpus.masks import COUNTED, WHOLE, drawn, masked_problem
from tests.corpus.rows import CLASSES, masked_mean
from tests.heads import IN_THE_FORWARD, SCALED
from tests.linear_problems import known_text, leaves
from tests.test_row_gradients import check, outcome

fused = torch.ops.fused
LEFT_OUT = "of those with"


@pytest.fixture
def small_heads(no_code, chunks, kernels_for_small_losses, monkeypatch):
    """Small heads are taken, a GPU's host waits for them, and Inductor's code adds nothing."""
    set_constants(monkeypatch, operations_worth_waiting=0)


@pytest.fixture
def kept(monkeypatch):
    """How many rows each head of a compiled step has computed; None if all."""
    found, indices = [], CountedRows.indices

    def noted(self):
        result = indices(self)
        found.append(None if result is None else result.tolist())
        return result

    monkeypatch.setattr(CountedRows, "indices", noted)
    return found


def masks_of(inputs):
    _, _, labels, mask, advantages, old = inputs
    return labels, mask.bool(), advantages.expand_as(mask), old


@pytest.mark.usefixtures("small_heads")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", COUNTED)
def test_left_out(name, frozen, kept, device):
    function, counts = COUNTED[name]
    inputs = masked_problem(frozen=frozen, device=device)
    (site,) = check(function, inputs)
    assert site.plan[0] in ((SCALED, IN_THE_FORWARD) if frozen else (IN_THE_FORWARD,))
    assert LEFT_OUT in site.details[0]
    rows = counts(*masks_of(inputs)).flatten().nonzero().squeeze(1).tolist()
    assert 0 < len(rows) < inputs[2].numel() * 7 / 8
    assert kept
    assert all(each == rows for each in kept)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("small_heads")
@pytest.mark.parametrize("name", COUNTED)
def test_accuracy(name, device):
    check(COUNTED[name][0], masked_problem(torch.bfloat16, device=device))


@pytest.mark.usefixtures("small_heads")
@pytest.mark.parametrize("name", WHOLE)
def test_all_rows(name, kept, device):
    inputs = masked_problem(device=device)
    sites = check(WHOLE[name], inputs)
    labels = inputs[2].flatten()
    ignored = (labels != -100).nonzero().squeeze(1).tolist()
    # Labels that are ignored are the loss's own; no mask leaves more rows out.
    assert all(each is None or each == ignored for each in kept)
    assert sites


@pytest.mark.usefixtures("small_heads")
@pytest.mark.parametrize("count", [0, 1, 5, 62, 63, 64, 72])
def test_how_many_count(count, kept, device):
    """None of them, one, as many as are still left out, and more."""
    h, w, labels, mask, *others = masked_problem(device=device)
    labels = labels.clamp(min=0)
    flat = torch.zeros(mask.numel(), dtype=mask.dtype, device=device)
    flat[torch.randperm(72, generator=torch.Generator().manual_seed(0))[:count].to(device)] = 1

    def step(h, w, labels, mask, advantages, old):
        each = F.cross_entropy(F.linear(h, w).view(-1, CLASSES), labels.view(-1), reduction="none")
        return (each * mask.view(-1)).sum() / 7

    check(step, (h, w, labels, flat.view_as(mask), *others))
    rows = flat.nonzero().squeeze(1).tolist()
    assert all(each == (rows if count <= 63 else None) for each in kept)
    assert kept


@pytest.mark.usefixtures("small_heads")
def test_another_number_in_each_step(kept, device):
    """A step is compiled once for all numbers of rows."""
    torch._dynamo.reset()
    compiled = torch.compile(masked_mean, backend="compile_losses", fullgraph=True)
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    for share in (0.1, 0.5, 0.9, 0.02):
        inputs = masked_problem(kept=share, device=device)
        torch.testing.assert_close(outcome(compiled, inputs), outcome(masked_mean, inputs))
    assert counts["unique_graphs"] == before + 1
    assert len({each and len(each) for each in map(tuple, filter(None, kept))}) >= 3


@pytest.mark.usefixtures("small_heads")
@pytest.mark.parametrize("name", ["masked_mean", "clipped", "of_sequences", "with_entropy"])
def test_dynamic_shapes(name, kept, device):
    torch._dynamo.reset()
    function, counts = COUNTED[name]
    compiled = torch.compile(function, backend="compile_losses")
    for tokens in (18, 25, 31):
        inputs = masked_problem(tokens=tokens, device=device)
        del kept[:]
        torch.testing.assert_close(outcome(compiled, inputs), outcome(function, inputs))
        rows = counts(*masks_of(inputs)).flatten().nonzero().squeeze(1).tolist()
        assert kept == [rows]


@pytest.mark.usefixtures("small_heads")
def test_reduced_loss_counts_at_the_front(kept, device):
    def step(h, w, labels, mask, advantages, old):
        return F.cross_entropy(F.linear(h * 2, w).view(-1, CLASSES), labels.view(-1))

    h, w, labels, *others = masked_problem(device=device)
    labels = labels.masked_fill(others[0] == 0, -100)
    check(step, (h, w, labels, *others))
    assert kept == [(labels.flatten() != -100).nonzero().squeeze(1).tolist()]


@pytest.mark.usefixtures("small_heads")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_200_drawn_masks(first, kept, device):
    for seed in range(first, first + 20):
        torch._dynamo.reset()
        inputs, function = masked_problem(device=device), drawn(seed)
        ours = outcome(torch.compile(function, backend="compile_losses"), inputs)
        expected = outcome(function, inputs)
        for actual, wanted in zip(ours, expected, strict=True):
            torch.testing.assert_close(
                actual,
                wanted,
                rtol=1e-10,
                atol=1e-10,
                equal_nan=True,
                msg=lambda text, seed=seed: f"{seed}: {text}",
            )
    assert any(each is not None for each in kept)


OPTIONS = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.0}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)])
def test_op_by_row(share, needs, device):
    """The rows that count have their losses and gradients; the others have no gradient."""
    (x, w, b), target = leaves(device, torch.float64)
    rows = len(target)
    mask = (torch.arange(rows, device=device) < share * rows).flip(0)
    g = torch.randn(rows, dtype=torch.float64, device=device)
    tensors = [t.detach() for t in (x, w)]
    arguments = (*tensors, target, b.detach(), None, 0, -100, *OPTIONS.values(), torch.float64)
    op, text = fused.linear_cross_entropy_rows_with_grad, known_text(g)
    losses, *gradients = op(*arguments, *needs, *text, fused.counted_rows(mask))
    every, *wanted = op(*arguments, *needs, *known_text(torch.where(mask, g, 0.0)))
    torch.testing.assert_close(gradients, wanted)
    is_read = mask if mask.sum() * 8 <= rows * 7 else torch.ones_like(mask)
    equal = torch.where(target == -100, 0.0, math.log(len(w))).double()
    torch.testing.assert_close(losses, torch.where(is_read, every, equal))


def test_counted_rows(device):
    for mask in ([True, False, True, True], [False] * 3, [True], []):
        given = torch.tensor(mask, dtype=torch.bool, device=device)
        found = fused.counted_rows(given)
        rows = [row for row, counts in enumerate(mask) if counts]
        assert found[-1] == len(rows)
        assert found[: len(rows)].tolist() == rows
        assert found.shape == (len(mask) + 1,)
        torch.library.opcheck(fused.counted_rows.default, (given,))


def test_counted_elsewhere(device):
    """A copy of the result has the number in it, too."""
    mask = torch.tensor([True, False, False, True], device=device)
    for counted in (fused.counted_rows(mask), fused.counted_rows(mask).clone()):
        assert CountedRows(counted, 4).indices().tolist() == [0, 3]


def test_errors():
    with pytest.raises(RuntimeError, match=r"expected mask to be bool of shape \[rows\], got"):
        fused.counted_rows(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"expected counted to be int64 of shape \[4\], got"):
        CountedRows(torch.zeros(3, dtype=torch.int64), 3)
    (x, w, b), target = leaves("cpu", torch.float64)
    arguments = (x, w, target, b, None, 0, -100, *OPTIONS.values(), torch.float64)
    counted = fused.counted_rows(torch.ones(len(x), dtype=torch.bool))
    with pytest.raises(RuntimeError, match="for calls that record no gradient"):
        fused.linear_cross_entropy_rows_with_grad(
            *arguments, True, False, False, *known_text(torch.ones(len(x))), counted
        )


def test_cuda_graphs_compute_all(monkeypatch):
    """What a CUDA graph replays has one number of rows."""
    inputs = masked_problem()
    report = compile_losses.explain(masked_mean, *inputs)
    assert report.losses
    with torch._inductor.config.patch("triton.cudagraphs", True):
        report = compile_losses.explain(masked_mean, *inputs)
    assert not any(LEFT_OUT in detail for site in report.losses for detail in site.details)
