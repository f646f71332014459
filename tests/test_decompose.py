"""Losses decomposed as torch's own ops: that they stay the ops."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config

from compile_losses.lower import decompose


@pytest.fixture(params=[True, False], ids=["scales once", "scales each"])
def scales_once(request, monkeypatch):
    """Whether a mean's gradient divides one number: on a CPU it does, on a GPU it does not."""
    monkeypatch.setattr(decompose, "_scales_once", lambda device: request.param)
    return request.param


def test_decomposed_in_inference(graphs):
    """Without a backward, too, a loss is fused with what feeds it."""
    a, b = torch.randn(64, 12), torch.randn(64, 12)

    def loss(a, b):
        return F.huber_loss(torch.tanh(a), b, delta=0.3), F.mse_loss(a, b, reduction="none")

    compiled = torch.compile(loss, backend="compile_losses")
    torch.testing.assert_close(compiled(a, b), loss(a, b))
    assert "fused" not in graphs["post"][0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("reduction", "scales_once"),
    [
        ("none", True),
        ("mean", True),
        ("mean", False),
        pytest.param("sum", True, marks=pytest.mark.slow),
    ],
    indirect=["scales_once"],
)
@pytest.mark.parametrize("loss", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"])
def test_decomposed_is_the_op(loss, reduction, scales_once, graphs, no_code):
    """Both gradients, broadcasting, mixed dtypes and dynamic shapes, decomposed."""

    def function(a, b):
        return getattr(torch.ops.fused, loss)(
            torch.sigmoid(a), torch.sigmoid(b), {"none": 0, "mean": 1, "sum": 2}[reduction]
        )

    for shapes in (((6, 12), (6, 12)), ((6, 12), (12,))):
        for dtype in (torch.float32, torch.bfloat16):
            torch._dynamo.reset()
            a = torch.randn(shapes[0], requires_grad=True)
            b = torch.randn(shapes[1]).to(dtype).requires_grad_()
            compiled = torch.compile(function, backend="compile_losses", dynamic=True)
            results = []
            for f in (compiled, function):
                value = f(a, b)
                grad_output = torch.full_like(value, 3.0)
                results.append((value, *torch.autograd.grad(value, (a, b), grad_output)))
            tolerance = {"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(*results, **tolerance)
    assert all("fused" not in graph for graph in graphs["joint"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduction", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
def test_decomposed_weight_is_the_op(loss, reduction, graphs, no_code):
    """The gradient of the weight too, or of it alone; broadcast weights; a wider weight."""

    def function(a, b, w):
        op = getattr(torch.ops.fused, loss)
        return op(torch.sigmoid(a), torch.sigmoid(b), reduction, weight=w)

    for shape, learned, dtype in (
        ((6, 12), (0, 1, 2), torch.bfloat16),
        ((6, 1), (0, 2), torch.float32),
        ((12,), (2,), torch.float32),
        ((), (0,), torch.float32),
    ):
        torch._dynamo.reset()
        a, b, w = torch.randn(6, 12), torch.randn(6, 12).to(dtype), torch.rand(shape) + 0.5
        leaves = [t.requires_grad_() for i, t in enumerate((a, b, w)) if i in learned]
        compiled = torch.compile(function, backend="compile_losses", dynamic=True)
        results = []
        for f in (compiled, function):
            value = f(a, b, w)
            results.append((value, *torch.autograd.grad(value.sum() * 3, leaves)))
        tolerance = {"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(*results, **tolerance)
    assert all("fused" not in graph for graph in graphs["joint"])


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_decomposed_binary_cross_entropy_is_the_op(reduction, graphs, no_code):
    def function(a, b, w, p):
        op = torch.ops.fused.binary_cross_entropy_with_logits
        return op(torch.tanh(a) * 4, torch.sigmoid(b), w, p, reduction)

    for w, p in ((None, None), (torch.rand(6, 1), None), (torch.rand(6, 12), torch.rand(12))):
        torch._dynamo.reset()
        a, b = torch.randn(6, 12, requires_grad=True), torch.randn(6, 12, requires_grad=True)
        compiled = torch.compile(function, backend="compile_losses")
        results = []
        for f in (compiled, function):
            value = f(a, b, w, p)
            results.append((value, *torch.autograd.grad(value.sum() * 3, (a, b))))
        torch.testing.assert_close(*results)
    assert all("fused" not in graph for graph in graphs["joint"])


def test_weighted_mean_without_a_backward_is_decomposed(graphs, no_code):
    """torch's ops sum the weight in the same read."""
    a, b, w = torch.randn(64, 12), torch.randn(64, 12), torch.rand(64, 12)

    def loss(a, b, w):
        return F.mse_loss(a, b, weight=w)

    compiled = torch.compile(loss, backend="compile_losses")
    torch.testing.assert_close(compiled(a, b, w), loss(a, b, w))
    assert "fused" not in graphs["post"][0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shapes", [((1, 5, 6), (2, 5, 6)), ((4, 6), (2, 4, 6)), ((), (3,))])
def test_decomposed_batchmean_is_the_op(shapes, scales_once, graphs, no_code):
    """The batch is the input's own, also where input is broadcast."""

    def function(a, b):
        return F.kl_div(F.gelu(a), torch.sigmoid(b), reduction="batchmean")

    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    compiled = torch.compile(function, backend="compile_losses")
    results = [
        (value, *torch.autograd.grad(value, (a, b))) for value in (compiled(a, b), function(a, b))
    ]
    torch.testing.assert_close(*results)
    assert "fused" not in graphs["joint"][0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reduction", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax_kl_div", {}),
        ("softmax_js_div", {"beta": 0.1}),
        ("softmax_finite_kl_div", {}),
        ("softmax_finite_kl_div", {"entropy": False}),
    ],
)
def test_decomposed_softmax_divergence_is_the_op(name, options, reduction, graphs, no_code):
    """Both gradients, and classes that are impossible in one row or in both."""
    op = getattr(torch.ops.fused, name)
    possible = torch.rand(2, 6, 12) > 0.1
    possible[:, 2, 3] = False
    if name == "softmax_kl_div":
        possible[0] = True  # or its divergence were infinite

    def function(a, b):
        a, b = (
            F.gelu(x).masked_fill(~kept, -torch.inf)
            for x, kept in zip((a, b), possible, strict=True)
        )
        return op(a, b, reduction, temperature=2.0, dim=1, **options)

    a, b = torch.randn(6, 12, requires_grad=True), torch.randn(6, 12, requires_grad=True)
    compiled = torch.compile(function, backend="compile_losses")
    results = [
        (value, *torch.autograd.grad(value.sum(), (a, b)))
        for value in (compiled(a, b), function(a, b))
    ]
    assert all(result.isfinite().all() for result in results[1])
    torch.testing.assert_close(*results)
    assert "fused" not in graphs["joint"][0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_decomposed_classes_may_be_uint8(smoothing, graphs, no_code):
    def function(x, t):
        return torch.ops.fused.cross_entropy(F.gelu(x), t, label_smoothing=smoothing)

    x, t = torch.randn(6, 10, requires_grad=True), torch.randint(10, (6,), dtype=torch.uint8)
    compiled = torch.compile(function, backend="compile_losses")
    results = [
        (value, *torch.autograd.grad(value, x)) for value in (compiled(x, t), function(x, t))
    ]
    torch.testing.assert_close(*results)
    assert "fused" not in graphs["joint"][0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cols", [2, 4, 7])
@pytest.mark.parametrize("loss", ["cross_entropy", "softmax_kl_div"])
def test_short_pairs_of_rows_are_the_op(loss, cols, dtype, graphs):
    """Without a gradient; with one, of class probabilities only, and of fewer bytes."""
    op = getattr(torch.ops.fused, loss)

    def function(a, b):
        return op(a, b)

    a, b = (torch.randn(257, cols, device="cuda", dtype=dtype).softmax(1) for _ in range(2))
    compiled = torch.compile(function, backend="compile_losses")
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(compiled(a, b), function(a, b), **tolerance)
    a.requires_grad_()
    results = [
        (value, *torch.autograd.grad(value, a)) for value in (compiled(a, b), function(a, b))
    ]
    torch.testing.assert_close(*results, **tolerance)
    assert "fused" not in graphs["post"][0]
    is_kernel = loss == "softmax_kl_div" or cols * dtype.itemsize >= 20
    assert ("fused" in graphs["joint"][-1]) == is_kernel


@pytest.mark.parametrize(("rows", "held"), [(64, True), (63, False)])
def test_gradient_of_a_transposed_product(rows, held, graphs, device):
    """Two products read it through a view: it has their strides at once, without a copy. Rows of
    126 bytes are left to Inductor, which may pad them."""

    def loss(x, weight, target):
        return F.mse_loss((weight @ x.t()).t(), target)

    made = [torch.randn(shape) for shape in ((rows, 8), (24, 8), (rows, 24))]
    x, weight, target = (t.to(device, torch.bfloat16) for t in made)
    leaves = x.requires_grad_(), weight.requires_grad_()
    compiled = torch.compile(loss, backend="compile_losses")
    results = [torch.autograd.grad(f(*leaves, target), leaves) for f in (compiled, loss)]
    torch.testing.assert_close(*results, rtol=2e-2, atol=1e-2)
    backward = graphs["post"][1]
    assert ("inductor_force_stride_order" in backward) == held
    assert "fused" not in backward


CLASSES = torch.arange(8) % 5

STOCK = {
    "l1": F.l1_loss,
    "mse": F.mse_loss,
    "mse, sum": lambda p, t: F.mse_loss(p, t, reduction="sum"),
    "smooth l1": lambda p, t: F.smooth_l1_loss(p, t, beta=0.5),
    "huber": lambda p, t: F.huber_loss(p, t, delta=0.5),
    "kl": lambda p, t: F.kl_div(p, t, reduction="batchmean"),
    "kl, mean": F.kl_div,
    "binary cross entropy": F.binary_cross_entropy_with_logits,
    "cross entropy": lambda p, t: F.cross_entropy(p, CLASSES),
    "smoothed": lambda p, t: F.cross_entropy(p, CLASSES, label_smoothing=0.1),
    "probabilities": lambda p, t: F.cross_entropy(p, t.softmax(-1)),
}


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loss", STOCK)
@pytest.mark.parametrize("scales_once", [False], indirect=True)
def test_decomposed_on_a_gpu_is_stocks(loss, dtype, scales_once, no_code):
    """Inductor gets the ops that it gets without this package, and decides about them as then."""
    linear = nn.Linear(16, 12, dtype=dtype)
    x, target = torch.randn(8, 16, dtype=dtype), torch.rand(8, 12).to(dtype)
    found = []

    def record(graph):
        found.append(Counter(n.target for n in graph.nodes if n.op == "call_function"))

    for backend in ("inductor", "compile_losses"):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, t: STOCK[loss](F.gelu(linear(x)), t), backend=backend)
        with config.patch(force_disable_caches=True, post_grad_custom_post_pass=record):
            compiled(x, target).backward()
    stock, ours = found[:2], found[2:]
    assert len(stock) == 2  # forward and backward
    assert ours == stock


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", ["cross entropy", "smoothed", "probabilities"])
def test_gradient_reads_what_the_forward_computed(loss, scales_once, graphs, no_code):
    linear, x, target = nn.Linear(16, 12), torch.randn(8, 16), torch.rand(8, 12)
    compiled = torch.compile(
        lambda x, t: STOCK[loss](F.gelu(linear(x)), t), backend="compile_losses"
    )
    compiled(x, target).backward()
    assert "fused" not in graphs["joint"][-1]
    assert graphs["joint"][-1].count("aten.log.default") == 1


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("loss", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"])
def test_decomposed_mean_of_nothing(loss, scales_once, graphs, no_code):
    """It is nan, also where torch's own function can't be compiled."""
    p, t = torch.randn(0, 12, requires_grad=True), torch.rand(0, 12)

    def function(p, t):
        return getattr(F, loss)(F.gelu(p), t, reduction="mean")

    value = torch.compile(function, backend="compile_losses")(p, t)
    value.backward()
    assert value.isnan()
    assert p.grad is not None
    assert p.grad.shape == p.shape
    assert "fused" not in graphs["joint"][0]


@pytest.mark.gpu
@pytest.mark.kernels  # without them a GPU's gradients of elementwise losses stay in the backward
@pytest.mark.parametrize("loss", ["squared errors", "smooth_l1_loss", "huber_loss"])
def test_decomposed_gradient_takes_no_more_memory(loss, graphs):
    """Inductor writes it over the predictions where it does so in stock torch.compile."""
    linear = nn.Linear(16, 1024, device="cuda", dtype=torch.bfloat16)
    x, target = (torch.randn(1024, n, device="cuda", dtype=torch.bfloat16) for n in (16, 1024))
    x.requires_grad_()

    def step(x, target):
        p = F.gelu(linear(x))
        if loss == "squared errors":
            return ((p - target) ** 2).mean()
        return getattr(F, loss)(p, target)

    leaves, results, peaks = (x, *linear.parameters()), [], []
    for backend in ("inductor", "compile_losses"):
        torch._dynamo.reset()
        compiled = torch.compile(step, backend=backend)
        results.append(torch.autograd.grad(compiled(x, target), leaves))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(compiled(x, target), leaves)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    torch.testing.assert_close(*results, rtol=2e-2, atol=1e-2)
    # They pass the gradient on that the forward made; none of them is a loss.
    found = set(re.findall(r"fused\.(\w+)", graphs["joint"][-1]))
    assert found <= {"keep_gradient", "scale", "write_over"}
    assert peaks[1] <= peaks[0] + (1 << 16)  # partial sums
