"""``python -m compile_losses run --compare``: a program, twice at the same time."""

from __future__ import annotations

import io
import json
import os

import pytest
import torch
import torch.nn.functional as F

from compile_losses.__main__ import main
from compile_losses.programs.program_comparison import ProgramError, compare_program
from compile_losses.programs.watched_program import END, MEMORY, STEP, Watch
from compile_losses.report import log_line
from tests import ROOT

#: A loop that accumulates gradients, with another optimizer beside the first one.
SCRIPT = """
import sys
import torch
import torch.nn.functional as F

if "fail" in sys.argv:
    raise ValueError("no data")
model = torch.nn.Linear(8, 5)
other = torch.nn.Parameter(torch.ones(3))
optimizers = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([other], lr=0.1)

def loss(x, t):
    return F.cross_entropy(model(x), t) / 2

step = torch.compile(loss, backend="compile_losses", options={"inner_backend": "eager"})
for _ in range(int(sys.argv[1])):
    for _ in range(2):
        step(torch.randn(16, 8), torch.randint(5, (16,))).backward()
    other.sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
open("saved", "w").close()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    return tmp_path


@pytest.mark.kernels
def test_the_command(folder, capsys):
    assert main(["run", "--compare", "2", "--json", "train.py", "100"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(found[side]["times"]) for side in ("stock", "ours")] == [2, 2]
    assert min(found[side]["peak_memory"] for side in ("stock", "ours")) > 0
    # Twice half a cross entropy of five classes, and the sum of three ones.
    assert 3 + 1 < found["stock"]["loss"] < 3 + 3
    assert found["loss_difference"] < 1e-6
    assert found["gradient_difference"] < 1e-6
    (site,) = found["report"]["sites"]
    assert (site["op"], site["status"]) == ("cross_entropy", "rewritten")
    assert os.path.basename(site["file"]) == "train.py"
    assert not (folder / "saved").exists()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py", "1"], "stock: the program ended with 0 before it had made enough steps"),
        (["train.py", "fail"], r"stock: the program ended with 1 [\s\S]*ValueError: no data"),
    ],
)
def test_a_program_that_ends(arguments, message, folder):
    with pytest.raises(SystemExit, match=f"run --compare: {message}"):
        main(["run", "--compare", "2", *arguments])


def test_what_can_not_be_compared(monkeypatch):
    with pytest.raises(ProgramError, match="steps: expected at least 1, got 0"):
        compare_program(["train.py"], 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ProgramError, match="several ranks"):
        compare_program(["train.py"], 1)


def test_what_a_step_tells(monkeypatch, tmp_path, no_code):
    """Of the first optimizer alone; with all losses that were differentiated since the last one."""
    words = io.StringIO(f"{STEP}\n{MEMORY}\n{STEP}\n{END}\n")
    watch = Watch(words, io.StringIO(), str(tmp_path / "first"))
    monkeypatch.setattr(log_line, "collectors", [watch.compiled])
    ended = []
    monkeypatch.setattr(watch, "end", lambda: ended.append(True))
    x = torch.ones(4, 4, requires_grad=True)
    optimizer, other = torch.optim.SGD([x]), torch.optim.SGD([torch.ones(2)])
    compiled = torch.compile(lambda x: F.mse_loss(x, torch.zeros(4, 4)), backend="compile_losses")
    for _ in range(4):
        loss = compiled(x)
        watch.losses += [loss.detach(), loss.detach()]
        loss.backward()
        watch.stepped(optimizer, (), {})
        watch.stepped(other, (), {})
    steps = [json.loads(line) for line in watch.told.getvalue().splitlines()]
    assert [step["loss"] for step in steps] == [2.0] * 4
    assert [step.get("memory", 0) > 0 for step in steps] == [False, False, True, False]
    assert ended == [True]
    assert torch.equal(torch.load(tmp_path / "first")[0], torch.full((16,), 2 / 16))
    assert [site.op for site in watch.report.losses] == ["mse_loss"]
    assert watch.report.graphs == 1
