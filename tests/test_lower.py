"""The passes on AOTAutograd's graphs: what they make of a step, and that it stays torch's."""

from __future__ import annotations

import copy
import importlib
import math
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

from compile_losses import inductor_passes
from tests.constants import set_constants
from tests.graphs import Head, classes, compare, distributions, real, step

pytestmark = pytest.mark.usefixtures("kernels_for_small_losses")


def weighted(rows=8):
    return *distributions(rows), torch.rand(rows, 12) + 0.5


binary_cross_entropy = F.binary_cross_entropy_with_logits

LOSSES = {
    "mse": (F.mse_loss, real),
    "weighted mse": (lambda p, t, w: F.mse_loss(p, t, weight=w), weighted),
    "weighted huber": (lambda p, t, w: F.huber_loss(p, t, weight=w), weighted),
    "l1": (F.l1_loss, real),
    "binary": (binary_cross_entropy, distributions),
    "weighted binary": (
        lambda p, t, w: binary_cross_entropy(p, t, w, pos_weight=w[0]),
        weighted,
    ),
    "hand-written mse": (lambda p, t: ((p - t) ** 2).sum(), real),
    "smooth l1": (lambda p, t: F.smooth_l1_loss(p, t, beta=0.3), real),
    "huber": (F.huber_loss, real),
    "kl": (
        lambda p, t: F.kl_div(p, t, reduction="batchmean"),
        distributions,
    ),
    "cross entropy": (lambda p, t: F.cross_entropy(p, t, label_smoothing=0.1), classes),
    "cross entropy sum": (lambda p, t: F.cross_entropy(p, t, reduction="sum"), classes),
}
#: Heads whose last op Inductor computes in the same kernel as the loss.
FUSIBLE = {"gelu", "scaled", "layer norm", "soft-cap", "bfloat16", "sliced", "transposed twice"}
HEADS = {
    "linear": lambda x: x,
    "view": lambda x: x.view(4, 2, 12).view(-1, 12),
    "transposed twice": lambda x: x.t().contiguous().t(),
    "gelu": F.gelu,
    "scaled": lambda x: x * 0.5,
    "layer norm": lambda x: F.layer_norm(x, (12,)),
    "bfloat16": lambda x: x.bfloat16().float(),
    "soft-cap": lambda x: torch.tanh(x / 30) * 30,
    "sliced": lambda x: torch.cat([x, x])[1:9],
}


class Deep(Head):
    """A head whose backward is given an intermediate to overwrite even by torch."""

    def __init__(self, loss):
        super().__init__(loss)
        self.first = nn.Linear(16, 16)

    def forward(self, x, target, *others):
        return super().forward(self.first(x).tanh(), target, *others)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_in_forward(loss, graphs, device):
    function, inputs = LOSSES[loss]
    # Torch's gradient of kl_div reads the target alone, which leaves a thin head nothing to own.
    head = (Deep if loss == "kl" else Head)(function)
    compare(head.to(device), [t.to(device) for t in inputs()])
    (joint,) = graphs["joint"]
    if loss == "weighted binary" and device != "cpu":  # a GPU's kernel is slow where weights differ
        assert "fused" not in joint
        return
    assert "_with_grad" in joint
    assert "fused.scale" in joint
    assert "_backward.default" not in re.sub(r"aten\.\w+", "", joint)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("loss", ["mse", "cross entropy"])
def test_heads(loss, head, graphs, device, request):
    # Code of the others would be torch's own, or that of cross entropy around another op.
    if loss == "mse" or head in FUSIBLE:
        request.getfixturevalue("no_code")
    function, inputs = LOSSES[loss]
    # Inductor itself leaves out a rounding to bfloat16 inside a kernel.
    rtol = 5e-2 if head == "bfloat16" else 1e-4
    compare(Head(function, HEADS[head]).to(device), [t.to(device) for t in inputs()], rtol=rtol)
    if head in FUSIBLE:
        assert "fused" not in graphs["joint"][0]
    else:
        assert "_with_grad" in graphs["joint"][0]


