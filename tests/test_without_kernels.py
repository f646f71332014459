"""What is done where there are no kernels: which ops compute, what is rewritten, what is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compile_losses
from compile_losses import implementations, library, self_test, switches
from compile_losses.__main__ import main
from compile_losses.bodies import blocks
from compile_losses.lower.regions import BY_CHUNKS
from compile_losses.report.explanation import explain_call
from tests.accuracy import assert_accurate
from tests.constants import set_constants
from tests.results import count_fused_calls

pytestmark = pytest.mark.bodies

CPU = torch.device("cpu")
fused = torch.ops.fused


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    """As by the option ``kernels=False``. What a test has patched hides whether kernels are off."""
    before = switches.uses_kernels()
    implementations.use_kernels(False)
    yield
    monkeypatch.undo()
    implementations.use_kernels(before)


class Head(nn.Module):
    """A head whose logits take several chunks."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 700)

    def forward(self, x, target):
        return F.cross_entropy(self.linear(x), target)


@contextmanager
def set_least_features(number):
    """The features from which on a head is taken."""
    with pytest.MonkeyPatch.context() as patch:
        set_constants(patch, hidden_without_kernels=number)
        yield


def outcome(function, parameters, *inputs):
    """A loss and its gradients."""
    loss = function(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def test_one_table_says_what_computes():
    choice = implementations.choose(CPU)
    assert choice.implementation is implementations.BODIES
    assert str(choice) == f"torch's ops: {implementations.OFF}"
    assert not implementations.has_kernels(CPU)
    assert implementations.none_on(CPU) is None
    assert implementations.none_on(torch.device("meta")) is not None


@pytest.mark.kernels
def test_kernels_are_switched_on_and_off():
    x = torch.randn(300, 500).bfloat16()
    target = torch.randint(500, (300,))
    implementations.use_kernels(True)
    assert implementations.choose(CPU).implementation is implementations.KERNELS
    by_kernels = fused.cross_entropy(x, target, reduction=0)
    implementations.use_kernels(False)
    assert implementations.choose(CPU).implementation is implementations.BODIES
    by_torch = fused.cross_entropy(x, target, reduction=0)
    torch.testing.assert_close(by_torch, by_kernels)


def test_every_leaf_op_has_a_body():
    """Of an op with neither a kernel nor a body a call would fail."""
    for name in sorted(library.DECLARED):
        op = getattr(fused, name).default
        keys = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
        assert any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), k) for k in keys), name


def test_bodies_check_for_themselves():
    """What a fake does not look at: the saved numbers, whose shapes graphs do not change."""
    a, t = torch.rand(3, 4), torch.zeros(3, dtype=torch.int64)
    options = (1, -100, 0.0)
    loss, stats, total = fused.cross_entropy_forward(a, t, None, *options, torch.float32)
    with pytest.raises(RuntimeError, match="expected stats as cross_entropy_forward"):
        fused.cross_entropy_backward(loss, a, t, None, stats[:2], total, *options)
    with pytest.raises(RuntimeError, match=r"expected grad_output of shape \[\], got \[2\]"):
        fused.cross_entropy_backward(loss.expand(2), a, t, None, stats, total, *options)
    with pytest.raises(RuntimeError, match="expected total_weight as nll_loss_forward"):
        fused.nll_loss_backward(loss, a, t, None, total.double(), 1, -100)
    with pytest.raises(RuntimeError, match="a loss with its gradient needs a reduction"):
        fused.mse_loss_with_grad(a, a, None, 0, torch.float32)
    with pytest.raises(RuntimeError, match="input of the broadcast shape"):
        fused.mse_loss_with_grad(a[:1], a, None, 1, torch.float32)
    with pytest.raises(RuntimeError, match="expected weight to be float64, float32"):
        fused.mse_loss_forward(a, a, a.long(), 1, torch.float32)
    with pytest.raises(IndexError, match="cross_entropy: target 4 is out of bounds for 4 classes"):
        fused.cross_entropy_forward(a, t + 4, None, *options, torch.float32)
    loss, stats = fused.softmax_kl_div_forward(a, a, 1, 1.0, -1, torch.float32)
    with pytest.raises(RuntimeError, match="expected stats as softmax_kl_div_forward"):
        fused.softmax_kl_div_backward(loss, a, a, stats[:2], 1, 1.0, -1, True, False)
    found = fused.row_statistics_forward(a, t, -100, None)
    with pytest.raises(RuntimeError, match=r"expected grad_nll of shape \[3\], got \[2\]"):
        fused.row_statistics_backward(a[0, :2], None, None, None, a, t, found[6], -100, None)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_blocks_change_nothing(rows, monkeypatch):
    """A body computes block by block what it computes at once."""
    x, target = torch.randn(rows, 37), torch.randint(37, (rows,))
    image, classes = torch.randn(2, 37, 5, rows), torch.randint(37, (2, 5, rows))
    pair = torch.randn(rows, 37)

    def everything():
        given = (None, 1, -100, 0.1, torch.float32)
        yield from fused.cross_entropy_with_grad(x, target, *given)
        yield from fused.cross_entropy_with_grad(image, classes, *given)
        yield from fused.softmax_kl_div_with_grad(x, pair, 3, 2.0, -1, torch.float32)
        yield from fused.mse_loss_with_grad(x, pair, None, 1, torch.float32)
        yield from fused.row_statistics_forward(x, target, -100, 3.0, True)

    expected = list(everything())
    monkeypatch.setattr(blocks, "CPU_ELEMENTS", 50)
    monkeypatch.setattr(blocks, "THREAD_ELEMENTS", 50)
    for ours, whole in zip(everything(), expected, strict=True):
        torch.testing.assert_close(ours, whole)


