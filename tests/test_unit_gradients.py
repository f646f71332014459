"""Gradients by row of a frozen layer, computed with the losses in eager code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import compile_losses.ops  # noqa: F401
from compile_losses.ops import linear_row_statistics
from compile_losses.ops.linear import matrix_products
from tests.accuracy import assert_accurate

fused = torch.ops.fused
ROWS, HIDDEN, CLASSES = 45, 24, 37

pytestmark = pytest.mark.usefixtures("chunks")


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    """In which no entropy had a gradient yet."""
    formulas = linear_row_statistics.leaves.formulas
    monkeypatch.setattr(formulas, "others_had_gradients", False)


def problem(dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype)

    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[::7] = -1
    factors = torch.randn(ROWS, generator=generator, dtype=torch.float64).to(device)
    input = draw(ROWS, HIDDEN).requires_grad_()
    return input, draw(CLASSES, HIDDEN), draw(CLASSES), target.to(device), factors


def cross_entropy(input, weight, bias, target):
    return fused.linear_cross_entropy(
        input, weight, target, linear_bias=bias, reduction=0, ignore_index=-1, label_smoothing=0.1
    )


def log_probs(input, weight, bias, target):
    return fused.linear_log_probs(input, weight, target, linear_bias=bias, temperature=0.7)[0]


def divergence(input, weight, bias, target):
    return fused.linear_softmax_kl_div(
        input, weight, teacher(input, target), 0, linear_bias=bias, temperature=2.0
    )


def teacher(input, target):
    """Logits that are the same for equal targets."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(CLASSES + 1, CLASSES, generator=generator, dtype=torch.float64)
    return rows.to(input.device)[target].to(input.dtype)


def torchs_cross_entropy(input, weight, bias, target):
    logits = F.linear(input, weight, bias)
    return F.cross_entropy(logits, target, reduction="none", ignore_index=-1, label_smoothing=0.1)


def torchs_log_probs(input, weight, bias, target):
    rows = F.log_softmax(F.linear(input, weight, bias) / 0.7, -1)
    picked = rows.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(target < 0, 0, picked)


def torchs_divergence(input, weight, bias, target):
    rows = F.log_softmax(F.linear(input, weight, bias) / 2, -1)
    of_teacher = F.log_softmax(teacher(input, target) / 2, -1)
    return F.kl_div(rows, of_teacher, reduction="none", log_target=True).sum(-1)


LOSSES = [
    pytest.param(cross_entropy, torchs_cross_entropy, id="cross_entropy"),
    pytest.param(log_probs, torchs_log_probs, id="log_probs"),
    pytest.param(divergence, torchs_divergence, id="divergence"),
]


@pytest.fixture
def products(monkeypatch):
    """The rows of which logits were computed."""
    rows = []
    write = matrix_products.write_logits

    def counted(input, *rest):
        rows.append(len(input))
        return write(input, *rest)

    monkeypatch.setattr(matrix_products, "write_logits", counted)
    return rows


@pytest.fixture
def gradients_added(monkeypatch):
    """The chunks of which gradients were computed."""
    calls = []
    add = matrix_products.Gradients.add
    monkeypatch.setattr(
        matrix_products.Gradients, "add", lambda *args: calls.append(args) or add(*args)
    )
    return calls


def gradient(loss, input, *others):
    *others, factors = others
    (found,) = torch.autograd.grad((loss(input, *others) * factors).sum(), input)
    return found


@pytest.mark.parametrize(("ours", "torchs"), LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_accuracy(ours, torchs, dtype, device):
    given = problem(dtype, device)
    exact = [x.detach().double() if x.is_floating_point() else x for x in given]
    exact[0].requires_grad_()
    found, eager = gradient(ours, *given), gradient(torchs, *given)
    assert_accurate(found, eager, gradient(torchs, *exact))


@pytest.mark.parametrize(("ours", "torchs"), LOSSES)
def test_logits_are_computed_once(ours, torchs, products):
    input, *given, factors = problem()
    loss = ours(input, *given)
    assert sum(products) >= ROWS
    products.clear()
    (loss * factors).sum().backward()
    assert not products


@pytest.mark.parametrize(("ours", "torchs"), LOSSES)
def test_backward_runs_twice(ours, torchs):
    """The gradient of the first is not that of the second."""
    input, *given, factors = problem()
    loss = (ours(input, *given) * factors).sum()
    first = torch.autograd.grad(loss, input, retain_graph=True)[0].clone()
    second = torch.autograd.grad(2 * loss, input, retain_graph=True)[0]
    third = torch.autograd.grad(loss, input)[0]
    expected = gradient(torchs, input, *given, factors)
    for found in (first, second / 2, third):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("ours", "torchs"), LOSSES)
