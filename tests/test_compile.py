"""The two ways into torch.compile, and five reference models compiled by each."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import compile_losses
from compile_losses import inductor_passes, switches
from compile_losses.inductor_passes import InPlacePass, Pass, forget_backwards, note_backward
from compile_losses.options import Settings
from tests import WITHOUT_VECTORS
from tests.results import count_fused_calls

pytestmark = pytest.mark.usefixtures("kernels_for_small_losses")


class MeanSquaredError(nn.Module):
    def forward(self, predictions, targets):
        return torch.mean((predictions - targets) ** 2)


class ModuleMSE(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 12)
        self.criterion = nn.MSELoss()

    def forward(self, predictions, targets):
        return self.criterion(self.head(predictions), targets)


class KLDivergence(nn.Module):
    def forward(self, predictions, targets):
        return F.kl_div(torch.log(predictions), targets, reduction="batchmean")


class CrossEntropy(nn.Module):
    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, predictions, targets):
        return self.criterion(predictions, targets)


class SmoothL1(nn.Module):
    def forward(self, predictions, targets):
        return F.smooth_l1_loss(predictions, targets, beta=0.5)


def real(rows):
    return torch.randn(rows, 12), torch.randn(rows, 12)


def distributions(rows):
    return torch.rand(rows, 12).softmax(-1), torch.rand(rows, 12).softmax(-1)


def classes(rows):
    return torch.randn(rows, 12), torch.randint(12, (rows,))


REFERENCE_MODELS = {
    "mse": (MeanSquaredError, real),
    "module mse": (ModuleMSE, real),
    "kl": (KLDivergence, distributions),
    "cross entropy": (CrossEntropy, classes),
    "smooth l1": (SmoothL1, real),
}
reference_models = pytest.mark.parametrize(
    ("model", "inputs"), REFERENCE_MODELS.values(), ids=REFERENCE_MODELS
)


def loss_and_gradient(model, predictions, targets):
    predictions = predictions.detach().requires_grad_()
    loss = model(predictions, targets)
    return loss.detach(), torch.autograd.grad(loss, predictions)[0]


@pytest.mark.sampled(2)
@reference_models
def test_reference_model(model, inputs, device):
    module = model().to(device)
    compiled = torch.compile(module, backend="compile_losses", fullgraph=True)
    arguments = [t.to(device) for t in inputs(40)]
    torch.testing.assert_close(
        loss_and_gradient(compiled, *arguments), loss_and_gradient(module, *arguments)
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(*arguments), module(*arguments))
    assert rewritten(module, arguments)


def rewritten(module, arguments):
    report = compile_losses.explain(module, *arguments)
    return [site.status for site in report.sites] == ["rewritten"]


@pytest.mark.sampled(2)
@reference_models
def test_reference_model_dynamic(model, inputs, device):
    """Three batch sizes, no more graphs than stock."""
    module = model().to(device)
    frames = []
    for backend in ("aot_eager", "compile_losses"):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
        for rows in (40, 17, 64):
            arguments = [t.to(device) for t in inputs(rows)]
            torch.testing.assert_close(
                loss_and_gradient(compiled, *arguments), loss_and_gradient(module, *arguments)
            )
        frames.append(counter.frame_count)
    assert frames[1] <= frames[0]


def test_dynamic_hyper_parameter():
    """A float argument may be a symbol of the graph."""

    def loss(a, b, beta):
        return F.smooth_l1_loss(a, b, beta=beta)

    compiled = torch.compile(
        loss, backend="compile_losses", dynamic=True, options={"inner_backend": "aot_eager"}
    )
    a, b = torch.randn(30), torch.randn(30)
    for beta in (0.5, 0.7, 1.3):
        torch.testing.assert_close(compiled(a, b, beta), loss(a, b, beta))


def test_grad_output_is_honoured(device):
    module = SmoothL1()
    compiled = torch.compile(module, backend="compile_losses")
    for factor in (1.0, 3.0, -0.5, 0.0):
        results = []
        for function in (compiled, module):
            a, b = (t.to(device) for t in real(8))
            torch.manual_seed(1)
            a = torch.randn(8, 12, device=device).requires_grad_()
            b = torch.ones(8, 12, device=device)
            (function(a, b) * factor).backward()
            results.append(a.grad)
        torch.testing.assert_close(*results)


def python(script, **environment):
    """Runs a script in a fresh process; returns what it printed."""
    import os

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env={**os.environ, **WITHOUT_VECTORS, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_backend_needs_no_import():
    output = python("""
        import sys, torch
        import torch.nn.functional as F
        assert "compile_losses" not in sys.modules
        assert "compile_losses" in torch.compiler.list_backends()
        ours = dict(backend="compile_losses", options={"inner_backend": "eager"})
        f = torch.compile(lambda a, b: F.mse_loss(a, b), fullgraph=True, **ours)
        a, b = torch.rand(3), torch.rand(3)
        torch.testing.assert_close(f(a, b), F.mse_loss(a, b))
        print("compile_losses" in sys.modules)
    """)
    assert output.strip() == "True"


def forget_compiled():
    """Nothing is left whose backward may yet be compiled."""
    torch._dynamo.reset()
    gc.collect()


def test_enable_and_disable():
    def loss(a, b):
        return ((a - b) ** 2).mean()

    a, b = torch.rand(7, requires_grad=True), torch.rand(7)

    def fused_calls():
        forget_compiled()
        compiled = torch.compile(loss)
        torch.testing.assert_close(compiled(a, b), loss(a, b))
        compiled(a, b).backward()
        return count_fused_calls(lambda: compiled(a, b))

    assert fused_calls() == 0
    compile_losses.enable()
    try:
        assert fused_calls() > 0
        compile_losses.enable()  # twice is once
    finally:
        compile_losses.disable()
    assert fused_calls() == 0
    with compile_losses.enable():
        assert fused_calls() > 0
    assert fused_calls() == 0
    assert config.pre_grad_custom_pass is None
    assert config.post_grad_custom_post_pass is None


def test_a_forgotten_backward_takes_out_no_pass_of_others():
    """Garbage is collected at any time, and so in the middle of another compilation."""
    graph = torch.fx.Graph()
    unit = graph.placeholder("unit")
    graph.call_function(torch.ops.fused.scale.default, (unit, unit))
    compile_losses.enable()
    note_backward(graph)
    compile_losses.disable()
    assert isinstance(config.post_grad_custom_post_pass, InPlacePass)  # for that backward
    own = InPlacePass(None)
    with config.patch(post_grad_custom_post_pass=own):
        del graph, unit
        gc.collect()
        assert config.post_grad_custom_post_pass is own
    compile_losses.disable()
    assert config.post_grad_custom_post_pass is None


def test_backward_after_disable(graphs):
    """A backward is compiled when it first runs, and gets its pass wherever that is."""
    forget_compiled()
    model, (x, target) = nn.Linear(12, 12), real(16)
    with compile_losses.enable():
        loss = torch.compile(lambda x, target: F.mse_loss(model(x), target))(x, target)
    assert config.pre_grad_custom_pass is None
    (3 * loss).backward()
    assert "fused.scale_.default" in graphs["post"][1]
    actual = model.weight.grad.clone()
    model.zero_grad()
    (3 * F.mse_loss(model(x), target)).backward()
    torch.testing.assert_close(actual, model.weight.grad)
    compile_losses.disable()
    assert config.post_grad_custom_post_pass is None


def test_forgotten_backwards():
    """A reset of Dynamo leaves nothing whose backward is compiled later."""
    model, (x, target) = nn.Linear(12, 12), real(16)
    # A cache of torch's has the backward as well.
    with compile_losses.enable(), config.patch(force_disable_caches=True):
        loss = torch.compile(lambda x, target: F.mse_loss(model(x), target))(x, target)
    assert isinstance(config.post_grad_custom_post_pass, InPlacePass)
    forget_backwards()
    assert config.post_grad_custom_post_pass is None
    loss.backward()  # compiled without the pass


def test_nested_enable():
    def is_on():
        return config.pre_grad_custom_pass is not None

    with compile_losses.enable():
        with compile_losses.enable():
            assert is_on()
        assert is_on()  # the inner block did not begin it
    assert not is_on()
    compile_losses.enable()
    with compile_losses.enable():
        pass
    assert is_on()
    compile_losses.disable()
    assert not is_on()


def test_pass_set_inside():
    """What the user puts into a slot stays there, also when it was one of ours."""
    mine = UsersPass()
    with config.patch(pre_grad_custom_pass=None):
        with compile_losses.enable():
            config.pre_grad_custom_pass = mine
        assert config.pre_grad_custom_pass is mine
    with compile_losses.enable():
        with config.patch(pre_grad_custom_pass=mine):
            assert config.pre_grad_custom_pass is mine
        assert isinstance(config.pre_grad_custom_pass, Pass)
    assert config.pre_grad_custom_pass is None


def test_enable_in_threads():
    """Threads compile beside each other; each enables for itself where torch's configuration is
    that of a thread."""
    results: dict[int, int] = {}

    def work(number):
        a, b = torch.rand(7 + number, requires_grad=True), torch.rand(7 + number)
        with compile_losses.enable():
            compiled = torch.compile(lambda a, b: ((a - b) ** 2).mean() * (number + 1))
            loss = compiled(a, b)
        loss.backward()
        torch.testing.assert_close(a.grad, 2 * (number + 1) * (a.detach() - b) / a.numel())
        results[number] = 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3


def test_two_backends_with_other_options(graphs):
    """Each compilation has its own options, also in a backward that is compiled later."""
    model, (x, target) = nn.Linear(12, 12), real(16)

    def loss(x, target):
        return F.mse_loss(model(x), target)

    eager = torch.compile(loss, backend="compile_losses", options={"inner_backend": "aot_eager"})
    full = torch.compile(loss, backend="compile_losses", options={"max_autotune": False})
    losses = [full(x, target), eager(x, target)]
    gradients = [torch.autograd.grad(each, model.weight)[0] for each in losses]
    torch.testing.assert_close(*gradients)
    assert len(graphs["post"]) == 2  # Inductor's forward and backward alone


class UsersPass(CustomGraphPass):
    def __init__(self):
        self.graphs = 0

    def __call__(self, graph):
        self.graphs += 1

    def uuid(self):
        return "users pass"


@pytest.mark.parametrize("way", ["enable", "backend"])
def test_users_passes_keep_running(way):
    forget_compiled()
    users = {"pre_grad_custom_pass": UsersPass(), "post_grad_custom_post_pass": UsersPass()}
    a, b = torch.rand(9), torch.rand(9)
    with config.patch({**users, "fx_graph_cache": False}):
        if way == "enable":
            with compile_losses.enable():
                torch.compile(F.mse_loss)(a, b)
        else:
            torch.compile(F.mse_loss, backend="compile_losses")(a, b)
        assert {slot: getattr(config, slot) for slot in users} == users
    assert all(users_pass.graphs > 0 for users_pass in users.values())


def test_pass_identity():
    """The caches' key holds the package's fingerprint, its switches in the environment and the
    options, and nothing where a pass has no identity."""
    library = compile_losses.library
    fingerprint = inductor_passes.fingerprint()
    assert library.fingerprint() in fingerprint  # a fixture of ours adds its constants
    given = (*switches.environment(), *Settings().key)
    assert Pass(None).uuid() == ("Pass", fingerprint, library.loaded(), *given)
    assert Pass(None, Settings(only=())).uuid() != Pass(None).uuid()
    assert "users pass" in Pass(UsersPass()).uuid()
    assert Pass(lambda graph: None).uuid() is None


@pytest.mark.slow
def test_second_process_hits_the_cache(tmp_path):
    """And with Inductor, too, the backend needs no import."""
    script = """
        import sys, torch
        import torch.nn.functional as F
        from torch._dynamo.utils import counters
        assert "compile_losses" not in sys.modules
        f = torch.compile(lambda a, b: F.mse_loss(a, b), backend="compile_losses")
        a, b = torch.rand(5, requires_grad=True), torch.rand(5)
        loss = f(a, b)
        loss.backward()
        torch.testing.assert_close(a.grad, 2 * (a.detach() - b) / 5)
        found = counters["aot_autograd"]
        print(found["autograd_cache_hit"], found["autograd_cache_miss"])
    """
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    assert python(script, **environment).split() == ["0", "1"]
    assert python(script, **environment).split() == ["1", "0"]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode, device):
    module = ModuleMSE().to(device)
    compiled = torch.compile(module, backend="compile_losses", mode=mode)
    for _ in range(3):
        arguments = [t.to(device) for t in real(16)]
        torch.testing.assert_close(
            loss_and_gradient(compiled, *arguments), loss_and_gradient(module, *arguments)
        )


def test_inner_backend_and_unknown_options():
    a, b = torch.rand(5), torch.rand(5)
    for inner in ("eager", "aot_eager"):
        compiled = torch.compile(
            F.mse_loss, backend="compile_losses", options={"inner_backend": inner}
        )
        torch.testing.assert_close(compiled(a, b), F.mse_loss(a, b))
    for arguments in ({"options": {"no_such_option": 1}}, {"mode": "no_such_mode"}):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="no_such") as caught:
            torch.compile(F.mse_loss, backend="compile_losses", **arguments)(a, b)
        assert not isinstance(caught.value, torch._dynamo.exc.BackendCompilerFailed)


@pytest.mark.gpu
def test_cuda_graph_and_streams():
    """Ops replay inside a CUDA graph, and run on the caller's stream."""
    x = torch.randn(64, 5000, device="cuda", requires_grad=True)
    t = torch.randint(5000, (64,), device="cuda")
    a, b = (
        torch.randn(1 << 20, device="cuda", requires_grad=True),
        torch.randn(1 << 20, device="cuda"),
    )

    def step():
        loss = torch.ops.fused.cross_entropy(x, t) + torch.ops.fused.mse_loss(a, b)
        # Detached: a live graph would tie the leaves to the stream it was made on.
        return loss.detach(), *torch.autograd.grad(loss, (x, a))

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(captured, expected, rtol=0, atol=0)
    a.data.mul_(2)
    graph.replay()
    torch.testing.assert_close(captured, step(), rtol=0, atol=0)


@pytest.mark.gpu
def test_no_synchronisation_on_cuda():
    x = torch.randn(64, 5000, device="cuda", requires_grad=True)
    t = torch.randint(5000, (64,), device="cuda")
    weight = torch.rand(5000, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in ({}, {"label_smoothing": 0.1}, {"weight": weight, "label_smoothing": 0.1}):
            torch.ops.fused.cross_entropy(x, t, **options).backward()
        torch.ops.fused.mse_loss(x, x.detach()).backward()
        grad = torch.ones_like(x).detach()
        torch.ops.fused.scale_(grad, torch.ones((), device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