def test_in_place_over_a_dead_product(graphs):
    compare(Head(F.cross_entropy), classes(), factors=(1.0,))
    forward, backward = graphs["post"]
    assert_expected_inline(
        forward,
        """\
%permute = call_function[target=torch.ops.aten.permute.default](args = (%primals_1, [1, 0]), kwargs = {})
%addmm = call_function[target=torch.ops.aten.addmm.default](args = (%primals_2, %primals_3, %permute), kwargs = {})
%cross_entropy_with_grad__default = call_function[target=torch.ops.fused.cross_entropy_with_grad_.default](args = (%addmm, %primals_4, None, 1, -100, 0.0, torch.float32), kwargs = {})""",
    )
    assert_expected_inline(
        backward,
        """\
%scale__default = call_function[target=torch.ops.fused.scale_.default](args = (%getitem_4, %tangents_1), kwargs = {})
%permute_1 = call_function[target=torch.ops.aten.permute.default](args = (%getitem_4, [1, 0]), kwargs = {})
%mm = call_function[target=torch.ops.aten.mm.default](args = (%permute_1, %primals_3), kwargs = {})
%sum_1 = call_function[target=torch.ops.aten.sum.dim_IntList](args = (%getitem_4, [0], True), kwargs = {})
%view = call_function[target=torch.ops.aten.reshape.default](args = (%sum_1, [12]), kwargs = {})""",
    )


def test_not_over_a_buffer_that_is_returned(graphs):
    """Logits that the caller gets are not overwritten, in the forward or in the backward."""

    class WithLogits(Head):
        def forward(self, x, target):
            logits = self.linear(x)
            return self.loss(logits.view(-1, 12), target), logits

    model, inputs = WithLogits(F.cross_entropy), classes()
    compiled = torch.compile(copy.deepcopy(model), backend="compile_losses")
    results = []
    for function in (model, compiled):
        loss, logits = function(*inputs)
        before = logits.detach().clone()
        (loss * 2).backward()
        torch.testing.assert_close(logits, before, rtol=0, atol=0)
        results.append([loss.detach(), before, *(p.grad for p in function.parameters())])
    torch.testing.assert_close(*results)
    assert "_with_grad_." not in graphs["post"][0]


def rows(logits, t):
    return F.cross_entropy(logits, t, reduction="none", label_smoothing=0.1)


def read_again(logits, t):
    return (rows(logits, t) * logits.square().sum(1)).sum()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        (lambda x, w, t: rows(x @ w, t).square().sum(), True),
        (lambda x, w, t: rows((x @ w).view(2, 4, 12).flatten(0, 1), t).square().sum(), True),
        (lambda x, w, t: rows((x @ w).view(2, 4, 12).mT, t.view(2, 4)).square().sum(), True),
        (lambda x, w, t: ((logits := x @ w), rows(logits, t).square().sum())[::-1], False),
        (lambda x, w, t: read_again(x @ w, t), False),
        (lambda x, w, t: (rows(logits := x @ w, t) * rows(logits, 11 - t)).sum(), True),
        (lambda x, w, t: rows(w, t.repeat(2)).square().sum(), False),
    ],
    ids=["product", "view", "transposed", "returned", "read", "two targets", "input"],
)
def test_gradient_by_row_over_saved_logits(function, in_place, graphs, kernels_at_any_cost, device):
    """Where nothing else reads them afterwards."""

    def run(compiled):
        results = []
        for factor in (1.0, 2.0):
            torch.manual_seed(0)
            x, w = (
                torch.randn(shape, dtype=torch.float64, device=device)
                for shape in ((8, 16), (16, 12))
            )
            leaves = x.requires_grad_(), w.requires_grad_()
            loss = compiled(x, w, torch.arange(8, device=device))
            loss, *others = loss if isinstance(loss, tuple) else (loss,)
            grads = torch.autograd.grad(factor * loss, leaves, allow_unused=True)
            results += [loss, *others, *grads]
        return results

    compiled = torch.compile(function, backend="compile_losses")
    torch.testing.assert_close(run(compiled), run(function))
    assert ("vocabulary_parallel_gradient_" in graphs["post"][1]) is in_place