def test_second_derivatives(ours, torchs):
    input, *given = problem()
    *others, factors = given

    def product(loss):
        value = (loss(input, *others) * factors).square().sum()
        (first,) = torch.autograd.grad(value, input, create_graph=True)
        return torch.autograd.grad(first.square().sum(), input)[0]

    torch.testing.assert_close(product(ours), product(torchs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("ours", "torchs"), LOSSES)
def test_checkpoints_compute_no_gradient_twice(ours, torchs, use_reentrant, products):
    input, *given, factors = problem()
    loss = checkpoint(ours, input, *given, use_reentrant=use_reentrant)
    once = sum(products)
    (loss * factors).sum().backward()
    # Again, and once more for the gradient unless that came with the second.
    assert sum(products) == (2 if use_reentrant else 3) * once
    torch.testing.assert_close(input.grad, gradient(torchs, input, *given, factors))


@pytest.mark.parametrize(("ours", "torchs"), LOSSES)
def test_float16_computes_the_logits_again(ours, torchs, products):
    """Its unit gradients underflow."""
    input, *given, factors = problem(torch.float16)
    loss = ours(input, *given)
    products.clear()
    (loss * factors).sum().backward()
    assert sum(products) >= ROWS


@pytest.mark.parametrize("which", ["weight", "bias", "nothing", "no_grad"])
@pytest.mark.parametrize(("ours", "torchs"), LOSSES)
def test_other_gradients(ours, torchs, which, gradients_added):
    """Nothing is computed in advance where the layer is trained, or nothing is."""
    input, weight, bias, target, factors = problem()
    if which == "weight":
        weight.requires_grad_()
    if which == "bias":
        bias.requires_grad_()
    if which == "nothing":
        input = input.detach()
    with torch.set_grad_enabled(which != "no_grad"):
        loss = ours(input, weight, bias, target)
    assert not gradients_added
    if which in ("weight", "bias"):
        tensors = [t for t in (input, weight, bias) if t.requires_grad]
        found = torch.autograd.grad((loss * factors).sum(), tensors)
        value = (torchs(input, weight, bias, target) * factors).sum()
        expected = torch.autograd.grad(value, tensors)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_an_entropy_in_the_loss(gradients_added):
    """From the first gradient of an entropy on, none of log-probabilities is computed in vain."""
    input, weight, bias, target, factors = problem()

    def total(log_probs, entropy):
        return (log_probs * factors).sum() + (entropy * factors.sin()).sum()

    rows = F.log_softmax(F.linear(input, weight, bias), -1)
    picked = rows.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(rows.exp() * rows).sum(-1)
    (expected,) = torch.autograd.grad(total(torch.where(target < 0, 0, picked), entropy), input)
    for turn in range(2):
        log_probs, entropy, *_ = fused.linear_log_probs(input, weight, target, linear_bias=bias)
        assert bool(gradients_added) == (turn == 0)
        (found,) = torch.autograd.grad(total(log_probs, entropy), input)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        gradients_added.clear()


def test_equal_bits_with_and_without_gradients():
    for dtype in (torch.float32, torch.bfloat16):
        input, *given, _ = problem(dtype)
        for loss in (cross_entropy, log_probs, divergence):
            with torch.no_grad():
                expected = loss(input, *given)
            assert torch.equal(loss(input, *given), expected)


def test_an_input_changed_in_between():
    """As in torch, the backward refuses."""
    input, *given, factors = problem()
    changing = input.clone()
    loss = (cross_entropy(changing, *given) * factors).sum()
    changing.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_other_calls_are_not_differentiable():
    input, weight, bias, target, factors = problem()
    options = (0, -1, 0.0, None, 0.0, torch.float64)
    text = '{"steps": [], "results": [1]}'
    with pytest.raises(RuntimeError, match="differentiable for gradients of 1"):
        fused.linear_cross_entropy_rows_with_grad(
            input, weight, target, bias, None, *options, True, False, False, text, [factors]
        )


def test_a_captured_graph_plans_for_itself():
    """In a graph the op is the one that the passes know."""
    input, *given, factors = problem()
    ops = []

    def backend(gm, _):
        ops.extend(str(node.target) for node in gm.graph.nodes)
        return gm

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(
        lambda input: (log_probs(input, *given) * factors).sum(),
        backend=aot_autograd(fw_compiler=backend),
    )
    (found,) = torch.autograd.grad(compiled(input), input)
    assert "fused.linear_row_statistics_forward.default" in ops
    torch.testing.assert_close(found, gradient(torchs_log_probs, input, *given, factors))
