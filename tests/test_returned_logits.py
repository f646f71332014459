"""Logits that a graph returns beside its loss: lazy where that was asked for, and else kept."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch

import compile_losses
from compile_losses.lazy import LazyLogits
from compile_losses.report import Report
from compile_losses.report.explanation import explain_call
from tests import ROOT, WITHOUT_VECTORS
from tests.constants import set_constants
from tests.corpus.returned import (
    BETWEEN,
    CLASSES,
    HIDDEN,
    KEPT,
    OUTPUTS,
    Model,
    Outputs,
    ids,
    shifted,
)
from tests.linear_problems import largest_allocation

LAZY = {"lazy_logits": True}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    torch._dynamo.reset()
    set_constants(monkeypatch, least_rows=8, logits_bytes=1)


def trained(function, model, read=None):
    """Loss, logits and gradients of a step, whose loss may be joined by one of the logits."""
    model.zero_grad()
    out = function(ids().to(next(model.parameters()).device))
    loss = out["loss"] if read is None else out["loss"] + read(out["logits"])
    loss.backward()
    return loss.detach(), out["logits"], [p.grad for p in model.parameters()]


def assert_lazy(model, *, read=None, options=(), inner="aot_eager", compiled=None):
    expected = trained(model, model, read)
    compiled = compiled or torch.compile(
        model, backend="compile_losses", options={**LAZY, "inner_backend": inner, **dict(options)}
    )
    found = trained(compiled, model, read)
    assert isinstance(found[1], LazyLogits)
    assert found[1]._memory.is_unread() == (read is None)
    torch.testing.assert_close(found[1].detach() + 0, expected[1].detach())
    assert found[1].stride() == expected[1].stride()
    torch.testing.assert_close((found[0], found[2]), (expected[0], expected[2]))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("between", BETWEEN)
def test_returned(between, inner):
    torch.manual_seed(0)
    assert_lazy(Model(BETWEEN[between]), inner=inner)


def test_through_inductor(device):
    torch.manual_seed(0)
    assert_lazy(Model().to(device), inner="inductor")
    assert_lazy(Model().to(device), inner="inductor", read=lambda logits: logits.square().mean())


@pytest.mark.parametrize("bias", [False, True])
def test_loss_of_logits_beside(bias):
    torch.manual_seed(0)
    assert_lazy(Model(bias=bias), read=lambda logits: 0.1 * logits.logsumexp(-1).square().mean())


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name):
    torch.manual_seed(0)
    model = Outputs(OUTPUTS[name])
    expected = model(ids())
    compiled = torch.compile(
        model, backend="compile_losses", options={**LAZY, "inner_backend": "aot_eager"}
    )
    found = compiled(ids())
    for key in expected.keys() - {"loss"}:
        assert isinstance(found[key], LazyLogits)
        assert found[key].requires_grad == expected[key].requires_grad
        torch.testing.assert_close(found[key].detach() + 0, expected[key].detach())


def test_outputs_share_memory():
    """What is written to one output is seen in the others, as of torch's views."""
    model = Outputs(OUTPUTS["last token"])
    compiled = torch.compile(
        model, backend="compile_losses", options={**LAZY, "inner_backend": "aot_eager"}
    )
    found = []
    for function in (model, compiled):
        out = function(ids())
        out["last"].detach().zero_()
        found.append(out["logits"].detach() + 0)
    torch.testing.assert_close(found[1], found[0])
    assert (found[1][:, -1] == 0).all()


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    """What else reads logits in the graph needs them there."""
    torch.manual_seed(0)
    function, reason = KEPT[name]
    model = Outputs(function)
    report = explain_call(model, (ids(),), options=LAZY)
    (site,) = report.losses
    assert site.op == "cross_entropy"
    assert reason in site.reason
    out = torch.compile(
        model, backend="compile_losses", options={**LAZY, "inner_backend": "aot_eager"}
    )(ids())
    assert type(out["logits"]) is torch.Tensor


