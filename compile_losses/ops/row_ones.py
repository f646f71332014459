"""Ones that lie in memory, so that Inductor reads them.

``torch.ops.fused.row_ones(size, *, dtype, device)`` returns ``torch.ones(size)``. A loop that reads
one of them for each row of a tensor keeps its rows apart; Inductor would leave ``torch.ones`` out
(:mod:`compile_losses.lower.elementwise.rows`).
"""

import torch

from compile_losses import library

row_ones = library.define("row_ones(SymInt[] size, *, ScalarType dtype, Device device) -> Tensor")
library.implement(row_ones, torch.ones, "CompositeExplicitAutograd")
library.register_fake(row_ones, torch.empty)
library.register_not_differentiable(row_ones)
