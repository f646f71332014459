"""The plan: kernel or torch's own ops, by what they cost; and how explain() tells it."""

from __future__ import annotations

import html.parser
import json
import logging
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import compile_losses
from compile_losses.lower.cost import Feed, Gradient, decomposed_cost, kernel_cost
from compile_losses.lower.fused_calls import find_losses
from compile_losses.lower.plan import plan
from compile_losses.lower.slow_paths import is_small, slow_path
from compile_losses.report import Report
from compile_losses.sites import Site, megabytes
from tests import WITHOUT_VECTORS
from tests.graphs import Head, classes, distributions, real


def test_costs():
    """Training over a matrix product moves three buffers as a kernel, five in torch's ops."""
    product = Feed("matrix product", 1000, None, 1000, True)
    target = Feed("graph input", 1000, None, 1000, False)
    gradients = [Gradient(1000, False)]
    kernel = kernel_cost([product, target], 0, gradients, in_forward=True, in_place=True)
    stock = decomposed_cost([product, target], gradients, 1)
    assert (kernel.moved, kernel.held) == (3000, 1000)
    assert (stock.moved, stock.held) == (5000, 2000)
    # A pointwise op before and after: only torch's ops keep what is between in registers.
    pointwise = Feed("pointwise gelu", 1000, 1000, 1000, True)
    gradients = [Gradient(1000, True)]
    kernel = kernel_cost([pointwise, target], 0, gradients, in_forward=True, in_place=False)
    stock = decomposed_cost([pointwise, target], gradients, 1)
    assert (kernel.moved, kernel.held) == (6000, 2000)
    assert (stock.moved, stock.held) == (4000, 0)
    # A reduction reads far more than it returns, and is not computed again in the backward.
    reduction = Feed("mean", 10, 1000, 10, True)
    assert decomposed_cost([reduction], gradients, 1).moved == 1000 + 2 * 10


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (2048, "2.05 kB"), (3.2e9, "3.2 GB")]
)
def test_megabytes(number, text):
    assert megabytes(int(number)) == text


def heads():
    conv = nn.Conv2d(3, 12, 1)
    embedding = nn.Embedding(12, 16)
    linear = nn.Linear(16, 12)
    in_forward = ("kernel", "gradient in forward", "in place", "scale in place")
    cross_entropy, mse = F.cross_entropy, F.mse_loss
    return {
        "linear": (lambda x, t: mse(linear(x), t), real(), in_forward),
        "view": (lambda x, t: mse(linear(x).view(4, 2, 12), t.view(4, 2, 12)), real(), in_forward),
        "transposed": (lambda x, t: cross_entropy(linear(x.view(2, 4, 16)).transpose(1, 2), t),
                       (torch.randn(8, 16), torch.randint(12, (2, 4))), in_forward),
        "crossed": (lambda x, t: mse(linear(x), t.view(12, 8).t()), real(), ("decomposed",)),
        "sliced": (lambda x, t: cross_entropy(linear(x)[:, :10], t % 10), classes(),
                   ("decomposed",)),
        "tied": (lambda x, t: cross_entropy(embedding(t) @ embedding.weight.t(), t),
                 classes(), in_forward),
        "conv": (lambda x, t: mse(conv(x), t), (torch.randn(2, 3, 4, 4), torch.randn(2, 12, 4, 4)),
                 ("decomposed",)),
        "gelu": (lambda x, t: cross_entropy(F.gelu(linear(x)), t), classes(), ("decomposed",)),
        "layer norm": (lambda x, t: F.kl_div(F.layer_norm(linear(x), (12,)), t), distributions(),
                       ("decomposed",)),
        "unreduced": (lambda x, t: mse(linear(x), t, reduction="none").mean(0).max(), real(),
                      ("decomposed",)),
        "inference": (lambda x, t: cross_entropy(linear(x).detach(), t), classes(), ("kernel",)),
        "inference, simple": (lambda x, t: mse(linear(x).detach(), t), real(), ("decomposed",)),
        "float16": (lambda x, t: mse(linear(x).half(), t.half()), real(), ("decomposed",)),
    }  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("kernels_for_small_losses")
