"""Log-probabilities, entropies and likeliest classes by a linear layer, without its output."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import compile_losses.ops  # noqa: F401
from compile_losses.linear import linear_log_probs
from compile_losses.ops import linear_row_statistics
from compile_losses.ops.linear import row_statistics
from compile_losses.ops.linear.row_function import encode
from compile_losses.ops.linear.row_statistics import COUNT, LOG_SQUARES, VARIANCE
from compile_losses.ops.linear.steps import Operand
from compile_losses.ops.linear_row_statistics import in_order
from tests.accuracy import assert_accurate
from tests.linear_problems import largest_allocation

fused = torch.ops.fused
ROWS, HIDDEN, CLASSES = (6, 15), 24, 37

pytestmark = pytest.mark.usefixtures("chunks")


def problem(device="cpu", dtype=torch.float64, leading=ROWS):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_()

    index = torch.randint(CLASSES, leading, generator=generator)
    if index.dim() > 0 and index.numel() > 0:
        index.view(-1)[::7] = -100
    return draw(*leading, HIDDEN), draw(CLASSES, HIDDEN), index.to(device), draw(CLASSES)


def torchs(input, weight, index, bias=None, *, temperature=1.0, softcap=None):
    logits = F.linear(input, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logarithms = F.log_softmax(logits / temperature, -1)
    picked = logarithms.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    picked = torch.where(index < 0, 0, picked)
    return picked, -(logarithms.exp() * logarithms).sum(-1), logits.argmax(-1)


def ours(*tensors, **options):
    return linear_log_probs(*tensors, **options, return_entropy=True, return_argmax=True)


def with_gradients(function, tensors, index, **options):
    """The results, and the gradients of a function of both that have some."""
    input, weight, *bias = tensors
    log_probs, entropy, argmax = function(input, weight, index, *bias, **options)
    total = (log_probs.double().exp() * torch.cos(entropy.double())).sum()
    total = total + entropy.double().square().sum()
    return [log_probs.detach(), entropy.detach(), argmax], torch.autograd.grad(total, tensors)


OPTIONS = [{}, {"temperature": 0.7}, {"softcap": 5.0}, {"temperature": 2.0, "softcap": 3.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("leading", [(), (5,), ROWS, (2, 3, 4), (0, 3)], ids=str)
def test_against_torch(leading, has_bias, options, device):
    input, weight, index, bias = problem(device, leading=leading)
    tensors = [input, weight] + [bias] * has_bias
    results, gradients = with_gradients(ours, tensors, index, **options)
    expected, of_torch = with_gradients(torchs, tensors, index, **options)
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, of_torch, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_accuracy(dtype, device):
    input, weight, index, bias = problem(device, dtype)
    tensors = [input, weight, bias]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    results, gradients = with_gradients(ours, tensors, index)
    eager, of_eager = with_gradients(torchs, tensors, index)
    exact, of_exact = with_gradients(torchs, wide, index)
    for result, of_torch, true in zip(results[:2], eager, exact, strict=False):
        assert result.dtype == torch.float32
        assert_accurate(result, of_torch.to(result.dtype), true)
    for gradient, of_torch, true in zip(gradients, of_eager, of_exact, strict=True):
        assert gradient.dtype == dtype
        assert_accurate(gradient, of_torch, true)


def test_what_is_returned():
    input, weight, index, bias = problem()
    log_probs, entropy, argmax = ours(input, weight, index, bias)
    assert torch.equal(linear_log_probs(input, weight, index, bias), log_probs)
    both = linear_log_probs(input, weight, index, bias, return_entropy=True)
    assert isinstance(both, tuple)
    assert torch.equal(both[1], entropy)
    both = linear_log_probs(input, weight, index, bias, return_argmax=True)
    assert torch.equal(both[1], argmax)
    assert not argmax.requires_grad
    assert not linear_log_probs(*(t.detach() for t in (input, weight)), index).requires_grad


@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=str)
def test_gradients_that_are_needed(needs):
    input, weight, index, _ = problem()
    leaves = [t.detach().requires_grad_(n) for t, n in zip((input, weight), needs, strict=True)]
    log_probs, entropy, _ = ours(*leaves, index)
    (log_probs.sum() + entropy.sum()).backward()
    assert [leaf.grad is not None for leaf in leaves] == [*needs]


def test_differentiated_twice():
    input, weight, index, bias = problem(leading=(4,))

    def function(*tensors):
        return ours(tensors[0], tensors[1], index, tensors[2], softcap=4.0)[:2]

    assert torch.autograd.gradcheck(function, (input, weight, bias))
    assert torch.autograd.gradgradcheck(function, (input, weight, bias))


def test_under_autocast(device):
    input, weight, index, bias = problem(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        results = ours(input, weight, index, bias)
    narrow = [t.bfloat16() for t in (input, weight, bias)]
    torch.testing.assert_close(results, ours(narrow[0], narrow[1], index, narrow[2]))


def test_transforms():
    input, weight, index, bias = problem()
    batched = torch.func.vmap(lambda x, i: ours(x, weight, i, bias))(input, index)
    torch.testing.assert_close(batched, torchs(input, weight, index, bias))
    gradient = torch.func.grad(lambda x: ours(x, weight, index, bias)[0].sum())(input)
    (expected,) = torch.autograd.grad(torchs(input, weight, index, bias)[0].sum(), input)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("backend", ["inductor", "compile_losses"])
def test_compiled(backend, no_code):
    """In a step of this package the gradients are in the forward."""
    input, weight, index, bias = problem()

    def step(input, weight, bias):
        log_probs, entropy = linear_log_probs(
            input, weight, index, bias, temperature=0.9, return_entropy=True
        )
        return -(torch.exp(log_probs) + 0.1 * entropy).mean()

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    loss, expected = compiled(input, weight, bias), step(input, weight, bias)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(one, (input, weight, bias)) for one in (loss, expected)]
    torch.testing.assert_close(*gradients)


def test_no_logits_are_held():
    input, weight, index, _ = problem(dtype=torch.float32)
    weight = torch.randn(8000, HIDDEN, requires_grad=True)

    def train():
        log_probs, entropy, _ = ours(input, weight, index)
        (log_probs.sum() + entropy.sum()).backward()

    train()
    assert largest_allocation(train) < 2 * 16 * 8000 * 4  # of 90 rows


def test_repeatable(device):
    input, weight, index, bias = problem(device, torch.float32)
    one, other = (with_gradients(ours, [input, weight, bias], index) for _ in range(2))
    assert all(
        torch.equal(a, b) for a, b in zip(one[0] + [*one[1]], other[0] + [*other[1]], strict=True)
    )


def leaf_arguments(device, dtype=torch.float32, softcap=None):
    input, weight, index, bias = problem(device, dtype, (20,))
    return in_order(input, weight, index, bias, -100, softcap)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_opcheck(softcap, device, opcheck):
    arguments = leaf_arguments(device, softcap=softcap)
    opcheck(fused.linear_log_probs.default, (*arguments[:3],), {"linear_bias": arguments[3]})
    opcheck(fused.linear_row_statistics_forward.default, arguments)
    opcheck(
        fused.linear_row_statistics_forward.default,
        in_order(*arguments[:2], None, None, -100, softcap, squares=True, variance=True),
    )
    opcheck(
        fused.linear_row_statistics_forward.default,
        in_order(*arguments[:2], None, None, -100, None),
    )
    each = torch.rand(20, device=device)
    for gradients in ((each, *[None] * 5), (None, each, each, each, None, None)):
        for needs in ((True, True, True), (True, False, False), (False, True, False)):
            opcheck(fused.linear_row_statistics_backward.default, (*gradients, *arguments, *needs))
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
    text = encode(
        [(torch.ops.aten.mul.Tensor, (Operand(0), Operand(COUNT)), {})],
        [COUNT + 1, None, COUNT, *[None] * 3],
    )
    opcheck(
        fused.linear_row_statistics_rows_with_grad.default,
        (*detached, True, True, True, text, [each]),
    )


def test_gradients_of_rows(device):
    """As the passes call it: functions of all statistics."""
    arguments = leaf_arguments(device, torch.float64)
    statistics = fused.linear_row_statistics_forward(*arguments)
    known = torch.rand(20, dtype=torch.float64, device=device)
    mul, exp = torch.ops.aten.mul.Tensor, torch.ops.aten.exp.default
    steps = [
        (mul, (Operand(2), Operand(COUNT)), {}),  # entropy times what is known
        (exp, (Operand(0),), {}),
        (mul, (Operand(COUNT + 2), Operand(COUNT + 1)), {}),
    ]
    text = encode(steps, [COUNT + 3, None, COUNT, COUNT + 1, None, None])
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
    found = fused.linear_row_statistics_rows_with_grad(*detached, True, True, True, text, [known])
    nll, _, entropy, total, *_ = statistics
    product = (entropy * known).detach()
    given = (nll.exp() * product).detach(), known, product
    expected = torch.autograd.grad((nll, entropy, total), (*arguments[:2], arguments[3]), given)
    torch.testing.assert_close(found[:COUNT], tuple(s.detach() for s in statistics))
    torch.testing.assert_close(found[COUNT:], expected)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_variance(dtype, softcap, device, monkeypatch):
    """Of logits that are far from 0; a chunk is several blocks."""
    monkeypatch.setattr(row_statistics, "_BLOCK", 100)
    input, weight, _, bias = problem(device, dtype, (20,))
    bias = bias.detach() + 50
    given = in_order(input, weight, None, bias, -100, softcap, variance=True)
    found = fused.linear_row_statistics_forward(*given)[VARIANCE]

    def variance(dtype):
        logits = F.linear(*(t.detach().to(dtype) for t in (input, weight, bias)))
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return logits.to(torch.promote_types(dtype, torch.float32)).var(-1, correction=0)

    assert_accurate(found, variance(dtype), variance(torch.float64))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_squares(dtype, softcap, device):
    """The logarithm of the sum of squared probabilities, beside gradients of others."""
    input, weight, index, bias = problem(device, dtype, (20,))
    scale = 1 if dtype == torch.float16 else 20  # confident rows

    def log_squares(dtype):
        logits = F.linear(*(t.detach().to(dtype) for t in (input * scale, weight, bias)))
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return (2 * F.log_softmax(logits, -1)).logsumexp(-1)

    given = in_order(input * scale, weight, index, bias, -100, softcap, squares=True)
    found = fused.linear_row_statistics_forward(*given)
    exact = log_squares(torch.float64)
    # A confident row's number is near 0, and the difference of two logarithms of the logits' size.
    logits = F.linear(*(t.detach().double() for t in (input * scale, weight, bias)))
    like = 2 * logits.abs().max().item() * torch.finfo(found[LOG_SQUARES].dtype).eps
    assert_accurate(found[LOG_SQUARES], log_squares(dtype), exact, like=like)
    found[0].sum().backward()
    expected = torch.autograd.grad(
        fused.linear_row_statistics_forward(*given[:-5], False, *given[-4:])[0].sum(),
        [weight, bias],
    )
    torch.testing.assert_close((weight.grad, bias.grad), tuple(expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 3)}, r"last dimensions \(in_features\), got 24 and 3"),
        ({"weight": torch.zeros(0, HIDDEN), "bias": None}, r"at least 1 class, got \[0, 24\]"),
        ({"bias": torch.zeros(3)}, r"linear_bias shape \(37,\), got \(3,\)"),
        ({"bias": torch.zeros(CLASSES).double()}, r"linear_bias to have input's dtype"),
        ({"index": torch.zeros(3).long()}, r"index to be int64 of shape \[6, 15\] or \[6, 15, K\]"),
        ({"index": torch.zeros(ROWS)}, r"\[6, 15, K\] with K at least 1, got torch.float32"),
        ({"index": torch.zeros(6, 14, 4).long()}, r"at least 1, got torch.int64 \[6, 14, 4\]"),
        ({"index": torch.zeros(*ROWS, 0).long()}, r"at least 1, got torch.int64 \[6, 15, 0\]"),
        (
            {"index": torch.zeros(1, *ROWS, 4).long()},
            r"at least 1, got torch.int64 \[1, 6, 15, 4\]",
        ),
        ({"temperature": 0.0}, r"temperature to be positive, got 0"),
        ({"softcap": -1.0}, r"softcap to be positive, got -1"),
    ],
)
def test_errors(change, message):
    input, weight, index, bias = problem(dtype=torch.float32)
    given = {"input": input, "weight": weight, "index": index, "bias": bias, **change}
    with pytest.raises(RuntimeError, match=message):
        linear_log_probs(**given)
    with pytest.raises(RuntimeError, match=message):
        linear_log_probs(**{k: v.to("meta") if hasattr(v, "to") else v for k, v in given.items()})


def test_errors_of_the_leaf():
    input, weight, index, bias, *options = leaf_arguments("cpu")
    with pytest.raises(RuntimeError, match=r"expected input of shape \[rows, hidden\]"):
        linear_row_statistics.forward(input[None], weight, index, bias, *options)
    with pytest.raises(RuntimeError, match=r"expected target to be int64 of shape \[20\]"):
        linear_row_statistics.forward(input, weight, index[1:], bias, *options)
    with pytest.raises(NotImplementedError, match="expected input to be float64"):
        linear_row_statistics.forward(input.long(), weight, index, bias, *options)


def test_index_out_of_bounds():
    input, weight, index, _ = problem()
    with pytest.raises(IndexError, match="out of bounds for 37 classes"):
        linear_log_probs(input, weight, torch.full_like(index, CLASSES))