def test_predictions_beside(no_code):
    """A metric of all rows, beside a loss of some: neither needs the logits in the graph."""
    model = Outputs(lambda logits: {"best": logits.argmax(-1)})
    (site,) = explain_call(model, (ids(),), options=LAZY).losses
    assert site.op == "linear_row_statistics"
    found = torch.compile(model, backend="compile_losses", options=LAZY)(ids())
    expected = model(ids())
    assert isinstance(found["logits"], LazyLogits)
    torch.testing.assert_close(found["best"], expected["best"])
    torch.testing.assert_close(found["loss"], expected["loss"])


def test_switched_off():
    model = Model()
    report = explain_call(model, (ids(),), options={"lazy_logits": False})
    size = f"{4 * 33 * CLASSES * 4 / 1e3:.3g} kB"
    assert f"options={{'lazy_logits': True}} would save {size}" in report.losses[0].reason
    compiled = torch.compile(
        model,
        backend="compile_losses",
        options={"inner_backend": "aot_eager", "lazy_logits": False},
    )
    assert type(compiled(ids())["logits"]) is torch.Tensor


def test_explain_is_told_the_option():
    report = explain_call(Model(), (ids(),), options=LAZY)
    (site,) = report.losses
    assert site.op == "linear_cross_entropy"
    assert "the logits are returned lazily" in site.reason


def test_environment(monkeypatch):
    monkeypatch.setenv("COMPILE_LOSSES_LAZY_LOGITS", "1")
    options = {"inner_backend": "aot_eager"}
    compiled = torch.compile(Model(), backend="compile_losses", options=options)
    assert isinstance(compiled(ids())["logits"], LazyLogits)
    torch._dynamo.reset()
    options["lazy_logits"] = False
    compiled = torch.compile(Model(), backend="compile_losses", options=options)
    assert type(compiled(ids())["logits"]) is torch.Tensor


def test_without_gradients():
    model = Model()
    compiled = torch.compile(
        model, backend="compile_losses", options={**LAZY, "inner_backend": "aot_eager"}
    )
    with torch.no_grad():
        assert type(compiled(ids())["logits"]) is torch.Tensor
        (site,) = explain_call(model, (ids(),), options=LAZY).losses
    assert "no gradients are recorded" in site.reason
    with torch.inference_mode():
        assert type(compiled(ids())["logits"]) is torch.Tensor


def test_frozen_trunk():
    model = Model()
    model.embedding.requires_grad_(False)
    compiled = torch.compile(
        model, backend="compile_losses", options={**LAZY, "inner_backend": "aot_eager"}
    )
    found = []
    for function in (model, compiled):
        out = function(ids())
        found.append(torch.autograd.grad(out["loss"], tuple(model.head.parameters())))
    assert isinstance(out["logits"], LazyLogits)
    torch.testing.assert_close(found[1], found[0])


class Marked(torch.Tensor):
    """Has no __torch_dispatch__ of its own: tracing does not show it."""


def test_subclass():
    """A head of tensors that are more than their numbers stays in its graph."""
    model = Model()
    hidden = torch.randn(40, HIDDEN).requires_grad_().as_subclass(Marked)
    options = {**LAZY, "inner_backend": "eager"}  # AOTAutograd takes no such tensors
    compiled = torch.compile(model.head, backend="compile_losses", options=options)
    assert not isinstance(compiled(hidden), LazyLogits)
    assert isinstance(compiled(hidden.as_subclass(torch.Tensor)), LazyLogits)


def test_bias_changed_in_the_graph():
    class Changed(Model):
        def forward(self, ids):
            out = super().forward(ids)
            with torch.no_grad():
                self.head.bias.mul_(0.5)
            return out

    torch.manual_seed(0)
    model = Changed()
    twin = copy.deepcopy(model)
    compiled = torch.compile(
        model, backend="compile_losses", options={**LAZY, "inner_backend": "aot_eager"}
    )
    torch.testing.assert_close(
        compiled(ids())["logits"].detach() + 0, twin(ids())["logits"].detach()
    )


