"""A write over a buffer, in the loop that computes the numbers.

``torch.ops.fused.write_over(buffer, values)`` copies ``values`` into ``buffer``, of the same shape
and dtype. In a graph, Inductor stores there what it computes of other nodes, where ``copy_`` would
be given a buffer of its own.
"""

from __future__ import annotations

from torch import Tensor

from compile_losses import library

write_over = library.define("write_over(Tensor(a!) buffer, Tensor values) -> ()")


def _write(buffer: Tensor, values: Tensor) -> None:
    buffer.copy_(values)


library.compose(write_over, _write, lambda buffer, values: None)
