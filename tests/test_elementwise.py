"""Gradients of elementwise losses without an op, computed with the loss."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import compile_losses
from benchmarks.elementwise import LOSSES
from compile_losses.backend import compile_losses as backend
from compile_losses.lower.elementwise import move
from tests.accuracy import SIMILAR, assert_accurate, similar
from tests.constants import move_gradients, set_constants
from tests.corpus.elementwise import (
    SUMS_OF_ALL,
    charbonnier,
    inputs_of,
    of_blocks,
    of_each_row,
    pair,
)

MOVED = "fused.keep_gradient"
WRITTEN = "fused.write_over"
ONES = "fused.row_ones"


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    move_gradients(monkeypatch, longest_row=64)


@pytest.fixture
def merging(monkeypatch):
    """As where Inductor merges the dimensions of a loop before it compares loops."""
    set_constants(monkeypatch, merges_loops=True)


@pytest.fixture
def decisions(monkeypatch):
    """What is decided, in the order of compilations."""
    found = []
    decide = move._decide

    def recorded(*args):
        decision = decide(*args)
        found.append(decision)
        return decision

    monkeypatch.setattr(move, "_decide", recorded)
    return found


def results(function, inputs, factor=1.0):
    returned = function(*inputs)
    loss, *others = returned if isinstance(returned, tuple) else (returned,)
    leaves = [t for t in inputs if t.requires_grad]
    gradients = torch.autograd.grad(loss * factor, leaves)
    return [loss.detach(), *(other.detach() for other in others), *gradients]


def check(function, inputs, factor=1.0, compiled=None, like=(), **options):
    """By the one accuracy rule; ``like`` are the worst errors of torch's on inputs like these."""
    if compiled is None:
        compiled = torch.compile(function, backend=backend, **options)
    exact = [
        (t.detach().double() if t.is_floating_point() else t).requires_grad_(t.requires_grad)
        for t in inputs
    ]
    found = [
        results(compiled, inputs, factor),
        results(function, inputs, factor),
        results(function, exact, factor),
    ]
    for i, (ours, eager, true) in enumerate(zip(*found, strict=True)):
        assert_accurate(ours, eager, true, like=like[i] if like else 0.0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, dtype, factor, graphs, no_code):
    check(LOSSES[name][0], inputs_of(name, (32, 48), dtype), factor)
    (joint,) = graphs["joint"]
    assert joint.count(MOVED) == sum(kind.isupper() for kind in LOSSES[name][1])
    assert not any(MOVED in graph for graph in graphs["post"])


@pytest.mark.parametrize("name", ["sigmoid_focal", "kl_to_normal"])
def test_code(name):
    check(LOSSES[name][0], inputs_of(name, (32, 256)), 3.0)