def test_autocast():
    """In the graph and around it."""

    def inside(model):
        def run(ids):
            with torch.autocast("cpu", torch.bfloat16):
                return model(ids)

        return run

    for compiles in ("inside", "around"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model()
        options = {**LAZY, "inner_backend": "aot_eager"}
        if compiles == "inside":
            compiled = torch.compile(inside(model), backend="compile_losses", options=options)
        else:
            compiled = inside(torch.compile(model, backend="compile_losses", options=options))
        found = trained(compiled, model)
        expected = trained(inside(model), model)
        assert isinstance(found[1], LazyLogits)
        assert found[1].dtype == torch.bfloat16
        torch.testing.assert_close(found[1].detach() + 0, expected[1].detach())
        torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=1e-2)


def test_dynamic_shapes():
    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(
        model,
        backend="compile_losses",
        options={**LAZY, "inner_backend": "aot_eager"},
        dynamic=True,
    )
    for many in (33, 57):
        tokens = torch.randint(CLASSES, (5, many))
        out, expected = compiled(tokens), model(tokens)
        assert isinstance(out["logits"], LazyLogits)
        torch.testing.assert_close(out["loss"], expected["loss"])
        torch.testing.assert_close(out["logits"].detach() + 0, expected["logits"].detach())


def test_cuda_graphs_are_declined():
    """Their next run overwrites what this one returned."""
    options = {**LAZY, "triton.cudagraphs": True}
    (site,) = explain_call(Model(), (ids(),), options=options).losses
    assert "can't be lazy: a CUDA graph uses the memory of what it returned anew" in site.reason


def test_inside_a_checkpoint():
    """Logits of a graph inside another one are returned to that."""
    model = Model()

    def step(ids):
        out = torch.utils.checkpoint.checkpoint(model, ids, use_reentrant=False)
        return {"loss": out["loss"] * 2, "logits": out["logits"]}

    compiled = torch.compile(
        step, backend="compile_losses", options={**LAZY, "inner_backend": "aot_eager"}
    )
    found, expected = trained(compiled, model), trained(step, model)
    torch.testing.assert_close(found[1].detach() + 0, expected[1].detach())
    torch.testing.assert_close((found[0], found[2]), (expected[0], expected[2]))


def test_optimizer_step_before_reading():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(
        model, backend="compile_losses", options={**LAZY, "inner_backend": "aot_eager"}
    )
    out = compiled(ids())
    out["loss"].backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="the head's weight was changed in place"):
        out["logits"].sum()
    assert torch.isfinite(compiled(ids())["logits"].sum())


def test_memory():
    """No tensor of the logits' size is alive in a step, and reading them makes one."""
    torch.manual_seed(0)
    model = Model()
    tokens = torch.randint(CLASSES, (8, 129))
    size = tokens.numel() * CLASSES * 4
    compiled = torch.compile(model, backend="compile_losses", options=LAZY)
    compiled(tokens)["loss"].backward()

    def step():
        out = compiled(tokens)
        out["loss"].backward()
        return out

    assert largest_allocation(step) < size / 3
    assert largest_allocation(lambda: step()["logits"].sum()) >= size


# enable()


def test_enable():
    torch.manual_seed(0)
    model = Model()
    expected = trained(model, model)
    with compile_losses.enable(lazy_logits=True):
        compiled = torch.compile(model)
        compile_losses.counters().clear()
        found = trained(compiled, model)
        assert compile_losses.counters()["rewritten"] == {"linear_cross_entropy": 1}
    assert isinstance(found[1], LazyLogits)
    torch.testing.assert_close(found[1].detach() + 0, expected[1].detach())
    torch.testing.assert_close((found[0], found[2]), (expected[0], expected[2]))
    torch._dynamo.reset()
    assert type(torch.compile(model)(ids())["logits"]) is torch.Tensor


def test_backend_while_enabled():
    """The backend's options count for what it compiles, and enable()'s for the rest."""
    with compile_losses.enable(lazy_logits=True):
        kept = torch.compile(Model(), backend="compile_losses", options={"lazy_logits": False})
        assert type(kept(ids())["logits"]) is torch.Tensor
        torch._dynamo.reset()
        lazy = torch.compile(Model(), backend="compile_losses", options=LAZY)
        assert isinstance(lazy(ids())["logits"], LazyLogits)