@pytest.mark.parametrize("head", heads())
def test_plan_of_a_head(head):
    function, inputs, plan = heads()[head]
    report = compile_losses.explain(function, *inputs)
    (site,) = report.losses
    assert report.errors == []
    assert site.plan == plan
    assert site.bytes_moved <= 1.05 * site.stock_bytes_moved
    assert site.bytes_held <= 1.05 * site.stock_bytes_held


def test_composed_losses_have_a_plan_of_their_own():
    """Linear cross entropy in inference, after what Inductor would fuse with a loss."""
    weight = torch.randn(12, 16)

    def loss(x, t):
        return torch.ops.fused.linear_cross_entropy(F.gelu(x), weight, t)

    inputs = classes()
    compiled = torch.compile(loss, backend="compile_losses")
    torch.testing.assert_close(compiled(*inputs), loss(*inputs))


@pytest.mark.usefixtures("kernels_for_small_losses")
def test_reasons():
    """Each loss of a program has its own plan, whatever stands between."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 12), nn.Linear(16, 12)

        def forward(self, x, y, t):
            first = F.cross_entropy(self.a(x), t)
            second = F.smooth_l1_loss(torch.tanh(self.b(x)), y)
            third = F.huber_loss(x, x.flip(0))
            return first + second + third + F.binary_cross_entropy(x.sigmoid(), x.sigmoid())

    inputs = torch.randn(8, 16, requires_grad=True), torch.randn(8, 12), torch.randint(12, (8,))
    for _ in range(2):
        report = compile_losses.explain(Model(), *inputs)
        cross_entropy, smooth_l1, huber, declined = report.sites
        assert cross_entropy.plan == ("kernel", "gradient in forward", "in place", "scale in place")
        assert cross_entropy.stock_bytes_moved > cross_entropy.bytes_moved > 0
        assert smooth_l1.plan == ("decomposed",)
        assert "pointwise tanh is computed in the same kernel" in smooth_l1.notes
        assert huber.plan == ("decomposed",) or "gradient in backward" in huber.plan
        assert declined.plan == ()
        assert declined.bytes_moved is None
    text = str(report)
    assert "kernel, gradient in forward, in place, scale in place" in text
    assert "bytes / stock" in text


def _strided(*shape, order=None, gap=0, dtype=torch.float32):
    """Of a shape, its dimensions laid out in this order, outermost first, with a gap at the end."""
    order = order or range(len(shape))
    last = order[-1]
    padded = torch.empty([shape[d] + (gap if d == last else 0) for d in order], dtype=dtype)
    inverse = [list(order).index(d) for d in range(len(shape))]
    return padded.permute(inverse).narrow(last, 0, shape[last])


_ELEMENTWISE = {
    "alike": ((_strided(64, 8), _strided(64, 8)), True),
    "alike, transposed": ((_strided(64, 8, order=(1, 0)),) * 2, True),
    "one row": ((_strided(1, 8), _strided(1, 8, gap=3)), True),
    "wide target": ((_strided(64, 8, dtype=torch.bfloat16), _strided(64, 8)), True),
    "narrow target": ((_strided(64, 8), _strided(64, 8, dtype=torch.bfloat16)), False),
    "transposed": ((_strided(64, 8, order=(1, 0)), _strided(64, 8)), False),
    "gaps": ((_strided(64, 8, gap=3), _strided(64, 8)), False),
    "gaps in both": ((_strided(64, 8, gap=3),) * 2, False),
    "broadcast": ((_strided(64, 8), _strided(64, 1)), False),
    "float64": ((_strided(64, 8, dtype=torch.float64),) * 2, False),
    "weight alike": ((_strided(64, 8),) * 3, True),
    "weights of rows": ((_strided(64, 8), _strided(64, 8), _strided(64, 1)), False),
}  # fmt: skip


def _reason(op, device, tensors, *options):
    """Why a kernel would be slow for a call in inference, on a device that need not be there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors
        ]
        graph = make_fx(lambda *inputs: op(*inputs, *options))(*fakes).graph
    (loss,) = find_losses(graph)
    slow = slow_path(loss)
    return "" if slow is None else slow.reason


@pytest.mark.parametrize("case", _ELEMENTWISE)
def test_slow_elementwise_losses(case):
    """A GPU's kernel reads packets of arguments that are laid out alike; a CPU's may have gaps."""
    tensors, is_fast = _ELEMENTWISE[case]
    weight = () if len(tensors) == 3 else (None,)
    options = (*weight, 1, torch.float32)
    reason = _reason(torch.ops.fused.mse_loss_forward, "cuda", tensors, *options)
    assert ("not laid out alike" not in reason) == is_fast
    on_cpu = _reason(torch.ops.fused.mse_loss_forward, "cpu", tensors, *options)
    assert ("in different orders" in on_cpu) == (case == "transposed")