@pytest.mark.parametrize("weighted", [False, True])
def test_float16_gradient_over_saved_logits(weighted, graphs, kernels_at_any_cost, device):
    """A mean whose gradient stays in the backward; some rows, and in the second call all, are ignored."""
    x, w = (torch.randn(shape, device=device).half() for shape in ((8, 16), (16, 12)))
    leaves = x.requires_grad_(), w.requires_grad_()
    weights = torch.rand(12, device=device).half() if weighted else None

    def step(x, w, t):
        return F.cross_entropy(x @ w, t, weights)

    compiled = torch.compile(step, backend="compile_losses")
    for ignored in (2, 8):
        t = torch.arange(8, device=device)
        t[:ignored] = -100
        ours, eager = (torch.autograd.grad(f(x, w, t), leaves) for f in (compiled, step))
        torch.testing.assert_close(ours, eager, rtol=2e-3, atol=1e-3, equal_nan=True)
    assert "vocabulary_parallel_gradient_" in graphs["post"][1]


def accuracy(logits, t):
    loss = F.cross_entropy(logits, t)
    right = (logits.float().argmax(-1) == t).float().mean()
    return loss, right, logits.detach().amax(), logits.detach().topk(1).indices


def of_pairs(logits, t):
    loss = F.cross_entropy(logits, t)
    return loss, logits.detach().view(8, 6, 2).amax(-1).sum()


def of_elements(logits, t):
    loss = F.cross_entropy(logits, t)
    return loss, logits.detach().exp().float()


def of_the_loss(logits, t):
    loss = F.cross_entropy(logits, t)
    return loss, (logits > loss).float().mean()


def needed_again(logits, t):
    return F.cross_entropy(logits, t) + logits.softmax(-1).square().sum(-1).max()


def with_noise(logits, t):
    loss = F.cross_entropy(logits, t)
    return loss, F.dropout(logits, 0.5).sum()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        (accuracy, True),
        (of_pairs, False),
        (of_elements, False),
        (of_the_loss, False),
        (needed_again, False),
        (with_noise, False),
    ],
)
def test_in_place_after_what_else_reads_the_logits(function, in_place, graphs, device):
    def run(compiled):
        torch.manual_seed(0)
        x, w = (torch.randn(shape, device=device) for shape in ((8, 16), (16, 12)))
        x.requires_grad_()
        results = compiled(x, w, torch.arange(8, device=device))
        results = results if isinstance(results, tuple) else (results,)
        results[0].backward()
        return [*results[: 1 if function is with_noise else None], x.grad]

    def step(x, w, t):
        return function(x @ w, t)

    compiled = torch.compile(step, backend="compile_losses")
    torch.testing.assert_close(run(compiled), run(step))
    assert ("with_grad_.default" in graphs["post"][0]) is in_place


@pytest.fixture
def kernels_at_any_cost(monkeypatch):
    module = importlib.import_module("compile_losses.lower.plan")
    monkeypatch.setattr(module, "_MARGIN", math.inf)


def test_fused_into_a_pointwise_consumer(graphs, kernels_at_any_cost):
    """Where a pointwise op reads the gradient, the scale is a multiplication in its kernel."""
    inputs = torch.randn(8, 16), torch.randint(10, (8,))
    compare(Head(F.cross_entropy, lambda x: x[:, :10]), inputs, factors=(1.0, 2.0))
    assert "_with_grad" in graphs["joint"][0]
    assert "scale_" not in graphs["post"][1]
    assert "aten.mul" in graphs["post"][1]


def test_mask_as_weight(no_code):
    compare(Head(lambda p, t: F.mse_loss(p, t, weight=(t > 0.3).float())), real())
    compare(Head(lambda p, t: F.huber_loss(F.gelu(p), t, weight=t > 0.3)), real())


