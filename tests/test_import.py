"""What importing the package loads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import compile_losses

#: What compiles. Eager losses need none of it.
HEAVY = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "sympy")


def loaded_after(script: str) -> set[str]:
    """The modules of HEAVY that a fresh process has loaded after a script."""
    script += "\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return set(json.loads(done.stdout)) & set(HEAVY)


EAGER = """
import torch
import compile_losses
import compile_losses.functional as F
x = torch.randn(3, 4, requires_grad=True)
loss = F.cross_entropy(x, torch.tensor([1, 2, 3])) + F.mse_loss(x, torch.zeros(3, 4))
loss = loss + compile_losses.LinearCrossEntropyLoss(4, 7)(x, torch.tensor([1, 2, 3]))
loss.backward()
F.kl_div(x.detach(), x.detach().exp(), reduction="batchmean")
"""


@pytest.mark.parametrize("script", ["import torch, compile_losses", EAGER])
def test_eager_losses_load_no_compiler(script):
    # Some versions of torch load a part of it by themselves.
    assert loaded_after(script) == loaded_after("import torch")


def test_names_load_their_modules():
    for name in compile_losses.__all__:
        assert getattr(compile_losses, name) is not None
        assert name in dir(compile_losses)
    assert compile_losses.backend is sys.modules["compile_losses.backend"]
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = compile_losses.nothing_of_this_name


@pytest.mark.parametrize("name", ["enable", "explain", "rewrite", "Report", "backend"])
def test_a_name_in_a_fresh_process(name):
    """Each name works where it is the first that is asked for."""
    found = loaded_after(f"from compile_losses import {name}")
    assert name == "Report" or "torch._dynamo" in found


@pytest.mark.parametrize("state", ["enable", "disable"])
def test_garbage_is_collected_as_before(state):
    """The import pauses the collector, and gives it back as it was."""
    script = f"import gc; gc.{state}(); import compile_losses; print(gc.isenabled())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{state == 'enable'}\n"
