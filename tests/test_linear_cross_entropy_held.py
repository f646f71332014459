"""Linear cross entropy by itself: what is computed, and what is held."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from compile_losses import device_constants
from compile_losses.device_constants import constants_of
from compile_losses.ops.linear import block_layout, class_blocks, row_chunks
from compile_losses.ops.linear.block_layout import BlockLayout, smallest_scratch
from compile_losses.ops.linear.chunk_size import (
    chunk_rows,
    held_rows,
    part_rows,
    plan,
    sums_in_float32,
)
from tests.constants import set_constants
from tests.linear_problems import (
    ROWS,
    compiled_texts,
    largest_allocation,
    leaves,
    most_allocated,
    op,
    problem,
    products,
    run,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)))
def test_only_gradients_that_are_needed(needs, chunks):
    """One product a chunk for the logits, one more for each matrix gradient that is asked for."""
    input, linear_weight, target, bias, _ = problem("cpu", ignored=0)
    tensors = [
        t.clone().requires_grad_(n)
        for t, n in zip((input, linear_weight, bias), needs, strict=True)
    ]
    x, w, b = tensors

    def step():
        loss = op(x, w, target, linear_bias=b)
        assert loss.requires_grad == any(needs)
        if any(needs):
            loss.backward()

    assert products(step) == 6 * (1 + needs[0] + needs[1])
    full = run(op, (input, linear_weight, target, bias, None), torch.float64, torch.ones(()))
    for tensor, needed, gradient in zip(tensors, needs, full[1:], strict=True):
        assert (tensor.grad is not None) == needed
        if needed:
            torch.testing.assert_close(tensor.grad, gradient, rtol=0, atol=0)
    with torch.no_grad():
        assert products(lambda: op(x, w, target, linear_bias=b)) == 6


@pytest.mark.parametrize("needs", list(itertools.product((False, True), (True,), (False, True))))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_gradients_that_are_needed_of_blocks(dtype, needs, exact_plan):
    """A product a block for the logits and the weight's gradient, and for input's if it is."""
    exact_plan(16, smallest_scratch(24, 24, 640, 5))
    tensors, target = leaves(dtype=dtype, ignored=0, rows=40, classes=640)
    x, w, b = (t.detach().requires_grad_(n) for t, n in zip(tensors, needs, strict=True))
    counted = products(lambda: op(x, w, target, linear_bias=b).backward())
    assert counted == (5 + 1) * (2 + needs[0])
    exact = op(*tensors[:2], target, linear_bias=tensors[2])
    everything = torch.autograd.grad(exact, tensors)
    for tensor, needed, gradient in zip((x, w, b), needs, everything, strict=True):
        assert (tensor.grad is not None) == needed
        if needed:
            torch.testing.assert_close(tensor.grad, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", [0, 1])
def test_logits_are_never_held(reduction, compiled):
    """At sizes of its own choice: one buffer within the budget, where the logits take 312 MiB."""
    rows, hidden, classes = 4096, 16, 20_000
    (x, w, _), target = leaves("cpu", torch.float32, rows=rows, hidden=hidden, classes=classes)

    def step(x, w, target):
        return op(x, w, target, reduction=reduction).sum()

    function = torch.compile(step, backend="aot_eager") if compiled else step
    largest = largest_allocation(lambda: function(x, w, target).backward())
    computed = int((target != -100).sum())
    chunk = chunk_rows(computed, hidden, classes, torch.float32, CPU, sums_weight=True)
    buffer = chunk * classes * 4
    assert buffer <= largest <= constants_of(CPU).logits_bytes < rows * classes * 4


@pytest.mark.sampled(2)
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"softcap": 5.0}),
        (torch.float32, {"z_loss": 0.1}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"softcap": 5.0}),
        (torch.bfloat16, {"z_loss": 0.1}),
    ],
)
def test_blocks_are_held_where_planned(dtype, options, monkeypatch):
    """All rows' logits in the weight's gradient: beside it what is planned, and little more."""
    set_constants(monkeypatch, least_rows=64, least_classes=64, least_elements=1, logits_bytes=1)
    monkeypatch.setattr("compile_losses.ops.linear.matrix_products.BLOCK_BYTES", 10_000)
    plans = []

    def recorded(*arguments, **keywords):
        plans.append(plan(*arguments, **keywords))
        return plans[-1]

    monkeypatch.setattr(row_chunks, "plan", recorded)
    rows, hidden, classes = 256, 256, 12_000
    (x, w, b), target = leaves("cpu", dtype, rows=rows, hidden=hidden, classes=classes, ignored=0)
    # oneDNN packs operands of bfloat16 as suits the processor: with AMX they take megabytes.
    with torch.backends.mkldnn.flags(enabled=False):
        most = most_allocated(lambda: op(x, w, target, linear_bias=b, **options))
    (planned,) = plans
    assert planned.first_rows == rows
    gradients = x.nbytes + w.nbytes + b.nbytes
    logits = rows * classes * dtype.itemsize
    # Other products on the CPU pack some of theirs.
    assert gradients < most <= gradients + planned.held + logits / 10
    assert planned.held <= logits / 2


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("reduction", [0, 1])
def test_z_loss_holds_no_more(reduction, z_loss, chunks, exact_plan):
    chunks(256)
    exact_plan(256)
    options = {"rows": 1024, "hidden": 8, "classes": 10_000, "ignored": 0}
    (x, w, _), target = leaves("cpu", torch.float32, **options)

    def step():
        op(x, w, target, z_loss=z_loss, reduction=reduction).sum().backward()

    held = 256 * 10_000 * 4
    assert held <= most_allocated(step) <= held + x.nbytes + w.nbytes + 1024 * 10_000 * 4 / 20


@pytest.mark.kernels
def test_sum_in_float32_is_rounded_when_no_logits_are_held(chunks, exact_plan):
    chunks(128)
    exact_plan(128)
    options = {"rows": 128 * 9, "hidden": 64, "classes": 4000, "ignored": 0}
    (x, w, _), target = leaves("cpu", torch.bfloat16, **options)
    with torch.backends.mkldnn.flags(enabled=False):
        most = most_allocated(lambda: op(x, w, target).backward())
    logits, total = 128 * 4000 * 2, 2 * w.nbytes
    assert total + logits <= most <= total + logits + x.nbytes + w.nbytes / 5


@pytest.mark.parametrize("rows", [47, 48, 100])
def test_where_the_sum_lies(rows, device, exact_plan, monkeypatch):
    """In input's gradient, where that has memory for it; with the same result."""
    exact_plan(16, smallest_scratch(24, 24, 640, 5))
    (x, w, _), target = leaves(device, torch.bfloat16, ignored=0, rows=rows, classes=640)
    gradients = torch.autograd.grad(op(x, w, target), (x, w))
    found = []

    def apart(tensor, shape, dtype):
        found.append(in_idle_memory(tensor, shape, dtype).data_ptr() == tensor.data_ptr())
        return tensor.new_empty(shape, dtype=dtype)

    in_idle_memory = class_blocks._in_idle_memory
    monkeypatch.setattr(class_blocks, "_in_idle_memory", apart)
    expected = torch.autograd.grad(op(x, w, target), (x, w))
    assert found == [rows >= 48]
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


