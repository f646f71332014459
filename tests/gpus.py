"""Calls that end a GPU's context, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

from tests.kernels import has_cuda_kernels


def on_a_gpu_of_its_own(script: str) -> subprocess.CompletedProcess[str]:
    """A device-side assertion ends the process' CUDA context, so it gets a process of its own."""
    script = f"import torch, compile_losses\n{script}\ntorch.cuda.synchronize()"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def assert_ended_by_target(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode != 0
    assert "device-side assert" in result.stderr
    # Without kernels the assertion is that of torch's own gather and scatter.
    words = ["target"] if has_cuda_kernels() else ["target", "index out of bounds"]
    assert any(word in result.stderr + result.stdout for word in words), result.stderr
