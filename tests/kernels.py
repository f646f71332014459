"""Which kernels are built, and tests that run without them what they would run with them."""

from __future__ import annotations

import pytest
import torch

from compile_losses import implementations, library

#: Whether there are built kernels for the CPU.
HAS_KERNELS = not isinstance(library.kernels["cpu"], str)


def has_cuda_kernels() -> bool:
    return torch.cuda.is_available() and not isinstance(library.kernels["cuda"], str)


def plan_bodies_as_kernels(patch: pytest.MonkeyPatch) -> None:
    """Recognition and plans take the bodies of ops for kernels, where there are none."""
    known = implementations.has_kernels

    def has_kernels(device: torch.device) -> bool:
        return device.type in ("cpu", "cuda") or known(device)

    if not has_cuda_kernels():
        patch.setattr(implementations, "has_kernels", has_kernels)
    if HAS_KERNELS:
        return
    patch.setattr(library, "no_kernels", lambda device: None)
    library.DEVICES.update(("cpu", "cuda"))
