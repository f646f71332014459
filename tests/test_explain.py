"""explain() and the command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compile_losses
from compile_losses import library
from compile_losses.__main__ import main
from compile_losses.comparison import compare_call
from compile_losses.programs.trial import REPORT, attempted
from compile_losses.report.explanation import explain_call
from compile_losses.sites import shorten
from tests.calls import COMPOSED
from tests.specs import SPECS


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.criterion = nn.MSELoss()

    def forward(self, x, y):
        prediction = self.linear(x)
        regulariser = F.binary_cross_entropy(prediction.sigmoid(), y)
        return self.criterion(prediction, y) + regulariser


def line_of(fragment):
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if fragment in line)


def test_report():
    model = Model()
    report = compile_losses.explain(model, torch.rand(3, 4), torch.rand(3, 4))
    declined, rewritten = report.sites
    assert (declined.op, declined.status) == ("binary_cross_entropy", "declined")
    instead = "F.binary_cross_entropy_with_logits of what the sigmoid is given has an op"
    assert instead in declined.reason
    assert (rewritten.op, rewritten.status) == ("mse_loss", "rewritten")
    assert {site.file for site in report.sites} == {__file__}
    assert declined.line == line_of("regulariser = F.binary_cross_entropy")
    # nn.MSELoss calls F.mse_loss inside torch: the user's line is what counts.
    assert rewritten.line == line_of("return self.criterion(prediction, y) + regulariser")
    assert report.graphs == 1
    assert report.to_dict()["sites"][1] == {
        "op": "mse_loss",
        "status": "rewritten",
        "reason": "",
        "file": __file__,
        "line": rewritten.line,
        "graph": 0,
        "plan": list(rewritten.plan),
        "details": list(rewritten.details),
        "bytes_moved": rewritten.bytes_moved,
        "bytes_held": rewritten.bytes_held,
        "stock_bytes_moved": rewritten.stock_bytes_moved,
        "stock_bytes_held": rewritten.stock_bytes_held,
        "gain": "as stock",
    }
    text = str(report)
    assert "1 graph, 2 losses, 1 rewritten" in text
    assert "torch bounds" in text


def test_whatever_is_cached_or_compiled():
    model = Model()
    inputs = (torch.rand(3, 4), torch.rand(3, 4))
    compiled = torch.compile(model, backend="compile_losses", options={"inner_backend": "eager"})
    compiled(*inputs)
    frames = torch._dynamo.utils.counters["frames"]["ok"]
    reports = [compile_losses.explain(m, *inputs) for m in (model, compiled, compiled, model)]
    assert all(report.sites == reports[0].sites for report in reports)
    assert len(reports[0].sites) == 2
    # What was compiled before is still there.
    before = torch._dynamo.utils.counters["frames"]["ok"]
    compiled(*inputs)
    assert torch._dynamo.utils.counters["frames"]["ok"] == before > frames
    in_place = Model()
    in_place.compile(backend="eager")
    in_place(*inputs)
    assert len(compile_losses.explain(in_place, *inputs).sites) == 2
    function = torch.compile(lambda a, b: F.mse_loss(a, b), backend="eager")
    function(*inputs)
    assert len(compile_losses.explain(function, *inputs).sites) == 1


def test_more_often_than_the_recompile_limit():
    inputs = (torch.rand(3, 4), torch.rand(3, 4))
    for _ in range(torch._dynamo.config.recompile_limit + 3):
        assert len(compile_losses.explain(F.mse_loss, *inputs).sites) == 1


def _left_alone(x, y):
    return F.mse_loss(x, y)


def _module():
    found = torch.nn.Identity()
    found.forward = _left_alone
    return found


@pytest.mark.parametrize("way", ["function", "module", "in place", "twice"])
def test_options_of_a_compiled_function(way):
    """What was compiled with options is explained with these, and not with those of enable."""
    given = {"backend": "compile_losses", "options": {"except": ["mse_loss"]}}
    made = {
        "function": lambda: torch.compile(_left_alone, **given),
        "module": lambda: torch.compile(_module(), **given),
        "in place": _module,
        "twice": lambda: torch.compile(torch.compile(_left_alone), **given),
    }
    step = made[way]()
    if way == "in place":
        step.compile(**given)
    inputs = torch.rand(3, requires_grad=True), torch.rand(3)
    (site,) = compile_losses.explain(step, *inputs).sites
    assert site.status == "declined"
    with compile_losses.enable():
        (site,) = compile_losses.explain(step, *inputs).sites
        assert site.status == "declined"
    # Options that are given to explain itself, and functions of other backends.
    assert explain_call(step, inputs, options={}).sites[0].status == "rewritten"
    for other in (
        _left_alone,
        torch.compile(_left_alone),
        torch.compile(_left_alone, backend="eager"),
    ):
        assert compile_losses.explain(other, *inputs).sites[0].status == "rewritten"
    assert compare_call(step, inputs, steps=1).report.sites[0].status == "declined"


def test_options_of_a_compiled_function_in_a_trial():
    inputs = torch.rand(3, requires_grad=True), torch.rand(3)
    given = {"backend": "compile_losses", "options": {"except": ["mse_loss"]}}
    step = torch.compile(lambda: F.mse_loss(*inputs), **given)
    assert "declined" in attempted(step, REPORT, None, {}, 1)["report"]
    assert "rewritten" in attempted(step, REPORT, None, {"except": []}, 1)["report"]


def test_graph_breaks():
    def step(a, b):
        first = F.mse_loss(a, b)
        torch._dynamo.graph_break()
        return first + F.smooth_l1_loss(a, b)

    report = compile_losses.explain(step, torch.rand(3), torch.rand(3))
    assert [site.graph for site in report.sites] == [0, 1]
    assert report.graphs == 2
    assert len(report.graph_breaks) == 1
    assert "graph break:" in str(report)


def test_head_before_a_graph_break():
    """The reason why a head is left out says which graph break stands between."""
    head = torch.nn.Linear(8, 50)

    def step(h, t):
        logits = head(h)
        torch._dynamo.graph_break()
        return F.cross_entropy(logits, t)

    line = step.__code__.co_firstlineno + 2
    (site,) = compile_losses.explain(step, torch.randn(6, 8), torch.arange(6)).losses
    assert (site.op, site.status, site.graph) == ("cross_entropy", "rewritten", 1)
    assert site.reason == (
        "without its linear layer: its logits are an input of this graph, after the graph break in "
        f"{shorten(__file__)}:{line}: options={{'lazy_logits': True}} takes them along, if a "
        "compiled layer made them"
    )
    report = explain_call(step, (torch.randn(6, 8), torch.arange(6)), options={"lazy_logits": True})
    assert "lazy_logits" not in str(report)


def test_logits_that_no_layer_made():
    """Nothing is said of a head where there is none."""
    scores = torch.randn(6, 8, requires_grad=True).exp()
    (site,) = compile_losses.explain(F.cross_entropy, scores, torch.arange(6)).losses
    assert site.reason == ""


def test_accumulation_in_one_step():
    """Dynamo compiles nothing of a loop with a graph break: the report says what broke it."""
    head = torch.nn.Linear(8, 50)

    def step(h, t):
        for rows, classes in zip(h.split(3), t.split(3), strict=True):
            (F.cross_entropy(head(rows), classes) / 2).backward()

    def broken(h, t):
        F.cross_entropy(head(h), t).backward()
        return h + 1

    inputs = torch.randn(6, 8), torch.arange(6)
    compile_losses.explain(broken, *inputs)  # whose reason is the same
    report = compile_losses.explain(step, *inputs)
    assert report.graphs == 0
    assert "breaks inside a loop" in str(report)
    assert str(report).count("graph break: Unsupported Tensor.backward() call") == 1


def test_answers_do_not_depend_on_earlier_ones():
    """Another length makes sizes symbols of what torch.compile compiles next, but not here."""
    head = torch.nn.Linear(8, 50)

    def step(h, t):
        return F.cross_entropy(head(h[:4]), t[:4]) + h.square().mean()

    def told(rows):
        report = compile_losses.explain(step, torch.randn(rows, 8), torch.arange(rows))
        return str(report)

    first = told(6)
    told(9)
    assert told(6) == first


def test_restarted_analysis():
    """Dynamo traces a step with a float of the user's anew, which is no reason to know no plan."""

    class ArcFace(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(50, 8))
            self.margin = 0.5

        def forward(self, h, t, scale):
            cosine = F.linear(F.normalize(h), F.normalize(self.weight))
            angle = torch.acos(cosine.clamp(-1 + 1e-7, 1 - 1e-7))
            picked = F.one_hot(t, 50).bool()
            logits = torch.where(picked, torch.cos(angle + self.margin * scale), cosine)
            return F.cross_entropy(logits * scale, t)

    step = torch.compile(ArcFace(), dynamic=True)
    h, t = torch.randn(6, 8), torch.arange(6)
    with torch._dynamo.config.patch(specialize_float=False):
        for scale in (2.5, 3.5):
            report = compile_losses.explain(step, h, t, scale)
            assert report.errors == []
            (site,) = report.losses
            assert site.status == "rewritten"
            assert site.plan


