"""The scripts in examples/: they learn, and their losses are rewritten."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys

import pytest
from torch._inductor.utils import fresh_cache

import compile_losses
from compile_losses import options, recognize
from tests import ROOT
from tests.constants import set_constants

EXAMPLES = ROOT / "examples"


@pytest.fixture
def reports(monkeypatch):
    """What was rewritten while the example ran."""
    found = []

    def spy(graph, **given):
        found.append(rewrite_graph(graph, **given))
        return found[-1]

    rewrite_graph = recognize.rewrite_graph
    monkeypatch.setattr(recognize, "rewrite_graph", spy)
    monkeypatch.setattr(options, "rewrite_graph", spy)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield found
    compile_losses.disable()
    for name in [path.stem for path in EXAMPLES.glob("*.py")]:
        sys.modules.pop(name, None)


def run(name, reports, learned=lambda losses: losses[-1] < losses[0] - 1, steps=20):
    """The ops that an example's losses became; it has learned something."""
    with fresh_cache():  # on a warm one the passes are not run, and there is nothing to see
        figures = importlib.import_module(name).main(steps=steps)
    assert learned(figures), figures
    sites = [site for report in reports for site in report.sites]
    assert sites
    assert all(site.status == "rewritten" for site in sites), sites
    return {site.op for site in sites}


def test_each_adds_one_line():
    scripts = {path for path in EXAMPLES.glob("*.py") if path.stem != "text"}
    assert {path.stem for path in scripts} == {
        "bf16_checkpointing",
        "diffusers_unet",
        "hugging_face_trainer",
        "lightning_module",
        "plain_loop",
        "tensor_parallel",
        "trl_grpo",
        "trl_sft",
    }
    for path in scripts:
        assert path.read_text().count("# the added line\n") == 1, path
        assert path.name in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize(
    "code", [pytest.param(True, marks=pytest.mark.slow), False], ids=["code", "graphs"]
)
def test_plain_loop(code, reports, request):
    """Also without Inductor's code, which is compiled for two other examples: see the tests of
    diffusers_unet and trl_sft."""
    if not code:
        request.getfixturevalue("no_code")
    assert run("plain_loop", reports) == {"cross_entropy"}


def test_diffusers_unet(reports):
    pytest.importorskip("diffusers", reason="pip install .[models]")
    found = run("diffusers_unet", reports, lambda losses: losses[-1] < losses[0] / 2)
    assert found == {"mse_loss"}


def tensor_parallel(ranks, tensor, steps):
    """The losses that it prints: of the first step, and of each twentieth after it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(EXAMPLES / "tensor_parallel.py"), f"--steps={steps}", f"--tensor={tensor}"]
    result = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", *script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    return [float(line.split()[-1]) for line in result.stdout.splitlines() if "loss" in line]


@pytest.mark.slow
def test_tensor_parallel():
    """Two ranks that share the model train as one rank alone, and as two with half a batch each."""
    alone = tensor_parallel(1, 1, 21)
    assert len(alone) == 2
    assert alone[1] < alone[0] - 1
    for tensor in (1, 2):
        together = tensor_parallel(2, tensor, 21)
        assert together == pytest.approx(alone, abs=2e-3)


@pytest.mark.slow
def test_first_steps_of_tensor_parallel():
    """The untrained model's loss, of two ranks that share it."""
    (loss,) = tensor_parallel(2, 2, 2)
    assert 4 < loss < 8  # of 256 bytes that are equally likely: 5.5


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "library", "op"),
    [
        ("bf16_checkpointing", "torch", "cross_entropy"),
        ("hugging_face_trainer", "transformers", "cross_entropy"),
        ("lightning_module", "lightning", "cross_entropy"),
        ("trl_grpo", "trl", "linear_row_statistics"),
    ],
)
def test_first_steps(name, library, op, reports, monkeypatch, no_code):
    """Those that take long to learn something. The slow tests run them with Inductor's code."""
    pytest.importorskip(library, reason="pip install .[models]")
    if op.startswith("linear"):  # with the head, as at the size of a real one
        set_constants(monkeypatch, least_rows=8, logits_bytes=1)
    found = run(name, reports, lambda figures: all(map(math.isfinite, figures)), steps=5)
    assert found == {op}


@pytest.mark.slow
def test_bf16_checkpointing(reports):
    assert run("bf16_checkpointing", reports) == {"cross_entropy"}


@pytest.mark.slow
def test_hugging_face_trainer(reports):
    pytest.importorskip("transformers", reason="pip install .[models]")
    assert run("hugging_face_trainer", reports) == {"cross_entropy"}


@pytest.mark.slow
def test_lightning_module(reports):
    pytest.importorskip("lightning", reason="pip install .[models]")
    assert run("lightning_module", reports) == {"cross_entropy"}


@pytest.mark.slow
def test_trl_sft(reports):
    pytest.importorskip("trl", reason="pip install .[models]")
    assert run("trl_sft", reports) == {"cross_entropy"}


@pytest.mark.slow
def test_trl_grpo(reports, monkeypatch):
    """With the head, as at the size of a real one."""
    pytest.importorskip("trl", reason="pip install .[models]")
    set_constants(monkeypatch, least_rows=8, logits_bytes=1)
    found = run("trl_grpo", reports, lambda rewards: rewards[-1] > 2 * rewards[0], steps=12)
    assert found == {"linear_row_statistics"}
