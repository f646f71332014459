"""K picked classes of each row of logits: the ops, and the functions over a linear layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from compile_losses.linear import linear_log_probs, linear_top_k_kl_div
from compile_losses.ops.linear.row_function import (
    COLUMN,
    JOIN,
    LARGEST,
    REPEAT,
    SLICE,
    SUM,
    RowFunction,
    encode,
)
from compile_losses.ops.linear.row_statistics import COUNT, DIFFERENTIABLE, LOG_PROBS, LOGSUMEXP
from compile_losses.ops.linear.steps import Operand
from compile_losses.ops.linear_row_statistics import in_order, reference
from compile_losses.ops.row_picks import sums_of_equal
from tests.accuracy import assert_accurate
from tests.calls import dtypes
from tests.gpus import on_a_gpu_of_its_own
from tests.linear_problems import largest_allocation

fused = torch.ops.fused
ROWS, HIDDEN, CLASSES = (5, 9), 24, 37
IGNORED = -100

pytestmark = pytest.mark.usefixtures("chunks")


def problem(device="cpu", dtype=torch.float64, *, leading=ROWS, count=6, scale=1.0):
    """Input, weight and bias of a layer; picks, of which some are equal; labels."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_()

    picks = torch.randint(CLASSES, (*leading, count), generator=generator)
    if count > 2:
        picks[..., 2] = picks[..., 0]
    labels = torch.randint(CLASSES, leading, generator=generator)
    if labels.dim() > 0:
        labels[..., ::4] = IGNORED
    layer = (draw(*leading, HIDDEN), draw(CLASSES, HIDDEN), draw(CLASSES))
    return layer, picks.to(device), labels.to(device)


def leaf_arguments(
    device, dtype=torch.float64, *, softcap=None, count=6, pick=True, divergence=None
):
    (h, w, b), picks, labels = problem(device, dtype, count=count)
    h, picks = h.detach().flatten(0, 1).requires_grad_(), picks.flatten(0, 1)
    teacher, options = (None, None, None), ()
    if divergence is not None:
        teacher = (torch.linspace(-3, 3, h.numel() // HIDDEN * CLASSES, device=device, dtype=dtype)
                   .sin().view(-1, CLASSES), None, None)  # fmt: skip
        options = (divergence, 0.5, 1.3)
    given = (h, w, labels.flatten(), b, IGNORED, softcap, teacher, *options)
    return in_order(*given, picks=picks if pick else None)


def random_grads(results, device):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(r.shape, generator=generator, dtype=torch.float64).to(device) for r in results
    ]