def test_compiled_weighted_l1_is_eagers(graphs, no_code):
    """Compiled by torch 2.13 itself, F.l1_loss leaves its weight out."""
    compare(Head(lambda p, t, w: F.l1_loss(p, t, weight=w)), weighted())
    assert "_with_grad" in graphs["joint"][0]


def keeps_backward(graphs):
    return "_with_grad" not in graphs["joint"][0] and "_backward.default" in graphs["joint"][0]


def test_broadcast_stays_in_the_backward(graphs, no_code, kernels_at_any_cost):
    compare(Head(lambda p, t: F.mse_loss(p[:, :1], t)), real(), factors=(1.0, 2.0))
    assert keeps_backward(graphs)


def test_target_with_gradient(graphs, no_code, kernels_at_any_cost):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 12), nn.Linear(16, 12)

        def forward(self, x):
            return F.smooth_l1_loss(self.a(x), self.b(x))

    compare(TwoHeads(), (torch.randn(8, 16),))
    assert keeps_backward(graphs)


def test_float16_stays_in_the_backward(graphs, no_code, kernels_at_any_cost):
    """1/N underflows in float16 before a GradScaler's factor arrives."""

    class Half(Head):
        def forward(self, x, target):
            return F.mse_loss(self.linear(x), target).float()

    model, inputs = Half(None).half(), [t.half() for t in real(4096)]
    compiled = torch.compile(copy.deepcopy(model), backend="compile_losses")
    expected = step(model, model, inputs, 1024.0)
    actual = step(compiled, compiled, inputs, 1024.0)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-2)
    assert actual[1][0].abs().min() > 0
    assert keeps_backward(graphs)


@pytest.mark.parametrize("prepare", [lambda x: x, torch.tanh], ids=["product", "pointwise"])
@pytest.mark.parametrize("loss", ["mse", "cross entropy"])
def test_loss_used_twice(loss, prepare, graphs, no_code):
    """Two calls with the same arguments are one, with a gradient for each."""
    function, inputs = LOSSES[loss]
    compare(Head(lambda p, t: function(p, t) + function(p, t) ** 2, prepare), inputs())
    assert graphs["joint"][0].count("_forward.default]") <= 1


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_results_returned_apart(reduction, needs_grad):
    """The caller may write to one of two results of the same call."""

    def loss(a, b):
        first = F.mse_loss(a, b, reduction=reduction)
        return first, F.mse_loss(a, b, reduction=reduction).view(-1)

    a, b = torch.randn(4, 5, requires_grad=needs_grad), torch.randn(4, 5)
    first, second = torch.compile(loss, backend="compile_losses")(a, b)
    first.detach().add_(1)
    torch.testing.assert_close(second, loss(a, b)[1])


def test_two_losses_of_one_input(graphs, no_code):
    """Their gradients are added up: as kernels they would hold one more buffer."""
    compare(Head(lambda p, t: F.mse_loss(p, t) + 0.3 * F.smooth_l1_loss(p, t)), real())
    assert "fused" not in graphs["joint"][0]


def test_checkpoint(graphs, device):
    class Checkpointed(Head):
        def forward(self, x, target):
            return checkpoint(super().forward, x, target, use_reentrant=False)

    model = Checkpointed(F.cross_entropy, F.gelu).to(device)
    compare(model, [t.to(device) for t in classes()])


def test_gradient_accumulation_and_dynamic_shapes(device):
    model = Head(F.cross_entropy).to(device)
    compiled = torch.compile(copy.deepcopy(model), backend="compile_losses", dynamic=True)
    batches = [[t.to(device) for t in classes(rows)] for rows in (8, 5, 13)]
    for function in (model, compiled):
        function.zero_grad()
        for batch in batches:
            (function(*batch) / len(batches)).backward()
    torch.testing.assert_close(
        [p.grad for p in compiled.parameters()], [p.grad for p in model.parameters()]
    )


