"""Graphs of each head before and after each pass, as files in ``tests/snapshots``.

``EXPECTTEST_ACCEPT=1`` writes them anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from benchmarks.heads import HEADS
from benchmarks.matrix import Step
from compile_losses.recognize import rewrite
from compile_losses.report.dry_run import decide
from tests.graphs import listing, recorded

pytestmark = pytest.mark.usefixtures("kernels_for_small_losses")

SNAPSHOTS = Path(__file__).parent / "snapshots"
#: AOTAutograd's and Inductor's names and decompositions differ from version to version.
VERSION = "2.13"


def pictures(loss, head, monkeypatch):
    """What the passes make of a training step, up to where Inductor would generate code."""
    step = Step(loss, head, (8, 32), torch.float32, torch.device("cpu"))
    for leaf in step.differentiated():
        leaf.requires_grad_()
    texts = {}

    def backend(gm, inputs):
        texts["captured"] = listing(gm.graph)
        rewrite(gm)
        texts["recognised"] = listing(gm.graph)
        with recorded(monkeypatch) as found:
            decide(gm, inputs)
        assert len(found["post"]) == 2, found["post"]  # once, in a whole run, it was one
        (texts["joint"],), (texts["planned"],) = found["before"], found["joint"]
        texts["forward"], texts["backward"] = found["post"]
        return gm.forward

    torch.compile(step, backend=backend)(*step.inputs)
    whole = "\n".join(f"== {name}\n{text}" for name, text in texts.items()) + "\n"
    target = r"call_(?:function|method)\[target=(?:torch\.ops\.)?(.*?)\]"
    call = target + r"\(args = \((.*?),?\), kwargs = (.*)\)"
    return re.sub(call, r"\1(\2) \3", whole).replace(" {}\n", "\n")


@pytest.mark.sampled(3)
@pytest.mark.skipif(
    not torch.__version__.startswith(VERSION), reason=f"graphs of torch {VERSION} are on file"
)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_snapshot(loss, head, monkeypatch):
    text = pictures(loss, head, monkeypatch)
    file = SNAPSHOTS / f"{loss}-{head.replace(' ', '-')}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_no_snapshot_is_left_over():
    names = {
        f"{loss}-{head.replace(' ', '-')}.txt"
        for loss in ("mse", "cross_entropy")
        for head in HEADS
    }
    assert {file.name for file in SNAPSHOTS.iterdir()} == names