def test_failed_plan(monkeypatch):
    """A loss whose plan is not known says so itself."""

    def fails(*_):
        raise NotImplementedError("no such lowering")

    monkeypatch.setattr("compile_losses.report.dry_run.decide", fails)
    report = compile_losses.explain(F.mse_loss, torch.rand(3), torch.rand(3))
    (site,) = report.losses
    assert site.details == ("no plan: NotImplementedError: no such lowering",)
    assert report.remarks == ["no plan: NotImplementedError: no such lowering"]


def test_region_called_twice():
    """The graphs of higher-order ops run as AOTAutograd traces them."""

    @torch.compiler.nested_compile_region
    def region(x, t):
        return F.cross_entropy(x, t)

    x, t = torch.randn(6, 8), torch.arange(6)
    report = compile_losses.explain(lambda x, t: region(x, t) + region(x * 2, t), x, t)
    assert [site.status for site in report.sites] == ["declined"]


def test_part_of_a_larger_form():
    """A declined form does not take the loss inside it along."""

    def step(x, t):
        losses = F.cross_entropy(x, t, reduction="none")
        losses.mul_(2)
        return losses.mean()

    (site,) = compile_losses.explain(step, torch.randn(6, 8), torch.arange(6)).losses
    assert (site.op, site.status) == ("cross_entropy", "rewritten")
    assert "part of a larger form that stays torch's: " in site.reason
    assert "changed in place" in site.reason


