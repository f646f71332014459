"""The one accuracy rule: error against float64 at most twice torch eager's, or a few ulp."""

from __future__ import annotations

import torch
from torch import Tensor

ULPS = 4
#: Torch's own error in one call says little where terms cancel: that of so many like it does.
SIMILAR = 8
#: Of the roundings of float64 and float32. What torch computes in float64 may be the reference:
#: there its error in float32 counts, times this.
RATIO = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


def similar(tensor: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """The tensor with each number a few per cent larger or smaller, in another dtype."""
    if not tensor.is_floating_point():
        return tensor
    by = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) / 16
    return (tensor.double() * (by + 31 / 32).to(tensor.device)).to(dtype)


def assert_accurate(
    ours: Tensor, eager: Tensor, exact: Tensor, what: str = "result", like: float = 0.0
) -> None:
    """Compares a result with float64, allowing twice the worst error that torch makes.

    Args:
        ours: what is tested.
        eager: torch's result on the same inputs in the same dtype.
        exact: torch's result in float64.
        like: the worst error that torch was seen to make on operands like these.
    """
    assert ours.shape == exact.shape, f"{what}: shape {ours.shape}, expected {exact.shape}"
    assert ours.dtype == eager.dtype, f"{what}: {ours.dtype}, expected {eager.dtype}"
    ours64, eager64, exact = ours.double().cpu(), eager.double().cpu(), exact.double().cpu()
    special = ~exact.isfinite()
    # Where the exact value is nan or infinite ours must be, too, unless torch overflowed earlier.
    torch.testing.assert_close(ours64[special], exact[special], equal_nan=True, msg=what)
    ours64, eager64, exact = ours64[~special], eager64[~special], exact[~special]
    if ours64.numel() == 0:
        return
    eager_error = (eager64 - exact).abs()
    finite = eager_error[eager_error.isfinite()]
    largest = max(like, finite.max().item() if finite.numel() else 0.0)
    finfo = torch.finfo(ours.dtype)
    allowed = 2 * largest + ULPS * (finfo.eps * exact.abs() + finfo.smallest_normal * finfo.eps)
    if ours.dtype == torch.float64:  # then the reference is torch's own, which errs as much again
        allowed += like + ULPS * finfo.eps * exact.abs().max()
    error = (ours64 - exact).abs()
    overflow = exact.abs() > finfo.max
    error = torch.where(overflow & ours64.isinf(), torch.zeros_like(error), error)
    wrong = ~(error <= allowed)
    assert not wrong.any(), (
        f"{what}: error {error[wrong].max().item():.3g} where at most "
        f"{allowed[wrong].min().item():.3g} is allowed (torch's own: {largest:.3g}); "
        f"{int(wrong.sum())} of {wrong.numel()} elements"
    )
