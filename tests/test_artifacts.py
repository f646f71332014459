"""Compiled code that one process saves and another loads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import WITHOUT_VECTORS

MODEL = """
import sys
import torch
import torch.nn.functional as F

class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(600, 1000)

    def forward(self, x, target):
        return F.mse_loss(self.linear(x), target)

torch.manual_seed(0)
model, x, target = Regression(), torch.randn(700, 600), torch.randn(700, 1000)
"""


def python(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", MODEL + textwrap.dedent(script), *arguments],
        env={**os.environ, **WITHOUT_VECTORS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["backend", "enable"])
def test_ahead_of_time_artifact(way, tmp_path):
    """What either way made imports the package where it is loaded."""
    if not hasattr(torch.compile(torch.nn.Identity()).forward, "aot_compile"):
        pytest.skip(reason="this torch has no aot_compile of modules")
    save = """
        if sys.argv[2] == "enable":
            import compile_losses
            compile_losses.enable()
        backend = "compile_losses" if sys.argv[2] == "backend" else "inductor"
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with torch._dynamo.config.patch(enable_aot_compile=True):
            compiled.forward.aot_compile(((x, target), {})).save_compiled_function(sys.argv[1])
    """
    load = """
        with open(sys.argv[1], "rb") as file:
            function = torch.compiler.load_compiled_function(file)
        loss = function(model, x, target)
        (3 * loss).backward()
        gradient = model.linear.weight.grad.clone()
        model.zero_grad()
        expected = model(x, target)
        (3 * expected).backward()
        torch.testing.assert_close((loss, gradient), (expected, model.linear.weight.grad))
        print([name for name in sys.modules if name == "compile_losses"])
    """
    path = str(tmp_path / "function.pt")
    python(save, path, way)
    assert python(load, path).split() == ["['compile_losses']"]


class Exported(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 12)

    def forward(self, x, target):
        return torch.ops.fused.mse_loss(self.linear(x), target)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kind",
    [
        "export",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(
                torch.__version__ < (2, 12),
                reason="AOTInductor of torch 2.11 hands ops another dtype",
            ),
        ),
    ],
)
def test_exported_program(kind, tmp_path):
    """Programs that name the ops need the package to be imported where they are loaded."""
    model, inputs = Exported(), (torch.randn(8, 16), torch.randn(8, 12))
    path = str(tmp_path / "program.pt2")
    program = torch.export.export(model, inputs)
    if kind == "export":
        torch.export.save(program, path)
        loaded = "torch.export.load(sys.argv[1]).module()"
    else:
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(program, package_path=path)
        loaded = "torch._inductor.aoti_load_package(sys.argv[1])"
    torch.save(inputs, tmp_path / "inputs.pt")
    script = f"""
        import compile_losses
        print(float({loaded}(*torch.load(sys.argv[2]))))
    """
    loss = float(python(script, path, str(tmp_path / "inputs.pt")))
    torch.testing.assert_close(loss, float(F.mse_loss(model.linear(inputs[0]), inputs[1])))