@pytest.mark.usefixtures("merging")
class TestLoopsOfRows:
    """A number that is read for each row keeps the loop of the sum for the gradient."""

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("name", LOSSES)
    def test_losses(self, name, dtype, graphs, no_code):
        check(LOSSES[name][0], inputs_of(name, (32, 48), dtype), 3.0)
        (joint,) = graphs["joint"]
        many = name == "asymmetric" and dtype == torch.bfloat16
        gradients = 0 if many else sum(kind.isupper() for kind in LOSSES[name][1])
        assert joint.count(MOVED) == gradients
        assert joint.count(ONES) == (not many)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (charbonnier, "charbonnier"),
            (of_each_row, "charbonnier"),
            (of_blocks, "charbonnier"),
            (LOSSES["gaussian_nll"][0], "gaussian_nll"),
            (LOSSES["kl_to_normal"][0], "kl_to_normal"),
        ],
    )
    def test_one_loop(self, function, name, dtype):
        """Over the classes of a row there is no second loop, for the gradient."""
        inputs = inputs_of(name, (32, 64), dtype)
        check(function, inputs, 3.0)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend)
        _, (forward, *_) = run_and_get_code(compiled, *inputs)
        assert len(re.findall(r"<static_cast<int64_t>\(64L\);", forward)) == 1

    def test_symbolic_sizes_stay(self, decisions, no_code):
        compiled = torch.compile(charbonnier, backend=backend, dynamic=True)
        for rows in (6, 11):
            inputs = pair(rows, 48)
            for tensor in inputs:
                torch._dynamo.mark_static(tensor, 1)
            check(charbonnier, inputs, 3.0, compiled)
        assert all("different ones" in decision.reason for decision in decisions)

    def test_many_functions_stay(self, decisions, no_code):
        def function(x, t):
            y = x - t
            for _ in range(30):
                y = y * 0.5 + 0.1
            return (y * y + 1e-3).sqrt().mean()

        check(function, pair(32, 48), 3.0)
        (decision,) = decisions
        assert "so many functions" in decision.reason

    def test_operands_behind_the_sum_stay(self, decisions, no_code):
        """The noise is drawn after the sum, and random numbers keep their order."""

        def function(x, t):
            first = charbonnier(x, t)
            noise = torch.rand_like(t)
            return first + charbonnier(x, noise), noise

        loss, _ = torch.compile(function, backend=backend)(*pair(32, 48))
        loss.backward()
        assert any("comes after the sum" in str(decision.reason) for decision in decisions)

    @pytest.mark.sampled(8)
    @pytest.mark.parametrize("seed", range(40))
    def test_random_losses(self, seed, no_code):
        check_random(seed)

    def test_layouts(self, no_code):
        for x in layouts():
            check(charbonnier, [x.requires_grad_(), torch.randn(x.shape)], 3.0)

    @pytest.mark.parametrize("shape", [(0, 5), (1, 1), (7919,), (127, 131), (3, 1, 5, 7)])
    def test_shapes(self, shape, no_code):
        check(LOSSES["gaussian_nll"][0], inputs_of("gaussian_nll", shape), 3.0)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("shape", [(48,), (1, 48), (1, 1, 6, 8)])
    @pytest.mark.parametrize("reduce", SUMS_OF_ALL)
    def test_one_row(self, shape, reduce, decisions, no_code):
        """The sum of one row is one of rows, however torch is asked for it."""
        check(lambda x, t: SUMS_OF_ALL[reduce](((x - t) ** 2 + 1e-3).sqrt()), pair(*shape), 3.0)
        (decision,) = decisions
        assert decision.choice == "gradient in forward"


def test_gradients_stay(graphs, no_code):
    """Near misses: another reduction, a number, a gradient of what is broadcast."""
    variance = torch.rand(48, requires_grad=True)
    for function in (
        lambda x, t: ((x - t).exp()).sum().sqrt() + math.pi * x.norm(),
        lambda x, t: F.softmax(x, -1).pow(3).mean(),
        lambda x, t: x.sum(),
        lambda x, t: ((x - t) ** 4 / variance + variance.log()).mean(),
        lambda x, t: ((x - t) ** 4).mean(0).amax(),
        lambda x, t: (lambda total: total * total.exp())(((x - t) ** 4).mean()),
        lambda x, t: F.layer_norm(x, (48,)).pow(4).mean(),
    ):
        check(function, pair(32, 48))
    assert not any(MOVED in joint for joint in graphs["joint"])


def test_a_learned_variance_has_its_gradient(graphs, no_code):
    def function(x, variance, t):
        return ((x - t) ** 2 / variance.exp() + variance).mean()

    for shape in ((48,), (1,), (32, 1)):
        x, t = pair(32, 48)
        check(function, [x, torch.randn(shape, requires_grad=True), t], 3.0)
    assert not any(MOVED in joint for joint in graphs["joint"])


def test_masked_means_stay(decisions, no_code):
    """The mask would be read before, for its sum."""

    def function(x, t, mask):
        return (((x - t) ** 2 + 1).sqrt() * mask).sum() / mask.sum()

    x, t = pair(32, 48)
    check(function, [x, t, (torch.rand(32, 48) > 0.5).float()], 3.0)
    (decision,) = decisions
    assert "in the same loop" in decision.reason