@pytest.mark.parametrize(
    ("device", "input", "reason"),
    [
        ("cuda", _strided(64, 10, dtype=torch.bfloat16), ""),
        ("cuda", _strided(64, 10, gap=3, dtype=torch.bfloat16), ""),
        ("cuda", _strided(64, 8, dtype=torch.bfloat16), "its rows are short"),
        ("cpu", _strided(64, 8, dtype=torch.bfloat16), ""),
        ("cuda", _strided(64, 10, order=(1, 0)), "its classes are not neighbours in memory"),
        ("cuda", _strided(64, 1, order=(1, 0), dtype=torch.float64), "its rows are short"),
        ("cpu", _strided(64, 10, order=(1, 0)), ""),
        (
            "cpu",
            _strided(64, 10, order=(1, 0), dtype=torch.bfloat16),
            "its classes are not neighbours in memory",
        ),
    ],
)
def test_slow_rows(device, input, reason):
    options = (None, 1, -100, 0.0, torch.float32)
    tensors = (input, torch.empty(64, dtype=torch.int64))
    assert _reason(torch.ops.fused.cross_entropy_forward, device, tensors, *options) == reason


@pytest.mark.parametrize(
    ("loss", "options", "dtypes", "is_slow"),
    [
        ("mse_loss", (None,), (torch.float32, torch.float32), True),
        ("mse_loss", (None,), (torch.bfloat16, torch.float32), True),
        ("mse_loss", (None,), (torch.bfloat16, torch.bfloat16), True),
        ("l1_loss", (None,), (torch.float16, torch.float16), True),
        ("huber_loss", (None,), (torch.bfloat16, torch.bfloat16), True),
        ("kl_div", (), (torch.float32, torch.float32), False),
    ],
)
def test_simple_losses(loss, options, dtypes, is_slow):
    """On a CPU, forwards of little arithmetic are left to Inductor if no gradient is needed."""
    last = {"huber_loss": (1.0,), "kl_div": (False, True)}.get(loss, ())
    arguments = (*options, 1, *last, torch.float32)
    forward = getattr(torch.ops.fused, f"{loss}_forward")
    tensors = [_strided(64, 8, dtype=dtype) for dtype in dtypes]
    assert ("so little arithmetic" in _reason(forward, "cpu", tensors, *arguments)) == is_slow
    assert "so little arithmetic" not in _reason(forward, "cuda", tensors, *arguments)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "dtype", "large"),
    [
        ("cross_entropy", torch.float32, 4096),
        ("cross_entropy", torch.bfloat16, 8192),
        ("cross_entropy_probabilities", torch.float32, 4096),
        ("softmax_kl_div", torch.bfloat16, 8192),
        ("softmax_js_div", torch.float32, 4096),
    ],
)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_small_rows(name, dtype, large, with_gradient):
    """On a CPU, fewer logits than a megabyte are left to torch's own ops."""
    for cols in (large - 1, large):
        decision, *_ = plan(_graph_of_rows(name, cols, dtype, "cpu", with_gradient))
        assert decision.choice == ("decomposed" if cols < large else "kernel")
        assert ("it is small" in decision.reason) == (cols < large)
        graph = _graph_of_rows(name, cols, dtype, "cuda", with_gradient)
        assert not is_small(*find_losses(graph))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float32, (1024, 512)), (torch.bfloat16, (1024, 1024))]
)
@pytest.mark.parametrize("loss", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"])
def test_small_elementwise_losses(loss, dtype, large):
    """Of less than two megabytes: Inductor's loops are as fast. One where logarithms are taken."""
    rows = large[0] // (2 if loss == "kl_div" else 1)
    for count in (rows - 1, rows):
        made = [torch.rand(count, large[1], dtype=dtype) + 0.1 for _ in range(2)]
        input, target = made[0].requires_grad_(), made[1]
        (site,) = compile_losses.explain(lambda a, b: getattr(F, loss)(a, b), input, target).losses
        assert site.plan[0] == ("kernel" if count == rows else "decomposed")
        assert ("decomposed: it is small" in site.notes) == (count < rows)


def test_a_small_input_of_a_large_target():
    def squared_error(input, target):
        return torch.ops.fused.mse_loss_forward(input, target, None, 1, torch.float32)

    with FakeTensorMode():
        expanded, target = torch.empty(1).expand(1024, 512), torch.empty(1024, 512)
        for other in (target, expanded):
            (loss,) = find_losses(make_fx(squared_error)(expanded, other).graph)
            assert is_small(loss) == (other is expanded)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "with_gradient", "in_bfloat16", "in_float32"),
    [
        ("cross_entropy", False, 9, 4),
        ("cross_entropy", True, 9, 4),
        ("cross_entropy_probabilities", False, 13, 7),
        ("cross_entropy_probabilities", True, 9, 4),
        ("softmax_kl_div", False, 13, 7),
        ("softmax_kl_div", True, 1, 1),
        ("softmax_js_div", False, 1, 1),
        ("softmax_js_div", True, 1, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_short_rows(name, with_gradient, in_bfloat16, in_float32, dtype):
    """On a GPU, rows of so few classes at most are left to torch's own ops."""
    longest = in_bfloat16 if dtype == torch.bfloat16 else in_float32
    for cols in range(2, longest + 3):
        graph = _graph_of_rows(name, cols, dtype, "cuda", with_gradient)
        (loss,) = find_losses(graph)
        slow = slow_path(loss)
        assert (slow is not None and slow.reason == "its rows are short") == (cols <= longest)
        if not with_gradient:  # whose writing out needs the device
            (decision,) = plan(graph)
            assert decision.choice == ("decomposed" if cols <= longest else "kernel")
            assert ("its rows are short" in decision.reason) == (cols <= longest)
    (loss,) = find_losses(_graph_of_rows(name, 2, dtype, "cpu", with_gradient))
    assert slow_path(loss) is None


def _graph_of_rows(name, cols, dtype, device, with_gradient):
    """Of the loss of 64 rows, on a device that need not be there."""
    weight, options, needs = {
        "cross_entropy": ((None,), (1, -100, 0.0), ()),
        "cross_entropy_probabilities": ((None,), (1, 0.0), (True, False)),
        "softmax_kl_div": ((), (1, 1.0, 1), (True, False)),
        "softmax_js_div": ((), (1, 0.5, 1.0, 1), (True, False)),
    }[name]
    forward = getattr(torch.ops.fused, f"{name}_forward")
    backward = getattr(torch.ops.fused, f"{name}_backward")

    def step(input, target):
        loss, *saved = forward(input, target, *weight, *options, dtype)
        if not with_gradient:
            return loss
        ones = torch.ones_like(loss)
        return loss, backward(ones, input, target, *weight, *saved, *options, *needs)

    with FakeTensorMode(allow_non_fake_inputs=True):
        input = torch.empty(64, cols, dtype=dtype, device=device)
        target = torch.empty_like(input)
        if name == "cross_entropy":
            target = torch.empty(64, dtype=torch.int64, device=device)
        return make_fx(step)(input, target).graph


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax_kl_div", (1, 1.0, 1, torch.float32)),
        ("softmax_kl_div", (1, 1.0, -1, torch.float32)),
        ("cross_entropy_probabilities", (None, 1, 0.0, torch.float32)),
    ],
)
def test_slow_pairs_of_rows(name, options):
    """One of the two across the memory is enough."""
    op = getattr(torch.ops.fused, f"{name}_forward")
    along, across = _strided(64, 32), _strided(64, 32, order=(1, 0))
    assert _reason(op, "cuda", (along, along), *options) == ""
    for pair in ((along, across), (across, along)):
        assert "not neighbours" in _reason(op, "cuda", pair, *options)