def test_gradients_are_handed_over(chunks):
    """The gradients made in the forward are those that the backward returns, without a copy."""
    (x, w, b), target = leaves("cpu", rows=64, hidden=1000, classes=500)
    loss = op(x, w, target, linear_bias=b)
    largest = largest_allocation(loss.backward)
    assert largest < w.nbytes
    assert all(t.grad is not None for t in (x, w, b))


def test_chunk_rows(monkeypatch):
    many = chunk_rows(131_072, 4096, 128_256, torch.bfloat16, CPU, sums_weight=True)
    assert many == 4096
    assert sums_in_float32(131_072, many, torch.bfloat16)
    assert not sums_in_float32(131_072, many, torch.float32)
    assert chunk_rows(100, 8, 10, torch.float32, CPU) == 100
    assert chunk_rows(0, 8, 10, torch.float32, CPU) == 1
    set_constants(monkeypatch, logits_bytes=2000 * 40)
    assert chunk_rows(5000, 8, 10, torch.float32, CPU) == 1024
    # The budget is for all tensors that are held, those beside the logits for a part of the rows.
    for beside, budget in ((1, 1.5), (2, 2), (0.5, 1.25)):
        set_constants(monkeypatch, logits_bytes=2048 * 40)
        assert chunk_rows(5000, 8, 10, torch.float32, CPU, beside=beside) == 1024
        enough = int(budget * 2048 * 40)
        set_constants(monkeypatch, logits_bytes=enough)
        assert chunk_rows(5000, 8, 10, torch.float32, CPU, beside=beside) == 2048
        assert held_rows(2048, CPU, beside) * 40 == enough
    monkeypatch.undo()
    # The gradient of a large weight allows larger chunks.
    assert chunk_rows(8192, 8192, 128_256, torch.bfloat16, CPU, sums_weight=True) == 2048
    # So does one with fewer features, up to its own size, of which a product of few rows is slow.
    for hidden, classes, expected in (
        (2048, 128_256, 2048),
        (2560, 151_936, 2048),
        (1024, 151_936, 1024),
        (128, 128_256, 1024),
    ):
        assert chunk_rows(8192, hidden, classes, torch.bfloat16, CPU, sums_weight=True) == expected
        assert chunk_rows(8192, hidden, classes, torch.bfloat16, CPU) == 1024
    # A little more memory for logits instead of a sum in float32.
    assert chunk_rows(32_768, 2048, 32_000, torch.bfloat16, CPU, sums_weight=True) == 4096


