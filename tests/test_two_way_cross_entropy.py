"""The cross entropies of a product by rows and by columns, whose matrix is never held."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from compile_losses import library
from tests.accuracy import assert_accurate
from tests.contrastive_programs import autocast
from tests.heads import errors_on_similar
from tests.linear_problems import largest_allocation

fused = torch.ops.fused
op = fused.two_way_cross_entropy
ROWS, COLUMNS, HIDDEN = 40, 56, 8
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

pytestmark = pytest.mark.usefixtures("chunks")


def problem(dtype=torch.float64, device="cpu", rows=ROWS, columns=COLUMNS):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(device, dtype).requires_grad_()

    target = torch.randint(max(1, columns), (rows,), generator=generator)
    other_target = torch.randint(max(1, rows), (columns,), generator=generator)
    target[::7], other_target[3:4] = -100, -100
    tensors = (normal(rows, HIDDEN), normal(columns, HIDDEN))
    return (*tensors, target.to(device), other_target.to(device))


def reference(a, b, target, other_target, **options):
    logits = a @ b.T
    losses = (
        F.cross_entropy(x, t, **options) for x, t in ((logits, target), (logits.T, other_target))
    )
    return tuple(losses)


def ours(a, b, target, other_target, *, reduction="mean", **options):
    return op(a, b, target, other_target, reduction=REDUCTIONS[reduction], **options)


def outcome(function, inputs, **options):
    """Both losses, and the gradients of a sum of them with other factors."""
    losses = function(*inputs, **options)
    total = sum(
        (loss * torch.linspace(0.5, 1.5, loss.numel(), device=loss.device).to(loss.dtype)).sum() * w
        for loss, w in zip(losses, (0.7, -1.3), strict=True)
    )
    return [*(loss.detach() for loss in losses), *torch.autograd.grad(total, inputs[:2])]


def check(inputs, **options):
    likes = errors_on_similar(lambda *i: reference(*i, **options), inputs, outcome)
    wide = [t.detach().double().requires_grad_() for t in inputs[:2]]
    right = outcome(reference, (*wide, *inputs[2:]), **options)
    found = outcome(ours, inputs, **options)
    for *each, like in zip(found, outcome(reference, inputs, **options), right, likes, strict=True):
        assert_accurate(*each, like=like)
    for one, other in zip(found, outcome(ours, inputs, **options), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_losses_and_gradients(dtype, reduction, smoothing, device):
    check(problem(dtype, device), reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 33])
def test_chunks(rows, chunks, device):
    """Of 8 rows: one, whole ones, and what is left."""
    chunks(8)
    check(problem(torch.float32, device, rows=rows))


def test_one_direction_has_a_gradient(device):
    for place in (0, 1):
        a, b, *targets = problem(device=device)
        found = torch.autograd.grad(ours(a, b, *targets)[place], (a, b))
        torch.testing.assert_close(
            found, torch.autograd.grad(reference(a, b, *targets)[place], (a, b))
        )


def test_one_embedding_has_a_gradient(device):
    for place in (0, 1):
        inputs = [t.detach() for t in problem(device=device)]
        inputs[place].requires_grad_()
        found, right = (
            torch.autograd.grad(sum(f(*inputs)), inputs[place]) for f in (ours, reference)
        )
        torch.testing.assert_close(found, right)


def test_no_gradient(device):
    inputs = [t.detach() for t in problem(device=device)]
    torch.testing.assert_close(ours(*inputs), reference(*inputs))


def test_derivatives():
    a, b, target, other_target = problem(rows=6, columns=5)
    target, other_target = target.clamp(max=4), other_target.clamp(max=5)
    for reduction in REDUCTIONS.values():

        def losses(a, b, reduction=reduction):
            return op(a, b, target, other_target, reduction=reduction, label_smoothing=0.1)

        assert torch.autograd.gradcheck(losses, (a, b))
        assert torch.autograd.gradgradcheck(losses, (a, b))


def test_torch_func():
    a, b, *targets = (t.detach() for t in problem())
    found, right = (
        torch.func.grad(lambda a, f=f: sum(f(a, b, *targets)))(a) for f in (ours, reference)
    )
    torch.testing.assert_close(found, right)
    stacked = torch.stack([a, a.flip(0)])
    found, right = (
        torch.vmap(lambda a, f=f: f(a, b, *targets))(stacked) for f in (ours, reference)
    )
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [(0, 3), (1, 4)])
def test_special_values(place, value, device):
    inputs = problem(torch.float32, device)
    which, row = place
    with torch.no_grad():
        inputs[which][row, 2] = value
    found, right = (outcome(f, inputs, reduction="none") for f in (ours, reference))
    for one, other in zip(found[:2], right[:2], strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_all_ignored(device):
    a, b, target, other_target = problem(device=device)
    inputs = (a, b, torch.full_like(target, -100), torch.full_like(other_target, -100))
    assert all(loss.isnan() for loss in ours(*inputs))
    for gradient in torch.autograd.grad(sum(ours(*inputs, reduction="sum")), (a, b)):
        assert gradient.count_nonzero() == 0


def test_no_rows(device):
    *inputs, other_target = problem(device=device, rows=0)
    inputs = (*inputs, torch.full_like(other_target, -100))
    found = ours(*inputs, reduction="sum")
    assert [loss.shape for loss in found] == [(), ()]
    gradients = torch.autograd.grad(found[0], inputs[:2])
    assert [g.shape for g in gradients] == [(0, HIDDEN), (COLUMNS, HIDDEN)]
    assert gradients[1].count_nonzero() == 0


def test_autocast(device):
    inputs = problem(torch.float32, device)
    found = autocast(ours)(*inputs)
    assert [loss.dtype for loss in found] == [torch.float32] * 2
    narrow = [t.detach().bfloat16().float() for t in inputs[:2]]
    torch.testing.assert_close(found, reference(*narrow, *inputs[2:]), rtol=2e-2, atol=0)


def test_no_matrix_is_held(chunks):
    chunks(8)
    inputs = problem(torch.float32, rows=512, columns=512)
    assert largest_allocation(lambda: sum(ours(*inputs)).backward()) < 512 * 512 * 4 / 4


def test_compiled_call(device):
    inputs = problem(torch.float32, device)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(outcome(compiled, inputs), outcome(ours, inputs))


def test_ops(device):
    a, b, target, other_target = problem(torch.float32, device)
    opcheck(op.default, (a, b, target, other_target))
    arguments = (a, b, target, other_target, 1, -100, 0.1, torch.float32)
    opcheck(fused.two_way_losses_forward.default, arguments)
    _, _, *saved = fused.two_way_losses_forward(*(arguments))
    one = torch.ones((), device=device)
    given = (one, None, *(t.detach() for t in (a, b)), target, other_target, *saved, *arguments[4:])
    opcheck(fused.two_way_losses_backward.default, (*given, True, True))
    opcheck(fused.two_way_losses_backward.default, (*given, False, True))


def test_parts(device):
    """The ops of one chunk: their schemas and fakes, and what computes them without kernels."""
    x = torch.randn(8, COLUMNS, device=device)
    _, _, target, other_target = problem(device=device)

    def vector(size, value):
        return torch.full((size,), value, device=device)

    def sides(own):
        for size, given in ((ROWS, target), (COLUMNS, other_target)):
            yield from (vector(size, -math.inf), vector(size, 0.0), vector(size, own), given)

    for name, own, more in (("add_", 0.0, (16, -100)), ("gradient_", 0.5, (16, 0.1))):
        part = getattr(fused, f"softmax_sums_{name}").default
        made = [(x.clone(), *sides(own), *more) for _ in range(3)]
        if name == "gradient_":
            sums = fused.softmax_sums(torch.randn(ROWS, COLUMNS, device=device), None)
            for arguments in made:
                for place, numbers in zip((1, 2, 5, 6), sums, strict=True):
                    arguments[place].copy_(numbers)
        opcheck(part, made[0], test_utils=("test_schema", "test_faketensor"))
        part(*made[1])
        library.BODIES[part](*made[2])
        torch.testing.assert_close(made[1], made[2])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({0: torch.randn(ROWS, 3)}, RuntimeError, "hidden"),
        ({0: torch.randn(ROWS, HIDDEN)}, RuntimeError, "input's dtype"),
        ({2: torch.zeros(3, dtype=torch.int64)}, RuntimeError, r"target to be int64 \[40\]"),
        ({3: torch.zeros(COLUMNS)}, RuntimeError, r"other_target to be int64 \[56\]"),
        (
            {2: torch.full((ROWS,), COLUMNS)},
            IndexError,
            "target 56 is out of bounds for 56 classes",
        ),
        ({3: torch.full((COLUMNS,), -1)}, IndexError, "target -1 is out of bounds for 40 classes"),
        ({"label_smoothing": 1.5}, RuntimeError, "label_smoothing"),
        ({"reduction": 7}, ValueError, "reduction"),
        (
            {0: torch.ones(ROWS, HIDDEN, dtype=torch.int64)},
            NotImplementedError,
            "expected input to be",
        ),
    ],
)
def test_errors(change, error, text):
    arguments = [t.detach() for t in problem()]
    for place, value in change.items():
        if isinstance(place, int):
            arguments[place] = value
    with pytest.raises(error, match=text):
        op(*arguments, **{name: v for name, v in change.items() if isinstance(name, str)})