def test_a_head_is_taken_in_chunks(chunks, no_code):
    model, x = Head(), torch.randn(96, 24)
    inputs = x, torch.randint(700, (96,))
    parameters = tuple(model.parameters())
    exact = outcome(model.double(), parameters, x.double(), inputs[1])
    model.float()
    eager = outcome(model, parameters, *inputs)
    with set_least_features(24):
        compiled = torch.compile(model, backend="compile_losses")
        ours = outcome(compiled, parameters, *inputs)
        report = compile_losses.explain(model, *inputs)
    for found, torchs, reference in zip(ours, eager, exact, strict=True):
        assert_accurate(found, torchs, reference)
    (site,) = report.sites
    assert (site.op, site.status) == ("linear_cross_entropy", "rewritten")
    assert f"no kernels on cpu: torch's ops: {implementations.OFF}" in str(report)


@pytest.mark.parametrize("features", [25, None])
def test_a_head_that_would_take_longer_keeps_its_logits(features, chunks):
    """Of few features, or on a device on which nobody has measured it."""
    inputs = torch.randn(96, 24), torch.randint(700, (96,))
    with set_least_features(features):
        (site,) = compile_losses.explain(Head(), *inputs).sites
        assert site.op == "cross_entropy"
        assert "options={'prefer_memory': True} takes them" in site.notes
        options = {"prefer_memory": True}
        (site,) = explain_call(Head(), inputs, options=options).sites
    if features is not None:
        assert site.op == "linear_cross_entropy"
    else:  # in torch's ops one by one chunks never pay
        assert site.plan == (f"{BY_CHUNKS}, gradient in forward",)


def test_readers_of_the_same_rows_stay_together():
    """Inductor computes once what both read."""
    x, target = torch.randn(96, 700, requires_grad=True), torch.randint(700, (96,))

    def step(x, target):
        entropy = -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)
        return F.cross_entropy(x, target) - 0.01 * entropy.mean()

    report = compile_losses.explain(step, x, target)
    (reason,) = (site.reason for site in report.sites if site.status == "declined")
    assert "Inductor shares what other readers of its input compute" in reason


def test_losses_of_held_logits_are_decomposed(graphs, no_code):
    """A body takes several passes where Inductor's own code takes one."""
    x, y = (torch.randn(512, 2048, requires_grad=True) for _ in range(2))
    z, target = torch.randn(2048, 512), torch.randint(2048, (512,))

    def step(x, y, z, target):
        return F.cross_entropy(x, target) + F.mse_loss(y, z.reshape(y.shape))

    expected = outcome(step, [x, y], x, y, z, target)
    compiled = torch.compile(step, backend="compile_losses")
    torch.testing.assert_close(outcome(compiled, [x, y], x, y, z, target), expected)
    assert "fused." not in "".join(graphs["post"])
    torch._dynamo.reset()
    report = compile_losses.explain(step, x, y, z, target)
    assert [site.status for site in report.sites] == ["rewritten"] * 2
    assert all("there are no kernels" in site.notes for site in report.sites)


def test_statistics_of_held_logits_become_torchs_ops(graphs, no_code):
    """A plan that gives a head its logits back leaves no op that would read them several times."""
    torch.manual_seed(0)
    logits, target = torch.randn(37, 101), torch.randint(101, (37,))
    target[3] = -100
    picks = torch.randint(101, (37, 4))
    factors = torch.randn(5, 37)

    def step(logits, target, picks):
        nll, logsumexp, entropy, total, *_, stats, squares = fused.row_statistics_forward(
            logits, target, -100, 3.0, True
        )
        numbers = torch.stack([nll, logsumexp, entropy, total, squares])
        grads = factors[:4].unbind()
        options = (logits, target, stats, -100, 3.0)
        gradient = fused.row_statistics_backward(*grads, *options)
        log_probs = fused.row_picks_forward(logits, picks, stats, 3.0)
        of_picks = fused.row_picks_backward(
            log_probs, *grads, logits, picks, target, stats, -100, 3.0
        )
        return (numbers * factors).sum(0), gradient, log_probs, of_picks

    with torch.no_grad():
        expected = step(logits, target, picks)
        compiled = torch.compile(step, backend="compile_losses")
        torch.testing.assert_close(compiled(logits, target, picks), expected)
    assert "fused.row" in graphs["before"][0]
    assert "fused." not in graphs["joint"][0]