def test_part_rows():
    """Half of a chunk, where that leaves a product enough rows and anything is held besides."""
    for chunk, beside, part in (
        (2048, 1, 1024),
        (1025, 0.5, 513),
        (1023, 1, 1023),
        (2048, 0, 2048),
        (1, 2, 1),
    ):
        assert part_rows(chunk, CPU, beside) == part
        assert held_rows(chunk, CPU, beside) == chunk + math.ceil(beside * part)


def test_plan():
    """The sizes that the project is measured by, in bfloat16."""
    gib = 2**30
    for rows, hidden, classes, most, first in (
        (8192, 4096, 128_256, 0.35, 4096),
        (16_384, 2048, 32_000, 0.20, 0),
        (8192, 1024, 151_936, 0.35, 0),
        (4096, 8192, 262_144, 0.50, 4096),
    ):
        how = plan(rows, hidden, classes, torch.bfloat16, CPU)
        assert how.first_rows == first
        # Statistics and the products' own memory are not counted.
        assert how.held <= (0.95 if first else 1) * most * gib
        assert how.moved <= plan_of_chunks(rows, hidden, classes)
        assert not sums_in_float32(rows, how.chunk, torch.bfloat16)
    head = (8192, 4096, 128_256, torch.bfloat16, CPU)
    usual = plan(*head).first.blocks
    assert plan(*head, needs_input=False).first_rows > 4096  # there is more room
    how = plan(*head, gathered=True)
    assert how.first.blocks > usual
    assert how.held <= 0.33 * gib
    # Sums over too many chunks are in float32, as without a first one.
    many = plan(131_072, 4096, 128_256, torch.bfloat16, CPU)
    assert many.first is None
    assert sums_in_float32(131_072, many.chunk, torch.bfloat16)
    # Nothing to save: few rows, few classes, no rows, no features.
    for sizes in ((1000, 4096, 128_256), (16_384, 2048, 4000), (0, 8, 10), (5000, 0, 128_256)):
        assert plan(*sizes, torch.bfloat16, CPU).first is None


def test_plan_on_an_h100(monkeypatch):
    """The same sizes: more memory, but 3/8 of torch's own, where products are that fast."""
    monkeypatch.setattr(device_constants, "_class_of", lambda *_: "h100")
    h100 = torch.device("cuda")
    for rows, hidden, classes, chunk, blocks in (
        (8192, 4096, 128_256, 3072, 0),
        (16_384, 2048, 32_000, 6144, 0),
        (8192, 1024, 151_936, 1024, 0),
        (4096, 8192, 262_144, 1024, 4),
        (8192, 2048, 128_256, 2048, 0),
        (2048, 2048, 32_000, 2048, 0),  # few logits in all
    ):
        how = plan(rows, hidden, classes, torch.bfloat16, h100)
        assert how.chunk == chunk
        assert (how.first.blocks if how.first else 0) == blocks
        logits = rows * classes * 2
        assert how.held <= max(3 / 8 * logits, 192 * 2**20)
        # Where no gradient is summed, nothing is gained by holding more.
        without = chunk_rows(rows, hidden, classes, torch.bfloat16, h100)
        assert without == chunk_rows(rows, hidden, classes, torch.bfloat16, CPU)


