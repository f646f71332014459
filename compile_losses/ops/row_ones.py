"""Ones that lie in memory, so that Inductor reads them.

``torch.ops.fused.row_ones(size, *, dtype, device)`` returns ``torch.ones(size)``. A loop that reads
one of them for each row of a tensor keeps its rows apart; Inductor would leave ``torch.ones`` out
(:mod:`compile_losses.lower.elementwise.rows`).
"""

import torch

from compile_losses import library

row_ones = library.define("row_ones(SymInt[] size, *, ScalarType dtype, Device device) -> Tensor")
library.compose(row_ones, torch.ones, torch.empty)
