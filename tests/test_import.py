"""What importing the package loads."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

import compile_losses

#: What compiles. Eager losses need none of it.
HEAVY = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "sympy")


@functools.cache
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "script",
    # Without kernels torch 2.11 loads Dynamo in the backward.
    ["import torch, compile_losses", pytest.param(EAGER, marks=pytest.mark.kernels)],
)
def test_eager_losses_load_no_compiler(script):
    # Some versions of torch load a part of it by themselves.
    assert loaded_after(script) == loaded_after("import torch")


def test_names_load_their_modules():
    for name in compile_losses.__all__:
        assert getattr(compile_losses, name) is not None
    assert dir(compile_losses) == sorted([*compile_losses.__all__, "__version__"])
    assert compile_losses.backend is sys.modules["compile_losses.backend"]
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = compile_losses.nothing_of_this_name


@pytest.mark.sampled(5)
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


#: Another package's ops of the same namespace, declared before or after ours.
OTHERS = """
import torch
def declare(kind, *schemas):
    library = torch.library.Library("fused", kind)
    for schema in schemas:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, lambda x: x.square(), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fused::{name}", torch.empty_like, lib=library)
    return library
"""

BOTH = """
kept = declare("DEF", "other(Tensor x) -> Tensor", "other_forward(Tensor x) -> Tensor")
import compile_losses
from compile_losses import library
late = declare("FRAGMENT", "late_with_grad(Tensor x) -> Tensor")
assert not any("other" in name or "late" in name for name in library.public_ops())
def function(x, y):
    pieces = torch.ops.fused.other_forward(x) + torch.ops.fused.late_with_grad(x)
    return torch.nn.functional.mse_loss(x, y) + pieces.sum()
x, y = torch.randn(8), torch.randn(8)
options = {"inner_backend": "aot_eager", "strict": True}
compiled = torch.compile(function, backend="compile_losses", options=options)
torch.testing.assert_close(compiled(x, y), function(x, y))
assert compile_losses.counters()["rewritten"] == {"mse_loss": 1}
"""

CLASH = """
kept = declare("FRAGMENT", "mse_loss(Tensor x) -> Tensor")
try:
    import compile_losses
except ImportError as error:
    assert "cannot declare torch.ops.fused.mse_loss, because" in str(error), error
else:
    raise AssertionError("imported")
"""


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "script",
    # Without kernels and without Inductor a loss is torch's.
    [pytest.param(BOTH, marks=pytest.mark.kernels), CLASH],
    ids=["other ops", "the same op"],
)
def test_another_package_of_the_namespace(script):
    done = subprocess.run(
        [sys.executable, "-c", OTHERS + script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
