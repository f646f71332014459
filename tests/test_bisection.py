"""``python -m compile_losses bisect``: faults that are planted, and found."""

from __future__ import annotations

import itertools
import json
import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_losses import guard, inductor_passes, passes
from compile_losses.__main__ import main
from compile_losses.programs import bisection
from compile_losses.programs.bisection import Bisection, RefusedError, fewest
from compile_losses.programs.trial import attempted
from compile_losses.programs.trial_processes import Processes, Switches
from compile_losses.recognize.match import Match
from compile_losses.sites import shorten
from tests import ROOT
from tests.faults import PlantedError


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_the_fewest(size, most):
    """Whichever have to be left out: all of them are found, and nothing else."""
    for culprits in itertools.combinations(range(size), min(most, size)):
        tried = []

        def shows(left_out, culprits=culprits, tried=tried):
            tried.append(left_out)
            return not set(culprits) <= set(left_out)

        assert fewest(tuple(range(size)), shows) == culprits
        if len(culprits) == 1:
            assert len(tried) <= 2 * math.ceil(math.log2(size))


# In this process, where the graphs run without Inductor's code


def make_step():
    torch.manual_seed(0)
    model = nn.Linear(8, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, t, y = torch.randn(64, 8), torch.randint(12, (64,)), torch.randn(64, 12)

    def step():
        first = F.cross_entropy(model(x), t)
        second = F.mse_loss(model(x + 1), y)
        loss = first + second
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def place(line):
    """A line of the step."""
    return f"{shorten(__file__)}:{make_step.__code__.co_firstlineno + line}"


CROSS_ENTROPY, MSE = place(7), place(8)


class Here:
    """Runs trials in this process."""

    def __init__(self, monkeypatch, make=make_step, options=None):
        self.monkeypatch = monkeypatch
        self.make = make
        self.options = options or {}
        self.kinds = []

    def __call__(self, what, given: Switches):
        self.kinds.append(what)
        torch._dynamo.reset()
        with (
            self.monkeypatch.context() as patch,
            torch._inductor.config.patch(force_disable_caches=True),
        ):
            for name, value in given.variables().items():
                patch.setenv(name, value)
            return attempted(self.make(), what, None, given.options(self.options), 2)


@pytest.fixture
def plain(monkeypatch, no_code, kernels_for_small_losses):
    monkeypatch.setenv("COMPILE_LOSSES_STRICT", "0")


def found_by(check, run, **options):
    return Bisection(check, run, run.options, **options).find()


@pytest.fixture
def wrong_rewrite(monkeypatch):
    """A mean squared error that is rewritten as an L1 loss."""

    def wrong(match):
        replaced = replace(match)
        for node in match.root.graph.nodes if match.op == "mse_loss" else ():
            if node.target is torch.ops.fused.mse_loss.default:
                node.target = torch.ops.fused.l1_loss.default
        return replaced

    replace = Match.replace
    monkeypatch.setattr(Match, "replace", wrong)


def test_a_wrong_rewrite(plain, wrong_rewrite, monkeypatch):
    found = found_by("loss", Here(monkeypatch))
    assert found.ours
    assert found.sites == {MSE: "mse_loss"}
    assert found.in_pass == passes.REWRITE
    names = json.dumps([MSE])
    assert found.switch == f'options={{"except": {names}}}, or COMPILE_LOSSES_EXCEPT={MSE}'
    assert found.others == ["COMPILE_LOSSES=0"]
    text = str(found)
    for part in ("torch  ", "kernels", "rewritten", MSE, "COMPILE_LOSSES_PASSES=rewrite: loss"):
        assert part in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lowering", [passes.PLAN, passes.IN_PLACE])
def test_a_wrong_kernel_in_a_lower_graph(lowering, plain, monkeypatch):
    """What a pass puts in the place of a cross entropy smooths its labels."""
    ops = torch.ops.fused
    made = {
        passes.PLAN: ops.cross_entropy_with_grad.default,
        passes.IN_PLACE: ops.cross_entropy_with_grad_.default,
    }

    def wrong(graph, *given, **options):
        decisions = lower(graph, *given, **options)
        for node in graph.find_nodes(op="call_function", target=made[lowering]):
            node.update_arg(5, 0.5)
        return decisions

    lower = getattr(inductor_passes, lowering)
    monkeypatch.setattr(inductor_passes, lowering, wrong)
    found = found_by("loss", Here(monkeypatch))
    assert found.ours
    assert found.in_pass == lowering
    assert found.sites == {CROSS_ENTROPY: "cross_entropy"}


@pytest.mark.sampled(2)
@pytest.mark.planted
@pytest.mark.parametrize("lowering", [passes.PLAN, passes.IN_PLACE])
def test_a_pass_that_raises(lowering, plain, monkeypatch):
    """Users are not told of it but by a warning; the bisection wants to see it."""

    def raising(graph, *given, **options):
        if any("mse_loss" in str(node.target) for node in graph.nodes):
            raise PlantedError("planted")
        return lower(graph, *given, **options)

    lower = getattr(inductor_passes, lowering)
    monkeypatch.setattr(inductor_passes, lowering, raising)
    guard._warned.clear()
    with pytest.warns(RuntimeWarning, match="planted"):
        found = found_by("crash", Here(monkeypatch))
    assert found.problem == "PlantedError: planted"
    assert found.in_pass == lowering
    assert found.sites == {MSE: "mse_loss"}
    others = ["COMPILE_LOSSES_PASSES=" + ",".join(passes.STAGES[: passes.STAGES.index(lowering)])]
    assert found.others == [*others, "COMPILE_LOSSES=0"]


def test_an_error_that_is_not_ours(plain, monkeypatch):
    def make():
        def step():
            raise ValueError("no batch")

        return step

    found = found_by("crash", Here(monkeypatch, make))
    assert not found.ours
    assert found.outcome == ["Not ours: ValueError: no batch, also with COMPILE_LOSSES=0"]
    with pytest.raises(RefusedError, match="with COMPILE_LOSSES=0 as well: ValueError: no batch"):
        found_by("loss", Here(monkeypatch, make))


def test_losses_that_differ_without_us(plain, monkeypatch):
    """A step that draws other numbers in each run can't be compared."""
    numbers = itertools.count(1)

    def make():
        x = torch.full((4, 4), float(next(numbers)), requires_grad=True)
        return lambda: F.mse_loss(x, torch.zeros(4, 4))

    found = found_by("loss", Here(monkeypatch, make))
    assert not found.ours
    assert "loss" in found.problem


def test_nothing_to_find(plain, monkeypatch):
    for check in ("loss", "crash"):
        found = found_by(check, Here(monkeypatch))
        assert not found.problem
        assert "does not show" in str(found)
    with pytest.raises(RefusedError, match="no loss to compare"):
        found_by("loss", Here(monkeypatch, lambda: lambda: torch.ones(3)))


def test_a_slow_loss():
    """Of two losses one is slow; times are given, since none are measured in tests."""
    places = {"train.py:1": "cross_entropy", "train.py:2": "mse_loss"}

    def run(what, given):
        if what == "sites":
            return {"places": places, "eps": 1e-7}
        is_slow = not given.off and "train.py:1" not in given.left_out
        noise = 0.2 if "train.py:2" in given.left_out else 0.02
        return {"ratio": (1.5 if is_slow else 1.0) + noise, "report": "of explain"}

    found = Bisection("time", run).find()
    assert found.problem == "1.52 times as long as stock"
    assert found.sites == {"train.py:1": "cross_entropy"}
    assert found.in_pass == passes.REWRITE
    assert Bisection("time", run, tolerance=1.0).find().problem == ""


def test_an_option_that_is_on():
    """It is switched off before a loss is left out."""

    def run(what, given):
        if what == "sites":
            return {"places": {"train.py:1": "cross_entropy"}}
        is_lazy = given.options({"lazy_logits": True})["lazy_logits"]
        return {"error": "Error: lazy"} if is_lazy and not given.off else {"report": ""}

    found = Bisection("crash", run, {"lazy_logits": True}).find()
    assert found.switch == 'options={"lazy_logits": False}, or COMPILE_LOSSES_LAZY_LOGITS=0'
    assert found.sites == {}


def test_the_users_own_switches(monkeypatch):
    given = Switches(passes=("rewrite",), left_out=("train.py:1",))
    assert given.options({"except": ["mse_loss"]}) == {"except": ["mse_loss", "train.py:1"]}
    monkeypatch.setenv("COMPILE_LOSSES_EXCEPT", "huber_loss")
    assert given.options({"verify": True}) == {
        "verify": True,
        "except": ["huber_loss", "train.py:1"],
    }


# The command, and trials in processes of their own

SCRIPT = """
import os, sys
import torch
import torch.nn.functional as F
from compile_losses.recognize.match import Match

replace = Match.replace

def crashing(match):
    if '"sites"' not in sys.argv[1]:
        os.abort()
    return replace(match)

Match.replace = crashing
x = torch.ones(8, 4, requires_grad=True)

def step():
    return F.mse_loss(x, torch.zeros(8, 4))
"""
EAGER = {"inner_backend": "eager"}


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


@pytest.mark.slow
@pytest.mark.kernels
def test_a_process_that_ends_without_an_exception(script, tmp_path):
    run = Processes("train.py:step", tmp_path, None, EAGER, 1)
    assert run("step", Switches())["error"].startswith("ended by SIGABRT")
    assert list(run("sites", Switches())["places"]) == ["train.py:18"]


def test_the_command(script, monkeypatch, capsys):
    """What it prints, with trials that are made up; and a step that can't be tried."""

    def processes(target, folder, mode, options, steps):
        assert (target, mode, options, steps) == ("train.py:step", None, EAGER, 2)

        def run(what, given):
            if what == "sites":
                return {"places": {"train.py:18": "mse_loss"}}
            is_well = given.off or "train.py:18" in given.left_out
            return {"report": "of explain"} if is_well or what == "report" else {"error": "Error"}

        return run

    command = ["bisect", "train.py:step", "--check", "crash", "--options", json.dumps(EAGER)]
    monkeypatch.setattr(bisection, "Processes", processes)
    assert main(command) == 0
    assert "site     mse_loss (train.py:18)" in capsys.readouterr().out.splitlines()
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sites"] == {"train.py:18": "mse_loss"}
    monkeypatch.setattr(
        bisection, "Processes", lambda *_: lambda *_: {"refused": "there is no file train.py"}
    )
    with pytest.raises(SystemExit, match="bisect: there is no file train"):
        main(command)
    with pytest.raises(SystemExit, match="bisect: steps: expected at least 1, got 0"):
        main([*command, "--steps", "0"])


@pytest.mark.slow
def test_the_command_with_processes(script, capsys):
    """All of it, as users call it."""
    options = ["--options", json.dumps(EAGER)]
    assert main(["bisect", "train.py:step", "--check", "crash", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "SIGABRT" in found["problem"]
    assert found["ours"]
    assert found["sites"] == {"train.py:18": "mse_loss"}
    assert found["in_pass"] == passes.REWRITE