@pytest.mark.usefixtures("kernels_for_small_losses")
def test_dynamic_shapes_are_planned():
    inputs = real(6)
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    (site,) = compile_losses.explain(Head(F.mse_loss), *inputs).losses
    assert site.plan == ("kernel", "gradient in forward", "in place", "scale in place")
    assert site.bytes_moved == 3 * 6 * 12 * 4


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("kernels_for_small_losses")
@pytest.mark.parametrize("way", ["backend", "enable"])
def test_nothing_is_disturbed(way):
    """What was compiled stays compiled, passes of the user's stay where they are."""
    model, inputs = Head(F.mse_loss), real()
    calls = []
    users = lambda graph: calls.append(graph)  # noqa: E731  Inductor wants a plain function here
    with config.patch(post_grad_custom_post_pass=users, force_disable_caches=True):
        if way == "enable":
            compile_losses.enable()
        try:
            before = {slot: getattr(config, slot) for slot in ("post_grad_custom_post_pass",)}
            backend = "inductor" if way == "enable" else "compile_losses"
            compiled = torch.compile(model, backend=backend)
            compiled(*inputs).backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            frames = torch._dynamo.utils.counters["frames"]["ok"]
            rng = torch.get_rng_state()
            for _ in range(2):
                (site,) = compile_losses.explain(compiled, *inputs).losses
                assert site.plan[0] == "kernel"
            assert torch.equal(torch.get_rng_state(), rng)
            assert all(getattr(config, slot) is value for slot, value in before.items())
            torch.testing.assert_close([p.grad for p in model.parameters()], gradients)
            explained = torch._dynamo.utils.counters["frames"]["ok"]
            compiled(*inputs)
            assert torch._dynamo.utils.counters["frames"]["ok"] == explained > frames
        finally:
            compile_losses.disable()
    assert calls


