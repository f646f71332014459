"""The paths that kernels take on GPUs before compute capability 9.0, forced on a newer one."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.kernels]

#: Prints the names of the kernels that compute a cross entropy with its gradient.
KERNELS = """
import torch
from torch.profiler import ProfilerActivity, profile

import compile_losses

logits = torch.randn(64, 50000, device="cuda")
target = torch.randint(50000, (64,), device="cuda")
with profile(activities=[ProfilerActivity.CUDA]) as profiled:
    torch.ops.fused.cross_entropy_with_grad(logits, target, None, 1, -100, 0.0, torch.float32)
    torch.cuda.synchronize()
print(*(event.key for event in profiled.key_averages()))
"""
SUITES = ("tests/test_ops.py", "tests/test_ops_gradients.py", "tests/test_ops_special_values.py")


def run(*command, arch):
    environment = os.environ | ({"COMPILE_LOSSES_CUDA_ARCH": arch} if arch else {})
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, text=True, capture_output=True
    )


@pytest.mark.parametrize(("arch", "bulk"), [(None, True), ("900", True), ("800", False)])
def test_kernels(arch, bulk):
    done = run("-c", KERNELS, arch=arch)
    assert done.returncode == 0, done.stderr
    assert "cross_entropy" in done.stdout
    assert ("cross_entropy_bulk_kernel" in done.stdout) == bulk


@pytest.mark.slow
def test_values_and_gradients():
    chosen = ("-m", "gpu and not slow", "-k", "cross_entropy or nll_loss")
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short")
    done = run("-m", "pytest", *options, *chosen, *SUITES, arch="800")
    assert done.returncode == 0, done.stdout[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= 100
