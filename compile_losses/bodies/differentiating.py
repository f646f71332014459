"""Derivatives inside of a kernel, which runs below autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from compile_losses.torch_internals.ops import AUTOGRAD_KEY, exclude, is_excluded


@contextmanager
def differentiating() -> Iterator[None]:
    """Lets autograd record, also below it, and in inference mode."""
    before = is_excluded(AUTOGRAD_KEY)
    exclude(AUTOGRAD_KEY, False)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        exclude(AUTOGRAD_KEY, before)


def leaf(tensor: Tensor, dtype: torch.dtype, needed: bool) -> Tensor:
    """A tensor in a dtype, to be differentiated by if that is needed."""
    value = tensor.detach().to(dtype)
    if value.is_inference():
        value = value.clone()
    return value.requires_grad_(needed)