def test_nothing_compiled():
    report = compile_losses.explain(lambda a: 3, torch.rand(3))
    assert "no graph was compiled" in str(report)


def test_result_is_executed_once():
    calls = []

    def step(a):
        torch._dynamo.graph_break()
        calls.append(1)
        return F.mse_loss(a, a)

    compile_losses.explain(step, torch.rand(3))
    assert len(calls) == 1


@pytest.mark.kernels
def test_cli_info(capsys):
    assert main(["info"]) == 0
    output = capsys.readouterr().out
    assert torch.__version__ in output
    assert "cpu kernels    loaded from _cpu_" in output
    assert "cuda kernels" in output
    public = {spec.public or spec.name for spec in SPECS.values()}
    assert ", ".join(sorted(public | COMPOSED)) in output


@pytest.fixture
def folder_of_a_step(tmp_path):
    (tmp_path / "training.py").write_text(
        "import torch\nimport torch.nn.functional as F\n\n"
        "def step():\n    a = torch.rand(3, requires_grad=True)\n"
        "    return F.huber_loss(a, torch.ones(3))\n"
    )
    return tmp_path


def test_cli_explain_of_a_module(folder_of_a_step):
    result = subprocess.run(
        [sys.executable, "-m", "compile_losses", "explain", "training:step"],
        capture_output=True,
        text=True,
        cwd=folder_of_a_step,
    )
    assert result.returncode == 0, result.stderr
    assert "rewritten" in result.stdout
    assert "training.py:6" in result.stdout


def test_cli_explain_of_a_script(folder_of_a_step, monkeypatch, capsys):
    monkeypatch.chdir(folder_of_a_step)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "training", None)  # which the script's takes the place of
    assert main(["explain", "training.py:step"]) == 0
    output = capsys.readouterr().out
    assert "rewritten" in output
    assert "training.py:6" in output


@pytest.mark.parametrize("target", ["nothing", "missing.py:f", "math:no_such"])
def test_cli_explain_errors(target):
    with pytest.raises(SystemExit, match=r"expected SCRIPT|no file|has no"):
        main(["explain", target])


@pytest.mark.slow
def test_a_copy_without_libraries_says_so(tmp_path):
    """The import goes on, and ``info`` says why there are no kernels."""
    shutil.copytree(
        library.PACKAGE, tmp_path / "compile_losses", ignore=shutil.ignore_patterns("*.so")
    )
    result = subprocess.run(
        [sys.executable, "-m", "compile_losses", "info"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "COMPILE_LOSSES_KERNELS": "1", "PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "on cpu         torch's ops: not built: there are none in" in result.stdout