def test_plan_without_a_plan(monkeypatch):
    """Where the graphs can't be had, the report says so, and the function has run all the same."""
    monkeypatch.setattr(
        "compile_losses.report.dry_run.decide",
        lambda *_: (_ for _ in ()).throw(RuntimeError("no luck")),
    )
    report = compile_losses.explain(Head(F.mse_loss), *real())
    assert report.sites[0].status == "rewritten"
    assert report.sites[0].plan == ()
    assert report.errors == ["no plan: RuntimeError: no luck"]
    assert "no plan: RuntimeError: no luck" in str(report)


class Checker(html.parser.HTMLParser):
    """The text of a page, with the tags balanced and nothing loaded from elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert not {name for name, _ in attributes} & {"src", "href", "onload"}
        assert tag != "script"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page(tmp_path):
    source = tmp_path / "<b>model.py"
    source.write_text('loss = F.mse_loss(a, b) if a < b else "<script>"\n')
    site = Site("mse_loss", "rewritten", "a <script>alert(1)</script> & more", str(source), 1)
    report = Report([site], graphs=1, graph_breaks=["<img src=x>"], errors=["'<'"])
    page = report.to_html()
    text = " ".join(Checker(page).text)
    assert 'loss = F.mse_loss(a, b) if a < b else "<script>"' in text
    assert "a <script>alert(1)</script> & more" in text
    assert "<img src=x>" in text
    assert "<b>model.py" in text


@pytest.mark.usefixtures("kernels_for_small_losses")
def test_page_and_dictionary_of_a_model():
    report = compile_losses.explain(Head(F.mse_loss), *real())
    text = " ".join(Checker(report.to_html()).text)
    assert "kernel, gradient in forward, in place, scale in place" in text
    assert "return self.loss(self.prepare(self.linear(x)), target, *others)" in text
    (site,) = json.loads(json.dumps(report.to_dict()))["sites"]
    assert site["plan"] == ["kernel", "gradient in forward", "in place", "scale in place"]
    assert Checker(compile_losses.explain(lambda a: 3, torch.rand(3)).to_html()).text


@pytest.mark.usefixtures("kernels_for_small_losses")
def test_logged(caplog):
    with (
        caplog.at_level(logging.DEBUG, logger="compile_losses"),
        config.patch(force_disable_caches=True),
    ):
        torch.compile(Head(F.mse_loss), backend="compile_losses")(*real()).backward()
    assert "mse_loss: kernel" in caplog.text
    assert "mse_loss: gradient in forward" in caplog.text


@pytest.mark.slow
@pytest.mark.kernels
def test_torch_logs():
    """TORCH_LOGS knows the package's logger by its name, before the package is imported."""
    script = """
import torch, torch.nn.functional as F
f = torch.compile(F.kl_div, backend="compile_losses")
f(torch.rand(3), torch.rand(3))
"""
    import os

    environment = {**os.environ, **WITHOUT_VECTORS, "TORCH_LOGS": "+compile_losses"}
    environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert "kl_div: decomposed (it is small," in result.stderr