def outcome(compiled, inputs, first_retains):
    """The gradient of two backward calls of one graph, or the error; after a call that decided,
    by retaining its graph or not, how the backward is compiled."""
    compiled(*inputs).backward(retain_graph=first_retains)
    inputs[0].grad = None
    loss = compiled(*inputs)
    try:
        loss.backward(retain_graph=True)
        loss.backward()
    except RuntimeError as error:
        return str(error)[:60]
    return inputs[0].grad.clone()


def of_leaves(function, dtype=torch.float32, tensors=2):
    """A loss with random arguments, of which every other needs a gradient."""

    def inputs(device):
        made = [torch.rand(8, 12, dtype=dtype, device=device) for _ in range(tensors)]
        return [t.requires_grad_(i % 2 == 0) for i, t in enumerate(made)]

    return function, inputs


def of_classes(function):
    def inputs(device):
        return torch.randn(8, 12, device=device, requires_grad=True), torch.arange(8, device=device)

    return function, inputs


def of_product(function):
    def inputs(device):
        p, w, t = (torch.rand(shape, device=device) for shape in ((8, 12), (12, 16), (8, 16)))
        return p.requires_grad_(), w, t

    return function, inputs


RETAINED = {
    "mse": of_leaves(F.mse_loss),
    "scaled mse": of_leaves(lambda p, t: 3 * F.mse_loss(p, t, reduction="sum")),
    "bfloat16 mse": of_leaves(F.mse_loss, torch.bfloat16),
    "broadcast mse": of_leaves(lambda p, t: F.mse_loss(p, t[:, :1])),
    "transposed smooth l1": of_leaves(lambda p, t: F.smooth_l1_loss(p.t(), t.t())),
    "huber": of_leaves(F.huber_loss),
    "bfloat16 l1": of_leaves(F.l1_loss, torch.bfloat16),
    "bfloat16 binary": of_leaves(binary_cross_entropy, torch.bfloat16),
    "kl": of_leaves(lambda p, t: 0.5 * F.kl_div(p, t, reduction="batchmean")),
    "kl of probabilities": of_leaves(lambda p, t: F.kl_div(p.log(), t, reduction="batchmean")),
    "kl of a matrix product": of_product(lambda p, w, t: F.kl_div(p @ w, t, reduction="batchmean")),
    "kl of a layer": of_leaves(
        lambda p, t, b, w: F.kl_div(F.linear(p, t, b[0, :8]), w[:, :8]), tensors=4
    ),
    "kl of gelu": of_leaves(lambda p, t: F.kl_div(F.gelu(p), t, reduction="batchmean")),
    "kl of a slice": of_leaves(lambda p, t: F.kl_div(p[:, :8], t[:, :8], reduction="batchmean")),
    "two with a target": of_leaves(lambda p, t, q: F.mse_loss(p, t) + F.mse_loss(q, t), tensors=3),
    "mse and kl": of_leaves(
        lambda p, t, q, s: F.mse_loss(p, t) + F.kl_div(q, s, reduction="batchmean"), tensors=4
    ),
    "mse of a product": of_leaves(lambda p, t: F.mse_loss(p * 2, t)),
    "mse of gelu": of_leaves(lambda p, t: F.mse_loss(F.gelu(p), t)),
    "mse of a matrix product": of_leaves(lambda p, t: F.mse_loss(p @ t.t(), t[:, :8])),
    "cross entropy": of_classes(F.cross_entropy),
    "cross entropy of a product": of_classes(lambda p, t: F.cross_entropy(p * 2, t)),
    "unreduced cross entropy": of_classes(
        lambda p, t: F.cross_entropy(p @ p.detach().t(), t, reduction="none").square().sum()
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first_retains", [False, True])
@pytest.mark.parametrize("case", RETAINED)
def test_retain_graph_as_stock(case, first_retains, device, no_code):
    """Whatever stock torch.compile allows, ours does; what it refuses, ours refuses or does right,
    as eager mode does."""
    function, make_inputs = RETAINED[case]
    inputs = make_inputs(device)
    results = []
    # A cached backward would be one that another call has decided about.
    with torch._inductor.config.patch(force_disable_caches=True):
        for name in ("inductor", "compile_losses"):
            torch._dynamo.reset()
            results.append(outcome(torch.compile(function, backend=name), inputs, first_retains))
    stock, ours = results
    if isinstance(ours, str):
        assert ours == stock
    else:
        wide = [
            t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
            for t in inputs
        ]
        expected = outcome(function, wide, first_retains)
        torch.testing.assert_close(ours, expected.to(ours.dtype))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        "mse",
        "bfloat16 mse",
        "transposed smooth l1",
        "bfloat16 l1",
    ],
)
def test_gradient_in_forward_of_leaves(case, graphs, device):
    """Of a graph that overwrites nothing, the gradient is autograd's until it frees it."""
    function, make_inputs = RETAINED[case]
    compiled = torch.compile(function, backend="compile_losses")
    inputs = make_inputs(device)
    leaves = [t for t in inputs if t.requires_grad]
    for factor in (1.0, 0.5):
        results = []
        for f in (compiled, function):
            loss = f(*inputs) * factor
            first = torch.autograd.grad(loss, leaves, retain_graph=True)
            results.append([*first, *torch.autograd.grad(loss, leaves)])
        torch.testing.assert_close(*results)
    assert graphs["joint"][0].count("_with_grad.default]") == len(leaves)
    assert graphs["post"][1].count("fused.scale_saved.default]") == len(leaves)


