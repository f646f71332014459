"""Fused losses for torch.compile: unmodified models get ``torch.ops.fused.*`` by themselves."""

from compile_losses import functional
from compile_losses.backend import disable, enable
from compile_losses.linear import LinearCrossEntropyLoss
from compile_losses.recognize import rewrite
from compile_losses.report import Report, Site, explain

__all__ = [
    "LinearCrossEntropyLoss",
    "Report",
    "Site",
    "disable",
    "enable",
    "explain",
    "functional",
    "rewrite",
]
