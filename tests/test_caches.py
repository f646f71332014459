"""What one process compiled and another loads: right under each thing that the passes look at and
torch's keys do not hold."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests import WITHOUT_VECTORS

SCRIPT = """
import sys
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch._dynamo.utils import counters

first_retains, way, aot_cache, threads = (argument == "yes" for argument in sys.argv[1:5])
names = sys.argv[5:]
torch.set_num_threads(2 if threads else 1)
torch._functorch.config.enable_autograd_cache = aot_cache

class Double(torch.autograd.Function):  # AOTAutograd's cache passes by what has one
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2

torch.manual_seed(0)
x, w = torch.randn(2048, 64), torch.randn(64, 1024)
t, q = torch.randint(1024, (2048,)), torch.rand(2048, 1024)
FUNCTIONS = {
    "cross entropy": lambda x, w: F.cross_entropy(Double.apply(x) @ w, t),
    "plain cross entropy": lambda x, w: F.cross_entropy(x @ w, t),
    "divergence": lambda x, w: F.kl_div(x @ w, q, reduction="batchmean"),
    "rows": lambda x, w: F.cross_entropy(x @ w, t, reduction="none").square().mean(),
    "squares": lambda x, w: F.mse_loss(x @ w, q),
}

def step(function, retain):
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = 3 * function(*leaves)
    gradients = torch.autograd.grad(loss, leaves, retain_graph=retain)
    again = torch.autograd.grad(loss, leaves) if retain else gradients
    return [*gradients, *again]

if not way:
    import compile_losses
    compile_losses.enable()
for name in names or FUNCTIONS:
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend="compile_losses" if way else "inductor")
    for retain in (first_retains, not first_retains):
        expected = step(function, retain)
        try:
            actual = step(compiled, retain)
        except RuntimeError as error:
            # A backward from AOTAutograd's cache keeps the donations of its first compilation.
            donates = not first_retains or counters["aot_autograd"]["autograd_cache_hit"]
            assert retain and donates and "donated" in str(error), error
            assert name != "divergence", "stock's allows it"
            continue
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
"""


def compile_and_run(cache, *options: bool, names: Iterable[str] = (), **environment: str) -> None:
    said = ("yes" if option else "no" for option in options)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *said, *names],
        env={
            **os.environ,
            **WITHOUT_VECTORS,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "way", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["backend", "enable"]
)
@pytest.mark.parametrize("aot_cache", [True, False], ids=["both caches", "Inductor's cache"])
def test_second_process(aot_cache, way, tmp_path):
    """Whether the first backward retains its graph decides what AOTAutograd donates; and the
    passes also read whether to verify. The number of threads changes nothing."""
    compile_and_run(tmp_path, False, way, aot_cache, True)
    compile_and_run(tmp_path, True, way, aot_cache, True)
    names = "cross entropy", "plain cross entropy", "squares"  # compiled once more, to be verified
    compile_and_run(tmp_path, False, way, aot_cache, False, names=names, COMPILE_LOSSES_VERIFY="1")