@pytest.mark.parametrize("divergence", [None, "kl", "js"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["", "softcap"])
@pytest.mark.parametrize("count", [1, 2, 6, 50])
def test_statistics_and_gradients(count, softcap, divergence, device):
    """All statistics of a row together, and their gradients by both ops."""
    given = leaf_arguments(device, softcap=softcap, count=count, divergence=divergence)
    leaves = (given[0], given[1], given[3])
    found = fused.linear_row_statistics_forward(*given)[:DIFFERENTIABLE]
    expected = reference(*given)
    pairs = [(f, e) for f, e in zip(found, expected, strict=True) if e is not None]
    found, expected = zip(*pairs, strict=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    factors = random_grads(expected, device)
    gradients = torch.autograd.grad(expected, leaves, factors)
    ours = torch.autograd.grad(found, leaves, factors)
    torch.testing.assert_close(ours, gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("given", [(0,), (1,), (2,), (3,), (1, 2), ()], ids=str)
def test_some_gradients(given, device):
    """Beside that of the log-probabilities."""
    arguments = leaf_arguments(device)
    leaves = (arguments[0], arguments[1], arguments[3])
    found = fused.linear_row_statistics_forward(*arguments)
    expected = reference(*arguments)
    places = [*given, LOG_PROBS]
    factors = random_grads([expected[i] for i in places], device)
    ours, theirs = (
        torch.autograd.grad([results[i] for i in places], leaves, factors)
        for results in (found, expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_gradients_of_rows(device):
    """As the passes call it: functions of all statistics."""
    arguments = leaf_arguments(device)
    statistics = fused.linear_row_statistics_forward(*arguments)
    picks = arguments[4]
    known = torch.rand(picks.shape, dtype=torch.float64, device=device)
    mul = torch.ops.aten.mul.Tensor
    steps = [(mul, (Operand(LOG_PROBS), Operand(COUNT)), {})]
    text = encode(steps, [None, 0, None, None, None, COUNT + 1])
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
    found = fused.linear_row_statistics_rows_with_grad(*detached, True, True, True, text, [known])
    nll, logsumexp, log_probs = (statistics[i] for i in (0, LOGSUMEXP, LOG_PROBS))
    leaves = (arguments[0], arguments[1], arguments[3])
    factors = (nll.detach(), (log_probs * known).detach())
    expected = torch.autograd.grad((logsumexp, log_probs), leaves, factors)
    torch.testing.assert_close(found[COUNT:], expected)
    torch.testing.assert_close(found[:COUNT], tuple(s.detach() for s in statistics))


def test_functions_of_the_numbers_of_a_row():
    """Sums, the largest, a part, several beside each other, and one repeated beside others."""
    steps = [
        (SUM, (Operand(0), [1]), {}),  # 2: [rows]
        (COLUMN, (Operand(2), 1), {}),  # 3: [rows, 1]
        (REPEAT, (Operand(3), Operand(0)), {}),  # 4: [rows, K]
        (JOIN, ([Operand(4), Operand(0), Operand(3)], 1), {}),  # 5: [rows, 2 K + 1]
        (LARGEST, (Operand(5), [1]), {}),
        (SLICE, (Operand(5), 1, 2, 5), {}),
    ]
    text = encode(steps, [7, 6])
    x = torch.randn(9, 3)
    function = RowFunction(text, ())
    total = x[2:6].sum(1, keepdim=True)
    joined = torch.cat([total.expand(-1, 3), x[2:6], total], 1)
    part, largest = function(slice(2, 6), [x[2:6], x[2:6, 0]])
    assert torch.equal(part, joined[:, 2:5])
    assert torch.equal(largest, joined.amax(1))


@pytest.mark.parametrize(
    "step",
    [
        (SUM, (Operand(0), [0]), {}),
        (SUM, (Operand(0), [0, 1]), {}),
        (SUM, (Operand(0), [1], True), {}),
        (SUM, (Operand(0), [1]), {"dtype": torch.float64}),
        (SUM, (Operand(0),), {}),
        (COLUMN, (Operand(0), 0), {}),
        (JOIN, ([Operand(0), Operand(0)], 0), {}),
        (JOIN, ([Operand(0), Operand(0)],), {}),
        (JOIN, ([Operand(0), 3.0], 1), {}),
        (SLICE, (Operand(0), 0, 2, 5), {}),
        (SLICE, (Operand(0), 1, 0, 5, 2), {}),
        (torch.ops.aten.cumsum.default, (Operand(0), 1), {}),
        (torch.ops.aten.mul.Tensor, (Operand(0), [1]), {}),
    ],
    ids=str,
)
def test_what_is_no_function_of_a_row(step):
    assert encode([step], [1]) is None


@dtypes
@pytest.mark.parametrize("softcap", [None, 4.0], ids=["", "softcap"])
@pytest.mark.parametrize("confident", [False, True])
def test_accuracy_of_rows(confident, softcap, dtype, device):
    """Of the ops of rows, by the rule. Likely classes have a gradient of a small difference."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 1031, generator=generator, dtype=torch.float64) * (
        4 if confident else 1
    )
    logits = logits.to(device, dtype)
    picks = logits.float().topk(8).indices
    picks[:, 5] = picks[:, 1]
    acc = torch.float64 if dtype == torch.float64 else torch.float32

    def in_torch(dtype):
        leaf = logits.detach().clone().to(dtype).requires_grad_()
        z = leaf if softcap is None else softcap * torch.tanh(leaf / softcap)
        teacher = F.softmax(1.01 * z.detach(), -1).gather(1, picks)
        log_probs = F.log_softmax(z, -1).gather(1, picks)
        (gradient,) = torch.autograd.grad(log_probs, leaf, -teacher)
        return log_probs.detach(), gradient, -teacher

    exact, exact_gradient, grad = in_torch(torch.float64)
    eager, eager_gradient, _ = in_torch(acc)
    *_, stats, _ = fused.row_statistics_forward(logits, None, IGNORED, softcap)
    found = fused.row_picks_forward(logits, picks, stats, softcap)
    gradient = fused.row_picks_backward(
        grad, *[None] * 4, logits, picks, None, stats, IGNORED, softcap
    )
    assert found.dtype == acc
    assert gradient.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, exact_gradient, rtol=1e-12, atol=1e-12)
    else:
        assert_accurate(found, eager, exact)
        assert_accurate(gradient, eager_gradient.to(dtype), exact_gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_accuracy(dtype, device):
    (h, w, b), picks, _ = problem(device, dtype)

    def torchs(*layer):
        return F.log_softmax(F.linear(*layer), -1).gather(-1, picks)

    def outcome(function, *layer):
        layer = [t.detach().requires_grad_() for t in layer]
        found = function(*layer)
        return [found.detach(), *torch.autograd.grad(found, layer, given.to(found.dtype))]

    # Probabilities as gradients would magnify the rounding of the row's logsumexp.
    given = torch.randn(picks.shape, generator=torch.Generator().manual_seed(1)).to(device)
    ours = outcome(lambda h, w, b: linear_log_probs(h, w, picks, b), h, w, b)
    eager, exact = outcome(torchs, h, w, b), outcome(torchs, h.double(), w.double(), b.double())
    for result, of_torch, true in zip(ours, eager, exact, strict=True):
        assert_accurate(result, of_torch.to(result.dtype), true)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 33])
def test_sums_of_equal_picks(count, device):
    generator = torch.Generator().manual_seed(count)
    picks = torch.randint(4, (60, count), generator=generator).to(device)
    values = torch.randn(60, count, generator=generator, dtype=torch.float64).to(device)
    found, sums = sums_of_equal(picks, values)
    assert torch.equal(found, picks.sort(1).values)
    same = found.unsqueeze(2) == picks.unsqueeze(1)
    torch.testing.assert_close(sums, (same * values.unsqueeze(1)).sum(2))
    equal = found[:, 1:] == found[:, :-1]
    assert torch.equal(sums[:, 1:][equal], sums[:, :-1][equal])


def test_repeatable(device):
    (h, w, b), picks, _ = problem(device, torch.float32, count=40)
    results = []
    for _ in range(3):
        log_probs = linear_log_probs(h, w, picks, b)
        gradients = torch.autograd.grad(log_probs.exp().sum(), (h, w, b))
        results.append([log_probs.detach(), *gradients])
    assert all(
        torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)
    )


@pytest.mark.parametrize("leading", [(), (5,), (2, 3, 4), (0, 3)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"temperature": 2.0, "softcap": 3.0}], ids=str
)
def test_linear_log_probs(options, leading, device):
    """Of K classes, some of them negative."""
    (h, w, b), index, _ = problem(device, leading=leading)
    index[..., 3] = IGNORED

    def torchs(h, w, b, temperature=1.0, softcap=None):
        z = F.linear(h, w, b)
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        logarithms = F.log_softmax(z / temperature, -1)
        picked = logarithms.gather(-1, index.clamp(min=0)).masked_fill(index < 0, 0)
        return picked, -(logarithms.exp() * logarithms).sum(-1), z.argmax(-1)

    found = linear_log_probs(h, w, index, b, **options, return_entropy=True, return_argmax=True)
    expected = torchs(h, w, b, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = [
        torch.autograd.grad(one.exp().sum() + other.square().sum(), (h, w, b))
        for one, other, _ in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


def test_masked_classes(device):
    """A pick without probability has no nan in its gradient, which is that of its logit."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 50, generator=generator, dtype=torch.float64).to(device)
    logits[:, ::3] = -torch.inf
    picks = torch.tensor([[0, 1, 3, 4]], device=device).expand(4, 4)
    *_, stats, _ = fused.row_statistics_forward(logits, None, IGNORED, None)
    leaf = logits.clone().requires_grad_()
    expected = F.log_softmax(leaf, -1).gather(1, picks)
    torch.testing.assert_close(
        fused.row_picks_forward(logits, picks, stats, None), expected.detach()
    )
    grad = torch.rand(4, 4, dtype=torch.float64, device=device)
    (of_torch,) = torch.autograd.grad(expected, leaf, grad)
    entropy = torch.ones(4, device=device)
    options = (logits, picks, None, stats, IGNORED, None)
    found = fused.row_picks_backward(grad, *[None] * 4, *options)
    torch.testing.assert_close(found, of_torch)
    assert fused.row_picks_backward(grad, None, None, entropy, None, *options).isfinite().all()


def test_large_logits(device):
    """A likely class of large logits keeps its digits."""
    logits = torch.tensor([[700.0, 690.0, 600.0]], device=device)
    picks = torch.tensor([[0, 1, 2]], device=device)
    *_, stats, _ = fused.row_statistics_forward(logits, None, IGNORED, None)
    exact = F.log_softmax(logits.double(), -1)
    found = fused.row_picks_forward(logits, picks, stats, None)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=6e-8)


def test_differentiated_twice(device):
    given = leaf_arguments(device, softcap=4.0, count=3)
    few = [t[:3] if isinstance(t, torch.Tensor) and len(t) == 45 else t for t in given]
    leaves = [few[i].detach().requires_grad_() for i in (0, 1, 3)]

    def function(h, w, b):
        found = fused.linear_row_statistics_forward(h, w, few[2], b, *few[4:])
        return found[0], found[2], found[LOG_PROBS]

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_opcheck(device):
    given = leaf_arguments(device, torch.float32)
    opcheck(fused.linear_row_statistics_forward.default, given)
    rows, picks = given[0].shape[0], given[4]
    each, of_picks = torch.rand(rows, device=device), torch.rand(picks.shape, device=device)
    for gradients in ((None, None, None, None, None, of_picks), (*[each] * 4, None, of_picks)):
        for needs in ((True, True, True), (True, False, False)):
            opcheck(fused.linear_row_statistics_backward.default, (*gradients, *given, *needs))
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in given]
    text = encode([], [None, COUNT, None, None, None, COUNT + 1])
    opcheck(
        fused.linear_row_statistics_rows_with_grad.default,
        (*detached, True, True, True, text, [each, of_picks]),
    )
    opcheck(fused.linear_log_probs.default, (given[0], given[1], picks), {"linear_bias": given[3]})
    logits = torch.randn(rows, CLASSES, device=device)
    *_, stats, _ = fused.row_statistics_forward(logits, None, IGNORED, None)
    opcheck(fused.row_picks_forward.default, (logits, picks, stats, None))
    opcheck(
        fused.row_picks_backward.default,
        (of_picks, each, None, None, each, logits, picks, given[2], stats, IGNORED, None),
    )


@pytest.mark.parametrize("wrong", [-1, CLASSES])
def test_picks_out_of_bounds(wrong):
    given = list(leaf_arguments("cpu"))
    given[4] = given[4].clone()
    given[4][3, 1] = wrong
    message = f"pick {wrong} is out of bounds for 37 classes"
    with pytest.raises(IndexError, match=message):
        fused.linear_row_statistics_forward(*given)
    logits, stats = torch.zeros(45, CLASSES), torch.zeros(45, 3)
    with pytest.raises(IndexError, match=message):
        fused.row_picks_forward(logits, given[4], stats, None)
    if wrong > 0:
        with pytest.raises(IndexError, match=message):
            linear_log_probs(given[0], given[1], given[4])


@pytest.mark.gpu
def test_picks_out_of_bounds_on_a_gpu():
    result = on_a_gpu_of_its_own("""
h, w = torch.randn(3, 8, device="cuda"), torch.randn(5, 8, device="cuda")
picks = torch.tensor([[0, 1], [2, 5], [0, 0]], device="cuda")
torch.ops.fused.linear_log_probs(h, w, picks)
torch.cuda.synchronize()
""")
    assert result.returncode != 0


@pytest.mark.parametrize(
    ("picks", "message"),
    [
        (torch.zeros(45, 4), r"picks to be int64 of shape \[45, K\] with K at least 1, got"),
        (torch.zeros(45).long(), r"of shape \[45, K\] with K at least 1, got torch.int64 \[45\]"),
        (torch.zeros(44, 4).long(), r"at least 1, got torch.int64 \[44, 4\]"),
        (torch.zeros(45, 0).long(), r"at least 1, got torch.int64 \[45, 0\]"),
    ],
)
def test_errors_of_the_leaf(picks, message):
    given = list(leaf_arguments("cpu"))
    given[4] = picks
    with pytest.raises(RuntimeError, match=message):
        fused.linear_row_statistics_forward(*given)


def test_no_logits_are_held():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(144, 8, generator=generator, requires_grad=True)
    w = torch.randn(8000, 8, generator=generator, requires_grad=True)
    index = torch.randint(8000, (144, 20), generator=generator)
    target = torch.randn(144, 20, generator=generator).log_softmax(-1)

    def train():
        linear_top_k_kl_div(h, w, target, index).backward()

    train()
    assert largest_allocation(train) < 2 * 16 * 8000 * 4


# The divergence from a sparse teacher.


def teacher_of(index, leading, device, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(*leading, CLASSES, generator=generator, dtype=torch.float64)
    return F.log_softmax(logits.to(device, dtype), -1).gather(-1, index.clamp(min=0))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_top_k_kl_div(reduction, reverse, renormalize, device):
    (h, w, b), index, _ = problem(device)
    target = teacher_of(index, ROWS, device)
    student = F.log_softmax(F.linear(h, w, b) / 1.7, -1).gather(-1, index)
    if renormalize:
        student = F.log_softmax(student, -1)
    pair = (target, student) if reverse else (student, target)
    expected = F.kl_div(*pair, reduction=reduction, log_target=True)
    expected = expected.sum(-1) if reduction == "none" else expected
    options = {"linear_bias": b, "reverse": reverse, "renormalize": renormalize}
    found = linear_top_k_kl_div(h, w, target, index, reduction, temperature=1.7, **options)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(loss.sum(), (h, w, b)) for loss in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_all_classes_of_a_teacher(device):
    """Then it is the divergence of two softmaxes."""
    (h, w, _), _, _ = problem(device)
    logits = torch.randn(*ROWS, CLASSES, dtype=torch.float64, device=device)
    target, index = F.log_softmax(logits, -1).sort(-1, descending=True)
    for reverse in (False, True):
        whole = fused.linear_softmax_kl_div(h, w, logits, 3, reverse=reverse)
        found = linear_top_k_kl_div(h, w, target, index, reverse=reverse)
        torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_padding_of_a_teacher(reverse, renormalize, device):
    """Padding adds nothing, also in rows of nothing else."""
    (h, w, _), index, _ = problem(device)
    target = teacher_of(index, ROWS, device)
    options = {"reverse": reverse, "renormalize": renormalize, "reduction": "none"}
    expected = linear_top_k_kl_div(h, w, target[..., :4], index[..., :4], **options)
    index[..., 4:], target[..., 4:] = IGNORED, torch.nan
    found = linear_top_k_kl_div(h, w, target, index, **options)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(loss.sum(), (h, w)) for loss in (found, expected)]
    torch.testing.assert_close(*gradients)
    index[0], target[0] = IGNORED, torch.nan
    found = linear_top_k_kl_div(h, w, target, index, **options)
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    (gradient,) = torch.autograd.grad(found.sum(), h)
    assert torch.equal(gradient[0], torch.zeros_like(gradient[0]))
    assert gradient.isfinite().all()


def test_teacher_without_probability(device):
    (h, w, _), index, _ = problem(device)
    target = teacher_of(index, ROWS, device)
    expected = linear_top_k_kl_div(h, w, target[..., :5], index[..., :5], "sum")
    target[..., 5] = -torch.inf
    torch.testing.assert_close(linear_top_k_kl_div(h, w, target, index, "sum"), expected)
    assert linear_top_k_kl_div(h, w, target, index, "sum", reverse=True) == torch.inf


def test_trained_teacher(device):
    (h, w, _), index, _ = problem(device)
    target = teacher_of(index, ROWS, device).requires_grad_()
    loss = linear_top_k_kl_div(h, w, target, index, "sum")
    (gradient,) = torch.autograd.grad(loss, target)
    student = F.log_softmax(F.linear(h, w), -1).gather(-1, index)
    torch.testing.assert_close(gradient, (target.exp() * (target - student + 1)).detach())


def test_narrow_teacher(device):
    (h, w, _), index, _ = problem(device, torch.bfloat16)
    target = teacher_of(index, ROWS, device, torch.bfloat16)
    loss = linear_top_k_kl_div(h, w, target, index)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, linear_top_k_kl_div(h, w, target.float(), index))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"index": torch.zeros(ROWS).long()},
            RuntimeError,
            r"one shape \[5, 9, 'K'\], got \[5, 9\]",
        ),
        ({"target": torch.zeros(5, 9, 4)}, RuntimeError, r"got \[5, 9, 6\] and \[5, 9, 4\]"),
        ({"target": torch.zeros(5, 9, 6).long()}, NotImplementedError, "expected target to be"),
        ({"index": torch.zeros(5, 9, 6)}, RuntimeError, "index to be int64"),
        ({"reduction": "max"}, ValueError, "expected reduction to be one of"),
        ({"temperature": 0.0}, RuntimeError, "temperature to be positive, got 0"),
        ({"softcap": 0.0}, RuntimeError, "softcap to be positive, got 0"),
        ({"linear_bias": torch.zeros(3)}, RuntimeError, r"linear_bias shape \(37,\)"),
        ({"target": torch.zeros(5, 9, 6, device="meta")}, RuntimeError, "target to be on input's"),
    ],
)
def test_errors_of_a_teacher(change, error, message):
    (h, w, b), index, _ = problem(dtype=torch.float32)
    given = {"input": h, "linear_weight": w, "linear_bias": b, "index": index}
    given = {**given, "target": torch.zeros(5, 9, 6), **change}
    with pytest.raises(error, match=message):
        linear_top_k_kl_div(**given)


@pytest.mark.parametrize("backend", ["inductor", "compile_losses"])
@pytest.mark.parametrize("reverse", [False, True])
def test_compiled(reverse, backend, no_code):
    (h, w, b), index, _ = problem()
    target = teacher_of(index, ROWS, "cpu")

    def step(h, w, b):
        return linear_top_k_kl_div(h, w, target, index, linear_bias=b, reverse=reverse)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    losses = [function(h, w, b) for function in (compiled, step)]
    torch.testing.assert_close(*losses)
    gradients = [torch.autograd.grad(loss, (h, w, b)) for loss in losses]
    torch.testing.assert_close(*gradients)


def test_transforms():
    (h, w, b), index, _ = problem()
    batched = torch.func.vmap(lambda x, i: linear_log_probs(x, w, i, b))(h, index)
    torch.testing.assert_close(batched, linear_log_probs(h, w, index, b))