def test_weights_are_operands(graphs, no_code):
    def function(x, t, mask):
        return (((x - t) ** 2 + 1).sqrt() * mask).sum() / mask.shape[0]

    x, t = pair(32, 48)
    for mask in ((torch.rand(32, 48) > 0.5), torch.rand(32, 1), torch.rand(48)):
        check(function, [x, t, mask], 3.0)
    assert all(MOVED in joint for joint in graphs["joint"])


def behaviour(function, inputs, backwards):
    """Gradients after each backward, or the class of the error."""
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    loss = function(*inputs)
    found = []
    for options in backwards:
        try:
            loss.backward(torch.tensor(3.0), **options)
        except RuntimeError as error:
            found.append(type(error))
        else:
            found += [t.grad.clone() for t in inputs if t.requires_grad]
    return found


HEAD = nn.Linear(48, 40)
RETAINED = {
    "alone": charbonnier,
    "through a view": lambda x, t: charbonnier(x.view(48, 32).t(), t.view(48, 32).t()),
    "behind a product": lambda x, t: charbonnier(HEAD(x), t[:, :40]),
    "of a product with a constant": lambda x, t: charbonnier(x @ t.t(), t @ t.t()),
    "with an op's": lambda x, t: charbonnier(x, t) + F.mse_loss(x * 1.0, t),
    "of two operands": lambda x, t: charbonnier(x, t) + F.mse_loss(HEAD(x), t[:, :40]),
    "of another": lambda x, t: charbonnier(x.exp().cumsum(0), t),
}


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("kernels_for_small_losses")
@pytest.mark.parametrize("case", RETAINED)
@pytest.mark.parametrize("retains", [(True, True, False), (False, False), (False, True)])
def test_retain_graph_as_stock(case, retains, no_code):
    function = RETAINED[case]
    backwards = [{"retain_graph": retain} for retain in retains]
    inputs = pair(32, 48)
    stock = behaviour(torch.compile(function), inputs, backwards)
    torch._dynamo.reset()
    ours = behaviour(torch.compile(function, backend=backend), inputs, backwards)
    for left, right in zip(ours, stock, strict=True):
        if isinstance(right, torch.Tensor):
            torch.testing.assert_close(left, right)
        else:
            assert left is right


def test_retained_before_and_after(no_code):
    """A graph compiled for a backward that retains, and then run by one that does not."""
    compiled = torch.compile(charbonnier, backend=backend)
    for retain in (True, False, True):
        inputs = pair(32, 48)
        loss, expected = compiled(*inputs), charbonnier(*inputs)
        for _ in range(1 + retain):
            (ours,) = torch.autograd.grad(loss, inputs[:1], retain_graph=retain)
            (eager,) = torch.autograd.grad(expected, inputs[:1], retain_graph=True)
            torch.testing.assert_close(ours, eager)


def test_double_backward_as_stock(no_code):
    def twice(loss, x):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.sum().backward()

    errors = []
    for chosen in ("inductor", backend):
        torch._dynamo.reset()
        x, t = pair(32, 48)
        loss = torch.compile(charbonnier, backend=chosen)(x, t)
        with pytest.raises(RuntimeError) as caught:
            twice(loss, x)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_checkpointed(decisions, no_code):
    def function(x, t):
        return checkpoint(lambda x, t: charbonnier(HEAD(x), t), x, t, use_reentrant=False)

    x, _ = pair(32, 48)
    check_head(function, x)
    assert all("checkpointed" in decision.reason for decision in decisions)


