"""Fused losses for torch.compile: unmodified models get ``torch.ops.fused.*`` by themselves."""

from compile_losses import functional
from compile_losses.backend import disable, enable
from compile_losses.recognize import rewrite
from compile_losses.report import Report, Site, explain

__all__ = ["Report", "Site", "disable", "enable", "explain", "functional", "rewrite"]