@pytest.mark.parametrize("case", ["kl", "kl of a matrix product", "kl of a layer"])
def test_stays_in_the_backward_where_only_the_backward_would_have_it(case, graphs, no_code):
    """AOTAutograd would donate it, and the backward refuse retain_graph where stock does not; or it
    would take memory where torch holds a target that the caller has."""
    function, make_inputs = RETAINED[case]
    torch.compile(function, backend="compile_losses")(*make_inputs("cpu")).backward()
    assert "_with_grad.default]" not in graphs["joint"][0]
    # Torch's gradient is made of the target alone: nothing else may be saved for it.
    assert "kl_div_backward" not in graphs["joint"][0]


def test_leaf_gradient_is_accumulated_and_hooked(device):
    """Gradients that are the saved tensor itself, where others hold or add to them."""
    p, t = (torch.rand(8, 12, device=device) for _ in range(2))
    p.requires_grad_()
    compiled = torch.compile(F.mse_loss, backend="compile_losses")
    seen: list[list[torch.Tensor]] = []
    for function in (compiled, F.mse_loss):
        p.grad = None
        seen.append([])
        handle = p.register_hook(seen[-1].append)  # holds on to the gradients
        both = function(p, t), function(p, 2 * t)
        for loss in both:
            loss.backward(retain_graph=True)
        (3 * both[0]).backward()
        both[1].backward()
        handle.remove()
        assert p.grad is not None
        seen[-1].append(p.grad)
    torch.testing.assert_close(*seen)


def test_leaf_gradient_takes_no_second_buffer(device):
    """What a leaf gets is the tensor that the forward saved."""
    saved = []

    def pack(tensor):
        saved.append(tensor.data_ptr())
        return tensor

    p, t = (torch.rand(8, 12, device=device).bfloat16() for _ in range(2))
    p.requires_grad_()
    compiled = torch.compile(F.mse_loss, backend="compile_losses")
    compiled(p, t).backward()  # compiled for no hooks
    for retain in (True, False):
        p.grad = None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = compiled(p, t)
        loss.backward(retain_graph=retain)
        assert p.grad is not None
        assert (p.grad.data_ptr() in saved) is not retain


def test_leaves_under_cuda_graphs(graphs, device):
    """What a replayed backward does can't depend on whether its graph is retained."""
    compiled = torch.compile(
        F.mse_loss, backend="compile_losses", options={"triton.cudagraphs": True}
    )
    p, t = (torch.rand(8, 12, device=device) for _ in range(2))
    p.requires_grad_()
    for _ in range(3):
        loss = compiled(p, t)
        grads = [
            torch.autograd.grad(loss, p, retain_graph=retain)[0].clone() for retain in (True, False)
        ]
        torch.testing.assert_close(grads, [2 / 96 * (p - t).detach()] * 2)
    assert "scale" not in graphs["joint"][0]