def check_head(function, x, t=None):
    t = torch.randn(32, 40) if t is None else t
    for factor in (1.0, 3.0):
        ours = results(torch.compile(function, backend=backend), [x, t], factor)
        expected = results(function, [x, t], factor)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_with_a_memory_budget(decisions, no_code):
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        check_head(lambda x, t: charbonnier(HEAD(x), t), pair(32, 48)[0])
    assert decisions
    assert all("budget" in decision.reason for decision in decisions)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast(dtype, graphs, no_code):
    def function(p, t):
        with torch.autocast("cpu", dtype):
            return charbonnier(p * 2, t)

    inputs = pair(32, 48)
    ours = results(torch.compile(function, backend=backend), inputs, 3.0)
    expected = results(function, inputs, 3.0)
    torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.01)
    assert any(MOVED in joint for joint in graphs["joint"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_behind_a_layer(dtype, graphs, decisions, no_code):
    """The gradient is written over the predictions, which nothing else needs."""

    def function(x, t):
        with torch.autocast("cpu", dtype):
            return charbonnier(HEAD(x), t)

    x, t = pair(32, 48)[0], torch.randn(32, 40)
    ours = results(torch.compile(function, backend=backend), [x, t], 3.0)
    torch.testing.assert_close(ours, results(function, [x, t], 3.0), rtol=0.02, atol=0.01)
    if dtype == torch.float16:
        assert any("float16" in decision.reason for decision in decisions)
    else:
        assert WRITTEN in graphs["post"][0]


#: Layers, by what else reads a prediction; and how many gradients are written over predictions.
BEHIND = {
    "linear": (lambda x, w, b, t: charbonnier(F.linear(x, w, b), t), 1),
    "without bias": (lambda x, w, b, t: charbonnier(F.linear(x, w), t) + 0 * b.sum(), 1),
    "more dimensions": (
        lambda x, w, b, t: charbonnier(F.linear(x.view(4, 8, -1), w, b), t.view(4, 8, -1)),
        1,
    ),
    "activation": (lambda x, w, b, t: charbonnier(F.gelu(F.linear(x, w, b)), t), 1),
    "residual": (lambda x, w, b, t: charbonnier(F.linear(x, w, b) + t.sin(), t), 1),
    "two losses": (
        lambda x, w, b, t: (
            charbonnier(F.linear(x, w, b), t) + F.softplus(-F.linear(x, w, b)).mean()
        ),
        1,
    ),
    "two predictions": (
        lambda x, w, b, t: (
            lambda mean, spread: (spread + (mean - t) ** 2 * torch.exp(-spread)).mean()
        )(F.linear(x, w, b), F.linear(x.tanh(), w)),
        2,
    ),
    "convolution": (
        lambda x, w, b, t: charbonnier(
            F.conv1d(x.view(4, 8, 48), w.view(40, 8, 6), b), t.view(-1)[:1].view(1, 1, 1)
        ),
        None,
    ),
    "logged": (
        lambda x, w, b, t: (lambda y: (charbonnier(y, t), (y.detach() > 0).float().mean()))(
            F.linear(x, w, b)
        ),
        1,
    ),
    "returned": (
        lambda x, w, b, t: (lambda y: (charbonnier(y, t), y.detach()))(F.linear(x, w, b)),
        None,
    ),
    "normalised": (
        lambda x, w, b, t: charbonnier(F.layer_norm(F.linear(x, w, b), (40,)), t),
        0,
    ),
    "softmax": (lambda x, w, b, t: charbonnier(F.linear(x, w, b).softmax(-1), t), 0),
    "read by a layer": (  # whose own result is written over
        lambda x, w, b, t: (lambda y: charbonnier(y, t) + (y @ w).square().mean())(
            F.linear(x, w, b)
        ),
        1,
    ),
    "a number of all": (
        lambda x, w, b, t: (lambda y: charbonnier(y - y.mean(), t))(F.linear(x, w, b)),
        None,
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BEHIND)
def test_over_predictions(name, dtype, graphs, no_code):
    over_predictions(name, dtype, graphs, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BEHIND)
def test_over_predictions_with_code(name, dtype, graphs):
    over_predictions(name, dtype, graphs, torch.device("cuda"))


def over_predictions(name, dtype, graphs, device):
    function, written = BEHIND[name]
    shapes = (32, 48), (40, 48), (40,)
    x, w, b = (torch.randn(shape, device=device) / shape[-1] ** 0.25 for shape in shapes)
    inputs = [each.to(dtype).requires_grad_() for each in (x, w, b)]
    target = torch.rand(32, 40, device=device).to(dtype)
    for factor in (1.0, 3.0):
        check(function, [*inputs, target], factor)
    if written is not None:
        assert graphs["post"][0].count(WRITTEN) == written


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOSSES)
def test_losses_over_predictions(name, graphs):
    """In Inductor's code."""
    function, kinds = LOSSES[name]
    x, *others = inputs_of(name, (32, 48), torch.float32)
    x, *others = (each.detach().cuda() for each in (x, *others))
    w = (torch.eye(48, device="cuda") + torch.rand(48, 48, device="cuda") / 99).requires_grad_()

    def behind(x, w, *others):
        return function(x @ w if kinds[0] != "P" else (x @ w).sigmoid(), *others)

    check(behind, [x, w, *others], 3.0)
    assert WRITTEN in graphs["post"][0]


def test_float16(decisions, no_code):
    check(charbonnier, pair(32, 48, dtype=torch.float16))
    (decision,) = decisions
    assert "float16" in decision.reason


@pytest.mark.parametrize(
    "function",
    [
        lambda x, t: (charbonnier(x, t), (x - t).abs().amax(), x.exp().detach()),
        lambda x, t: (charbonnier(x, t) + 0.1 * ((x * x).exp() - 1).clamp(max=2).sum(1).mean(),),
        lambda x, t: (charbonnier(x, t).float(), charbonnier(x, t).detach()),
        lambda x, t: (charbonnier(x[:, :20], t[:, :20]) * x.shape[0],),
        lambda x, t: (((x - t) ** 4).mean(1).sum() / 7, x - t),
        lambda x, t: (((x - t) ** 4).sum((0, 1), keepdim=True).view(()), x - t),
        lambda x, t: (charbonnier(x.flatten(), t.flatten()), x),
        lambda x, t: (charbonnier(x.t(), t.t()), x),
        lambda x, t: (charbonnier(x.double(), t.double()), x),
        lambda x, t: (((x - t) ** 4).mean(dtype=torch.float64), x),
        lambda x, t: (lambda loss: (loss, loss.view(1), loss.detach()))(charbonnier(x, t)),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_beside_other_outputs(function, factor, no_code):
    check(function, pair(32, 48), factor)


def test_two_losses_of_one_input(graphs, no_code):
    """Two outputs, each with a backward of its own."""

    def function(x, t):
        return charbonnier(x, t), ((x - t).tanh() ** 4).mean()

    x, t = pair(32, 48)
    ours = torch.compile(function, backend=backend)(x, t)
    expected = function(x, t)
    for weights in ((1.0, 1.0), (3.0, 0.0), (0.0, -2.0)):
        total, right = (
            sum(w * loss for w, loss in zip(weights, losses, strict=True))
            for losses in (ours, expected)
        )
        (gradient,) = torch.autograd.grad(total, x, retain_graph=True)
        (eager,) = torch.autograd.grad(right, x, retain_graph=True)
        torch.testing.assert_close(gradient, eager)


def test_two_heads(graphs, no_code):
    """Two tangents, and a gradient for each; each loss is kept with its own."""

    def function(x, y, t):
        return charbonnier(x, t), ((y - t).tanh() ** 4).mean()

    x, t = pair(32, 48)
    y = torch.randn(32, 48, requires_grad=True)
    ours = torch.compile(function, backend=backend)(x, y, t)
    expected = function(x, y, t)
    for i, leaf in enumerate((x, y)):
        torch.testing.assert_close(ours[i], expected[i])
        (gradient,) = torch.autograd.grad(3 * ours[i], leaf, retain_graph=True)
        (eager,) = torch.autograd.grad(3 * expected[i], leaf, retain_graph=True)
        torch.testing.assert_close(gradient, eager)
    (joint,) = graphs["joint"]
    assert joint.count(MOVED) == 2


def test_in_place_changes(no_code):
    def before(x, t):
        y = x * 2
        y.add_(1)
        return charbonnier(y, t)

    def after(x, t):
        y = x * 2
        loss = charbonnier(y, t)
        y.mul_(3)
        return loss, y.detach()

    def of_an_input(x, t):
        loss = charbonnier(x, t)
        t.add_(1)
        return loss

    check(before, pair(32, 48), 3.0)
    check(after, pair(32, 48), 3.0)
    x, t = pair(32, 48)
    clones = t.clone()
    ours = results(torch.compile(of_an_input, backend=backend), [x, t], 3.0)
    torch.testing.assert_close(ours, results(of_an_input, [x, clones], 3.0))
    torch.testing.assert_close(t, clones)


def test_dropout_before(no_code):
    """One mask for the loss and its gradient."""

    def function(x, t):
        y = F.dropout(x, 0.5)
        return charbonnier(y, t), y.detach()

    x, t = pair(32, 48)
    t = torch.zeros_like(t)
    _, y, gradient = results(torch.compile(function, backend=backend), [x, t])
    assert torch.equal(gradient == 0, y == 0)


class VAE(nn.Module):
    """Two losses: of what a convolution returns, and of latents that are read again."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(48, 2 * 12)
        self.decoder = nn.Linear(12, 48)
        self.smooth = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        decoded = self.decoder(mean + (0.5 * log_variance).exp() * 0.3)
        image = self.smooth(decoded[:, None]).sigmoid()
        reconstruction = F.binary_cross_entropy(image.squeeze(1), x, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return (reconstruction + divergence) / x.shape[0]


def test_a_model(graphs, no_code):
    model, x = VAE(), torch.rand(32, 48)
    compiled = torch.compile(model, backend=backend)
    for factor in (1.0, 3.0):
        found = []
        for function in (model, compiled):
            loss = function(x)
            found.append([loss, *torch.autograd.grad(loss * factor, list(model.parameters()))])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    (joint,) = graphs["joint"]
    assert MOVED in joint


def test_small_gradients_stay_behind(graphs, no_code, monkeypatch):
    """Of several of one loss."""
    set_constants(monkeypatch, least_gradient_bytes=4000)
    x, t = pair(32, 48)
    biases = [torch.randn(7, requires_grad=True) for _ in range(3)]

    def function(x, t, *biases):
        return charbonnier(x, t) + sum(((b + 1) ** 4).sum() for b in biases)

    check(function, [x, t, *biases], 3.0)
    (joint,) = graphs["joint"]
    assert joint.count(MOVED) == 1


SHAPES = [(0,), (0, 5), (1,), (1, 1), (7919,), (127, 131), (3, 1, 5, 7), (2, 3, 4, 5), (10007, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["charbonnier", "gaussian_nll"])
def test_shapes(shape, name, no_code):
    check(LOSSES[name][0], inputs_of(name, shape), 3.0)


def layouts():
    yield torch.randn(48, 32).t()
    yield torch.randn(32, 96)[:, ::2]
    yield torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    yield torch.randn(16, 8, 12).transpose(0, 1)
    yield torch.randn(32, 1).expand(32, 48)
    yield torch.randn(33, 48)[1:]


@pytest.mark.parametrize("index", range(6))
def test_layouts(index, no_code):
    x = list(layouts())[index]
    t = torch.randn_like(x)
    for inputs in ([x, t], [t, x]):
        check(charbonnier, [inputs[0].detach().requires_grad_(), inputs[1]], 3.0)
        strided = [inputs[0].detach().requires_grad_(), torch.randn(x.shape)]
        check(charbonnier, strided, 3.0)


@pytest.mark.parametrize("index", [0, 2])
def test_layouts_with_code(index):
    x = list(layouts())[index]
    check(charbonnier, [x.detach().requires_grad_(), torch.randn(x.shape)], 3.0)


def test_dynamic_sizes(graphs, no_code):
    """The number of rows may be a symbol, their length may not."""
    for dim, moves in ((0, True), (1, False)):
        torch._dynamo.reset()
        graphs["joint"].clear()
        for function in (charbonnier, lambda x, t: ((x - t) ** 4).sum(1).mean()):
            compiled = torch.compile(function, backend=backend, dynamic=True)
            for size in (6, 11, 37):
                shape = (size, 48) if dim == 0 else (48, size)
                inputs = pair(*shape)
                for tensor in inputs:
                    torch._dynamo.mark_static(tensor, 1 - dim)
                check(function, inputs, 3.0, compiled)
        assert len(graphs["joint"]) == 2
        assert all((MOVED in joint) == moves for joint in graphs["joint"])


def test_cuda_graphs(decisions, no_code):
    with torch._inductor.config.patch("triton.cudagraphs", True):
        check(charbonnier, pair(32, 48))
    (decision,) = decisions
    assert "CUDA graph" in decision.reason


def test_several_devices(graphs, no_code):
    """A factor may come from the host."""
    scale = torch.tensor(0.3)
    check(lambda x, t: charbonnier(x, t) * scale.to(x.dtype), pair(32, 48), 3.0)


def test_what_is_left_does_not_read_again(decisions, graphs, no_code):
    """A gradient that is computed in what reads it, of the same operands and of others."""
    scales = torch.rand(48, requires_grad=True)

    def same(x, t):
        return (((x - t * scales) ** 2 + 1).sqrt()).mean()

    def others(x, t, y):
        return charbonnier(x, t) + (F.softmax(y * scales, -1) ** 2 + 1).sqrt().mean()

    check(same, pair(32, 48))
    assert "another gradient" in decisions[-1].reason
    check(others, [*pair(32, 48), torch.randn(32, 48)])
    assert decisions[-1].choice == "gradient in forward"


ONE = (torch.tanh, torch.sigmoid, torch.sin, F.softplus, torch.neg, torch.square,
       lambda a: (a * a + 0.5).sqrt(), lambda a: a.tanh().exp(), lambda a: (a.abs() + 1).log(),
       lambda a: a.clamp(-1.5, 1.5), F.silu, lambda a: 2 * a - 0.5, F.relu, torch.abs,
       lambda a: a.double().to(a.dtype), lambda a: torch.where(a > 0.3, a, 0.1 * a))  # fmt: skip
TWO = (torch.add, torch.sub, torch.mul, lambda a, b: a / (b * b + 0.7), torch.maximum,
       lambda a, b: torch.where(b > 0, a, b), lambda a, b: a * (b > 0.2),
       lambda a, b: torch.lerp(a, b, 0.3))  # fmt: skip
SUMS = (
    torch.mean,
    torch.sum,
    lambda a: a.sum(-1).mean(),
    lambda a: a.mean(-1).sum() / 3,
    lambda a: -a.mean(),
    lambda a: a.sum(0).mean(),
    lambda a: 0.5 * a.mean() + a.tanh().sum(-1).mean(),
    lambda a: a.flatten().mean(),
    lambda a: a.sum() / a.shape[0],
)


def random_loss(seed):
    """A loss of two or three tensors, and these."""
    rng = random.Random(seed)
    shape = rng.choice([(6, 20), (3, 4, 10), (2, 3, 4, 5), (97,), (1, 31), (16, 1), (8, 64)])
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for i in range(rng.choice([2, 2, 3])):
        own = shape
        if i and rng.random() < 0.25:
            own = tuple(1 if rng.random() < 0.5 else size for size in shape)
        tensor = torch.randn(own, generator=generator).to(dtype)
        layout = rng.random()
        if layout < 0.2 and tensor.dim() > 1:
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        elif layout < 0.3:
            tensor = torch.cat([tensor, tensor], -1)[..., : own[-1]]
        tensors.append(tensor.requires_grad_(i == 0 or rng.random() < 0.4))
    steps = []
    for _ in range(rng.randint(2, 7)):
        operands = [rng.randrange(1000) for _ in range(2)]
        steps.append((rng.choice(ONE), operands[:1]) if rng.random() < 0.5 else
                     (rng.choice(TWO), operands))  # fmt: skip
    reduce = rng.choice(SUMS)

    def function(*inputs):
        values = [inputs[0]]
        for value in inputs[1:]:
            values.append(values[-1] * 0.5 + value)
        for op, operands in steps:
            values.append(op(*(values[-1 - i % min(3, len(values))] for i in operands)))
        return reduce(values[-1] + 0.1 * values[len(inputs) - 1])

    return function, tensors, {"dynamic": True} if rng.random() < 0.2 else {}


def worst_errors(function, inputs, factor):
    """Of torch's results, on inputs a few per cent larger or smaller."""
    worst = []
    for seed in range(SIMILAR):
        both = []
        for dtype in (inputs[0].dtype, torch.float64):
            generator = torch.Generator().manual_seed(seed)
            near = [similar(t.detach(), generator, inputs[0].dtype).to(dtype) for t in inputs]
            near = [n.requires_grad_(t.requires_grad) for n, t in zip(near, inputs, strict=True)]
            both.append(results(function, near, factor))
        errors = [(a.double() - b).abs() for a, b in zip(*both, strict=True)]
        worst.append([e.max().item() if e.numel() else 0.0 for e in errors])
    return [max(column) for column in zip(*worst, strict=True)]


def check_random(seed):
    function, tensors, options = random_loss(seed)
    factor = random.Random(seed).choice([1.0, 3.0])
    check(function, tensors, factor, like=worst_errors(function, tensors, factor), **options)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(60))
def test_random_losses(seed, no_code):
    check_random(seed)


@pytest.mark.slow
def test_many_random_losses(graphs, no_code):
    for seed in range(60, 560):
        torch._dynamo.reset()
        check_random(seed)
    moved = sum(MOVED in joint for joint in graphs["joint"])
    assert moved > len(graphs["joint"]) / 3


def test_explained():
    """By the line of the loss; one that a table knows as declined becomes rewritten."""

    def model(x, t):
        return ((x - t) ** 2 + 1e-3).sqrt().mean()  # explained

    def declined(x, t, mask):
        return (((x - t) ** 2 + 1).sqrt() * mask).sum() / mask.sum()  # not explained

    def known(x, t):
        return F.binary_cross_entropy(x.sigmoid(), t.sigmoid())

    (site,) = compile_losses.explain(model, *pair(32, 48)).losses
    assert (site.op, site.status, site.plan[0]) == (
        "elementwise",
        "rewritten",
        "elementwise, gradient in forward",
    )
    assert (site.file, site.line) == (__file__, line_of("# explained"))
    assert site.bytes_moved < site.stock_bytes_moved
    x, t = pair(32, 48)
    (site,) = compile_losses.explain(declined, x, t, torch.rand(32, 48)).losses
    assert (site.op, site.status, site.line) == (
        "elementwise",
        "declined",
        line_of("# not explained"),
    )
    assert "in the same loop" in site.reason
    (site,) = compile_losses.explain(known, *pair(32, 48)).losses
    assert (site.op, site.status) == ("binary_cross_entropy", "rewritten")
    (site,) = compile_losses.explain(lambda x, t: (x - t).sum(), *pair(32, 48)).sites
    assert site.status == "unrecognised"
    with torch.no_grad():
        assert not compile_losses.explain(model, *pair(32, 48)).sites


def line_of(comment):
    with open(__file__) as file:
        lines = file.read().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(comment))