def test_without_a_plan_such_losses_are_torchs():
    x, target = torch.randn(64, 128), torch.randint(128, (64,))
    options = {"inner_backend": "eager"}
    step = torch.compile(F.cross_entropy, backend="compile_losses", options=options)
    step(x, target)  # recognition evaluates the op on fakes
    assert count_fused_calls(lambda: step(x, target)) == 0


def test_the_option_is_that_of_the_process():
    implementations.use_kernels(True)
    options = {"kernels": False, "inner_backend": "eager"}
    torch.compile(lambda x: x.sum(), backend="compile_losses", options=options)(torch.ones(3))
    assert implementations.OFF in library.kernels.values()
    with compile_losses.enable(kernels=True):
        assert implementations.OFF not in library.kernels.values()


def test_a_device_that_fails_its_self_test_is_left_to_torch(monkeypatch, chunks):
    monkeypatch.setattr(implementations, "TABLE", {})
    monkeypatch.setattr(self_test, "TOLERANCE", 0.0)
    implementations._tested.cache_clear()
    try:
        model = Head()
        inputs = torch.randn(96, 24), torch.randint(700, (96,))
        report = compile_losses.explain(model, *inputs)
        (site,) = report.sites
        assert site.status == "declined"
        assert "a test of cross entropy on it found a difference" in site.reason
        assert "no kernels on cpu: left to torch" in str(report)
        options = {"inner_backend": "eager"}
        compiled = torch.compile(model, backend="compile_losses", options=options)
        assert torch.equal(compiled(*inputs), model(*inputs))
    finally:
        implementations._tested.cache_clear()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch has no devices in Python")
def test_a_device_that_nobody_knows():
    """Our ops compute on it by its own ops; without these it is left to torch."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.python_device"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, *others = done.stdout.splitlines()
    assert first.startswith("left to torch: a test of cross entropy on it failed: NotImpl")
    assert len(others) == 3
    assert all(float(line.partition(": ")[2]) < self_test.TOLERANCE for line in others)


def test_a_library_that_does_not_load(monkeypatch, tmp_path):
    """The import goes on, with a warning: somebody has built the library."""
    name = library._cpu_candidates()[-1].name
    (tmp_path / name).write_text("no library")
    monkeypatch.setattr(library, "PACKAGE", tmp_path)
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(library.kernels, device, "")
    monkeypatch.setattr(library, "DEVICES", set())
    with pytest.warns(UserWarning, match=rf"failed to load {name}.*Build it anew with `pip"):
        library.load_kernels()
    assert f"failed to load {name}" in library.kernels["cpu"]
    choice = implementations.choose(CPU)
    assert choice.implementation is implementations.BODIES
    assert f"failed to load {name}" in str(choice)


def test_no_library_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "PACKAGE", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library._load_cpu() == f"not built: there are none in {tmp_path}"
        missing = {"missing": "this wheel has none"}
        (tmp_path / "kernels.json").write_text(json.dumps({"cpu": missing, "cuda": missing}))
        assert library._load_cpu() == "this wheel has none"


@pytest.mark.kernels
def test_a_library_of_older_sources_is_told(monkeypatch):
    """An op that it lacks would otherwise be slow without a word."""
    monkeypatch.setattr(implementations, "has_kernel", lambda name, _: "mse_loss" not in name)
    implementations.use_kernels(True)
    with pytest.warns(UserWarning, match=r"older sources, without fused::mse_loss_backward"):
        implementations.load()


def test_info(capsys):
    assert main(["info"]) == 0
    plain = capsys.readouterr().out
    assert f"on cpu         torch's ops: {implementations.OFF}" in plain
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["computed_by"]["cpu"].startswith("torch's ops")


def test_a_fresh_process_without_kernels():
    script = (
        "import torch, compile_losses; from compile_losses import library; "
        "x = torch.randn(5, 4, requires_grad=True); w = torch.randn(7, 4); "
        "compile_losses.linear_cross_entropy(x, w, torch.tensor([0, 1, 2, 3, 6])).backward(); "
        "print(library.kernels['cpu'])"
    )
    environment = {**os.environ, "COMPILE_LOSSES_KERNELS": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == implementations.OFF