@pytest.mark.parametrize("mark", ["mark_dynamic", "mark_unbacked"])
def test_gradient_in_forward_of_leaves_of_any_size(mark, graphs):
    p, t = torch.randn(8, 12), torch.randn(8, 12)
    for tensor in (p, t):
        getattr(torch._dynamo.decorators, mark)(tensor, 0)
    compiled = torch.compile(lambda p, t: ((p - t) ** 2).mean(), backend="compile_losses")
    compiled(p.requires_grad_(), t).backward()
    torch.testing.assert_close(p.grad, 2 / 96 * (p - t).detach())
    assert "_with_grad" in graphs["joint"][0]


def test_leaf_gradient_in_place(graphs, monkeypatch):
    """The unit gradient of a small graph input becomes its gradient, without a second buffer."""
    set_constants(monkeypatch, ahead_bytes=1 << 30)
    logits = torch.randn(8, 12, requires_grad=True)
    labels = torch.randint(12, (8,))
    compiled = torch.compile(F.cross_entropy, backend="compile_losses")
    for factor in (1.0, 3.0):
        results = []
        for function in (compiled, F.cross_entropy):
            loss = function(logits, labels)
            results.append(torch.autograd.grad(loss * factor, logits)[0])
        torch.testing.assert_close(*results)
    assert "scale_" in graphs["post"][1]


def test_over_a_product_with_gaps(graphs, kernels_at_any_cost):
    """A slice of a product, as of one that Inductor padded, holds the gradient of its own columns."""
    compare(
        Head(F.cross_entropy, lambda x: x[:, :10]),
        (torch.randn(8, 16), torch.randint(10, (8,))),
    )
    assert "_with_grad_." in graphs["post"][0]


@pytest.mark.parametrize(("bias", "stride"), [(True, 1100), (False, 1120)])
def test_products_with_a_bias_are_not_padded(bias, stride, graphs):
    """Inductor pads a product of which a slice is read, but on a GPU that slows the bias down."""
    linear = nn.Linear(16, 1100, bias=bias)
    compiled = torch.compile(
        lambda x, t: F.cross_entropy(linear(x)[:, :1000], t),
        backend="compile_losses",
        options={"disable_padding_cpu": False},
    )
    x, t = torch.randn(8, 16), torch.randint(1000, (8,))
    with torch.no_grad():
        loss, (code,) = run_and_get_code(compiled, x, t)
    torch.testing.assert_close(loss, F.cross_entropy(linear(x)[:, :1000], t))
    assert (
        f"cross_entropy_forward.default(reinterpret_tensor(buf0, (8, 1000), ({stride}, 1)" in code
    )


def test_create_graph_is_stock(no_code):
    def penalty(function):
        x = torch.randn(8, 12, requires_grad=True)
        (gradient,) = torch.autograd.grad(function(x, torch.zeros(8, 12)), x, create_graph=True)
        gradient.sum().backward()

    errors = []
    for name in ("inductor", "compile_losses"):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError) as error:
            penalty(torch.compile(F.mse_loss, backend=name))
        errors.append(str(error.value)[:80])
    if torch.__version__ >= (2, 12):  # before, stock's graph saves a constant, and says so
        assert errors[0] == errors[1]


def test_stale_formula_misses_the_cache(monkeypatch, tmp_path):
    """A changed formula or kernel changes the fingerprint, and with it every key."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    a, b = torch.rand(5, requires_grad=True), torch.rand(5)

    def misses():
        torch._dynamo.reset()
        counters.clear()
        torch.compile(F.huber_loss, backend="compile_losses")(a, b).backward()
        return counters["aot_autograd"]["autograd_cache_miss"]

    assert misses() == 1
    assert misses() == 0
    monkeypatch.setattr(inductor_passes, "fingerprint", lambda: "of other sources")
    assert misses() == 1