@pytest.mark.slow
@pytest.mark.kernels
def test_warm_caches(tmp_path):
    """A second process takes the compiled graph from a cache, and returns lazy logits as well."""
    script = """
import pytest
import torch
from compile_losses.lazy import LazyLogits
from tests.constants import set_constants
from tests.corpus.returned import Model, ids
from tests.test_returned_logits import LAZY, trained
set_constants(pytest.MonkeyPatch(), least_rows=8, logits_bytes=1)
torch.manual_seed(0)
model = Model()
compiled = torch.compile(model, backend="compile_losses", options=LAZY)
found, expected = trained(compiled, model), trained(model, model)
assert isinstance(found[1], LazyLogits)
torch.testing.assert_close(found[1].detach() + 0, expected[1].detach())
torch.testing.assert_close((found[0], found[2]), (expected[0], expected[2]))
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""
    environment = {**os.environ, **WITHOUT_VECTORS, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    hits = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()[-1]
        for _ in range(2)
    ]
    assert hits == ["0", "1"]


def test_enable_without():
    with compile_losses.enable(lazy_logits=False):
        assert type(torch.compile(Model())(ids())["logits"]) is torch.Tensor


def test_thread_without_enable():
    """Inductor's configuration is a thread's since torch 2.13, and so is what is enabled."""
    kinds = []

    def run():
        torch._dynamo.reset()
        kinds.append(type(torch.compile(Model())(ids())["logits"]))

    with compile_losses.enable(lazy_logits=True):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        run()
    assert kinds[1] is LazyLogits
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        assert kinds[0] is torch.Tensor


# Across graph breaks


def broken(model, after=lambda logits: logits):
    def step(ids):
        logits = after(model.head(model.embedding(ids).tanh()))
        torch._dynamo.graph_break()
        return {"loss": shifted(logits, ids), "logits": logits}

    return step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("between", BETWEEN)
def test_graph_break(between):
    torch.manual_seed(0)
    model = Model()
    step = broken(model, BETWEEN[between] or (lambda logits: logits))
    compiled = torch.compile(
        step, backend="compile_losses", options={**LAZY, "inner_backend": "aot_eager"}
    )
    for read in (None, lambda logits: logits.square().mean()):
        compile_losses.counters().clear()
        found, expected = trained(compiled, model, read), trained(step, model, read)
        assert isinstance(found[1], LazyLogits)
        torch.testing.assert_close(found[1].detach() + 0, expected[1].detach())
        torch.testing.assert_close((found[0], found[2]), (expected[0], expected[2]))
        if read is None:
            assert compile_losses.counters()["rewritten"] == {"linear_cross_entropy": 1}


@pytest.mark.parametrize("dynamic", [False, None, True])
def test_graph_break_again(dynamic):
    """Other batches are no reason to compile anew, and other sizes once."""
    torch.manual_seed(0)
    model = Model()
    step = broken(model)
    options = {**LAZY, "inner_backend": "aot_eager"}
    compiled = torch.compile(step, backend="compile_losses", options=options, dynamic=dynamic)
    graphs = torch._dynamo.utils.counters["stats"]
    compile_losses.counters().clear()
    for rows in (4, 4, 6, 7, 9):
        before = graphs["unique_graphs"]
        tokens = torch.randint(CLASSES, (rows, 33))
        found, expected = compiled(tokens), step(tokens)
        torch.testing.assert_close(found["loss"], expected["loss"])
        found["loss"].backward()
        assert found["logits"]._memory.is_unread()
        made = graphs["unique_graphs"] - before
        assert made == 2 or (made == 0 and rows != 6) or dynamic, (rows, made)
    # With all sizes dynamic those of the head are not known in the next graph.
    op = "cross_entropy" if dynamic else "linear_cross_entropy"
    assert set(compile_losses.counters()["rewritten"]) == {op}


def test_graph_break_memory():
    torch.manual_seed(0)
    model = Model()
    tokens = torch.randint(CLASSES, (8, 129))
    step = broken(model)
    compiled = torch.compile(lambda ids: step(ids)["loss"], backend="compile_losses", options=LAZY)
    compiled(tokens).backward()
    size = tokens.numel() * CLASSES * 4
    assert largest_allocation(lambda: compiled(tokens).backward()) < size / 3


def test_graph_break_is_reported():
    model = Model()
    (site,) = compile_losses.explain(broken(model), ids()).losses
    assert "its logits are an input of this graph" in site.reason
    assert "options={'lazy_logits': True}" in site.reason
    report: Report = explain_call(broken(model), (ids(),), options=LAZY)
    assert [site.op for site in report.losses] == ["linear_cross_entropy"]


#: What the next graph does with logits, besides or instead of a loss that is recognised.
NEXT = {
    "no loss": lambda logits, ids: logits.square().mean(),
    "accuracy": lambda logits, ids: (
        shifted(logits, ids) + 0 * (logits.argmax(-1) == ids).double().mean()
    ),
    "in place": lambda logits, ids: shifted(logits.mul_(2), ids),
    "a view in place": lambda logits, ids: (logits[:, 0].zero_(), shifted(logits, ids))[1],
    "detached": lambda logits, ids: logits.detach().square().mean() + shifted(logits, ids),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NEXT)
def test_next_graph(name):
    torch.manual_seed(0)
    model = Model()

    def step(tokens):
        logits = model.head(model.embedding(tokens).tanh())
        torch._dynamo.graph_break()
        loss = NEXT[name](logits, tokens)
        torch._dynamo.graph_break()
        return {"loss": loss + logits.mean(), "logits": logits}

    compiled = torch.compile(
        step, backend="compile_losses", options={**LAZY, "inner_backend": "aot_eager"}
    )
    found, expected = trained(compiled, model), trained(step, model)
    torch.testing.assert_close(found[1].detach() + 0, expected[1].detach())
    torch.testing.assert_close((found[0], found[2]), (expected[0], expected[2]))


@pytest.mark.parametrize("change", ["read", "hook", "detach", "slice", "optimizer"])
def test_between_graphs(change):
    """What eager code does to lazy logits before another compiled function gets them."""
    torch.manual_seed(0)
    model = Model()
    options = {**LAZY, "inner_backend": "aot_eager"}

    def first(ids):
        return model.head(model.embedding(ids).tanh())

    second = shifted
    seen = []

    def step(ids, first, second):
        logits = first(ids)
        if change == "read":
            logits.sum()
        elif change == "hook":
            logits.register_hook(seen.append)
        elif change == "detach":
            logits = logits.detach().requires_grad_()
        elif change == "slice":
            logits, ids = logits[1:].float(), ids[1:]
        return second(logits, ids), logits

    compiled = [
        torch.compile(f, backend="compile_losses", options=options) for f in (first, second)
    ]
    found = []
    for functions in ((first, second), compiled, compiled):
        model.zero_grad()
        if change == "optimizer" and functions is compiled:
            logits = compiled[0](ids())
            with torch.no_grad():
                model.head.weight.add_(0)
            with pytest.raises(RuntimeError, match="was changed in place"):
                compiled[1](logits, ids())
            return
        loss, logits = step(ids(), *functions)
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        if change == "detach":
            grads = [logits.grad]
        found.append((loss.detach(), grads))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
    assert len(seen) == (3 if change == "hook" else 0)


def test_other_backend_gets_lazy_logits():
    """Another compiler traces the logits' computation into its graph."""
    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(
        model, backend="compile_losses", options={**LAZY, "inner_backend": "aot_eager"}
    )
    for reads in (False, True):
        out = compiled(ids())
        if reads:
            out["logits"].sum()
        other = torch.compile(lambda x: x.square().mean(), backend="aot_eager")
        expected = trained(model, model, lambda x: x.square().mean())
        model.zero_grad()
        (out["loss"] + other(out["logits"])).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], expected[2])


def test_saved_outputs():
    """An evaluation that gathers outputs in host memory."""
    model = Model()
    out = torch.compile(
        model, backend="compile_losses", options={**LAZY, "inner_backend": "aot_eager"}
    )(ids())
    logits = pickle.loads(pickle.dumps(out["logits"].detach()))
    torch.testing.assert_close(logits, model(ids())["logits"].detach())
    assert type(logits) is torch.Tensor