def plan_of_chunks(rows, hidden, classes):
    """Bytes that chunks alone move in bfloat16."""
    chunk = chunk_rows(rows, hidden, classes, torch.bfloat16, CPU, sums_weight=True)
    return 2 * (-(-rows // chunk) - 1) * classes * hidden * 2


@pytest.mark.parametrize("aligned", [1, 4])
def test_blocks_do_not_overlap(aligned, monkeypatch):
    """fits says exactly whether the gradient's rows are written over no logits still needed."""
    monkeypatch.setattr(block_layout, "ALIGNED", aligned)
    fitting = 0
    for rows, hidden, classes, blocks in itertools.product(
        (1, 5, 8, 11, 12, 16, 25), (4, 8, 11, 12), (7, 16, 33, 64), (2, 3, 4, 7, 16)
    ):
        fewest = smallest_scratch(rows, hidden, classes, blocks)
        found = []
        for scratch in range(1, blocks):
            layout = BlockLayout(rows, hidden, classes, blocks, scratch)
            if layout.width == 0:
                assert not layout.fits()
                continue
            assert layout.fits() == overlaps_nowhere(layout), layout
            found += [layout] * layout.fits()
        assert fewest == (found[0] if found else None)
        fitting += len(found)
    assert fitting > 500


def overlaps_nowhere(layout):
    """Goes through the steps, and counts in which block's hands each element is."""
    of_weight = torch.full((layout.classes * layout.hidden,), -1)
    scratch = torch.full((layout.scratch_elements,), -1)
    places = []
    for block in range(layout.blocks):
        classes, first = layout.classes_of(block), layout.offset(block)
        memory = of_weight if block < layout.packed else scratch
        last = first + layout.rows * (classes.stop - classes.start)
        if first < 0 or last > len(memory):
            return False
        places.append(memory[first:last])
        assert places[-1].eq(-1).all()  # logits never lie over others
        places[-1].fill_(block)
    assert scratch.ne(-1).all()
    seen = 0
    for block, place in enumerate(places):
        classes = layout.classes_of(block)
        assert classes.start == seen
        seen = classes.stop
        of_weight[classes.start * layout.hidden : classes.stop * layout.hidden] = layout.blocks
        if not place.eq(block).all():
            return False  # while it was read
    assert seen == layout.classes
    return bool(of_weight.eq(layout.blocks).all())


def test_blocks_are_aligned():
    """In 16-bit dtypes all blocks but the last begin, and their rows, on 128 bytes."""
    for hidden, classes in itertools.product((64, 100, 4096), (32_000, 50_257, 128_256)):
        layout = smallest_scratch(min(64, hidden), hidden, classes, 5)
        assert layout.width % 64 == 0
        assert all(layout.offset(block) % 64 == 0 for block in range(layout.blocks))
        last = layout.classes_of(layout.blocks - 1)
        assert 0 <= last.stop - last.start - layout.width < 5 * 64


def test_ignored_rows(chunks, device, monkeypatch):
    """They have no product where they are many, and no gradient, whatever they hold."""
    set_constants(monkeypatch, operations_worth_waiting=0)
    input, linear_weight, target, _, _ = problem(device, ignored=0)
    target[: ROWS - 9] = -100
    assert products(lambda: op(input, linear_weight, target)) == 1
    x, w = input.clone().requires_grad_(), linear_weight.clone().requires_grad_()
    with torch.no_grad():
        x[0] = torch.nan
    loss = op(x, w, target)
    loss.backward()
    rows = slice(ROWS - 9, None)
    torch.testing.assert_close(
        loss, F.cross_entropy(F.linear(input, linear_weight)[rows], target[rows])
    )
    assert x.grad[: ROWS - 9].eq(0).all()
    assert w.grad.isfinite().all()
    each = op(input, linear_weight, target, reduction=0)
    assert each.shape == (ROWS,)
    assert each[: ROWS - 9].eq(0).all()


@pytest.mark.gpu
def test_ignored_rows_in_a_cuda_graph(chunks, monkeypatch):
    """Nothing waits for their number while a graph is captured."""
    set_constants(monkeypatch, operations_worth_waiting=0)
    input, linear_weight, target, _, _ = problem("cuda", ignored=2)
    expected = op(input, linear_weight, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = op(input, linear_weight, target)
    graph.replay()
    torch.testing.assert_close(loss, expected)


def test_only_leaf_ops_in_compiled_graphs(chunks):
    """The gradients are made in the forward graph, and scaled in the backward graph."""
    (x, w, _), target = leaves("cpu")
    forward, backward = compiled_texts(op, x, w, target)
    assert "linear_cross_entropy_with_grad" in forward
    assert "linear_cross_entropy" not in backward
    assert backward.count("fused.scale.default") == 2


def test_chunks_of_few_rows():
    """Of a frozen head whose least chunk is large, a fourth of the rows."""
    for rows, expected in ((100, 100), (1024, 1024), (1500, 512), (3277, 768), (8192, 1024)):
        given = (rows, 4096, 151_936, torch.bfloat16, CPU)
        assert chunk_rows(*given, is_taken=True) == expected
        trained = chunk_rows(*given, sums_weight=True)
        assert chunk_rows(*given, sums_weight=True, is_taken=True) == trained
    assert chunk_rows(3000, 8, 10, torch.float32, CPU, is_taken=True) == 3000
