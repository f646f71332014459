"""The gradients of the first rows, their logits in the memory of the weight's gradient.

The logits are made in blocks of classes, which lie as BlockLayout says, and stay until the
gradient's rows there are written. First every block is computed and read once, for its parts of
each row's softmax. These parts are merged, like those of shards, into the statistics of all
classes. Then, from the first block on, each block's gradient replaces its logits. One product adds
a part to input's gradient, a sum over blocks; another makes the weight's gradient of the block's
classes.

There are three products in all. The weight's gradient is written once, and not read. Besides its
memory, only the scratch buffer holds logits. If input's gradient is in a 16-bit dtype, its sum over
blocks is in float32. That sum lies in the memory of the gradient for all rows, if the first rows
are at most half of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_losses.ops import vocabulary_parallel
from compile_losses.ops.linear.block_layout import BlockLayout
from compile_losses.ops.linear.matrix_products import Gradients, add_product, write_logits
from compile_losses.ops.linear.row_losses import SUM, RowLosses


class FirstRows:
    """The part of the first ``layout.rows`` rows in the gradients, which hold nothing yet.

    The constructor allocates all memory that is needed; nothing is computed before ``add``.
    """

    def __init__(self, gradients: Gradients, layout: BlockLayout, losses: RowLosses) -> None:
        self.gradients, self.layout = gradients, layout
        self.blocks = _logits(layout, gradients.weight)
        self.losses = _BlockLosses(losses, layout)
        self.of_input = gradients.input[: layout.rows] if gradients.needs_input else None
        self.total = self.of_input
        if self.of_input is not None and self.of_input.dtype != losses.dtype:
            self.total = _in_idle_memory(gradients.input, self.of_input.shape, losses.dtype)

    def add(self, input: Tensor, linear_bias: Tensor | None) -> None:
        """Adds the part of input, [layout.rows, hidden], to the gradients. Called once."""
        assert len(input) == self.layout.rows  # out= would resize the logits, over others
        gradients, losses, total = self.gradients, self.losses, self.total
        weight, of_weight = gradients.linear_weight, gradients.weight
        parts = []
        for classes, logits in self.blocks:
            bias = None if linear_bias is None else linear_bias[classes]
            write_logits(input, weight[classes], bias, logits)
            parts.append(losses.part(classes, logits))
        losses.merge(torch.stack(parts))

        for classes, logits in self.blocks:
            losses.write_gradient(classes, logits)
            if total is not None:
                add_product(total, logits, weight[classes], starts=classes.start == 0)
            if gradients.needs_bias:
                gradients.bias_sum[classes] += logits.sum(0)
            # Overwrites what lies before the next block's logits: see BlockLayout.
            torch.mm(logits.t(), input, out=of_weight[classes])
        del logits
        self.blocks.clear()  # and with them the scratch buffer
        if total is not None and self.of_input is not None and total is not self.of_input:
            # By a copy of its own: they may lie over each other.
            self.of_input.copy_(total.to(self.of_input.dtype))
        gradients.starts = False


def _in_idle_memory(tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor, in the memory of another one if that is large enough for it."""
    if tensor.nbytes < shape.numel() * dtype.itemsize:
        return tensor.new_empty(shape, dtype=dtype)
    count = shape.numel() * dtype.itemsize // tensor.itemsize
    return tensor.view(-1)[:count].view(dtype).view(shape)


def _logits(layout: BlockLayout, of_weight: Tensor) -> list[tuple[slice, Tensor]]:
    """The classes of each block, and the tensor that its logits are written to."""
    packed, scratch = of_weight.view(-1), of_weight.new_empty(layout.scratch_elements)
    found = []
    for block in range(layout.blocks):
        classes = layout.classes_of(block)
        width = classes.stop - classes.start
        memory = packed if block < layout.packed else scratch
        logits = memory.narrow(0, layout.offset(block), layout.rows * width)
        found.append((classes, logits.view(layout.rows, width)))
    return found


class _BlockLosses:
    """The losses of rows whose logits come in blocks of classes."""

    def __init__(self, losses: RowLosses, layout: BlockLayout) -> None:
        self.losses, self.layout = losses, layout
        self.target = losses.target[: layout.rows]
        assert losses.z_factor is not None  # the loss is reduced
        self.grad_squares = losses.grad_squares(losses.z_factor)

    def part(self, classes: slice, logits: Tensor) -> Tensor:
        """A block's parts of each row's softmax."""
        losses = self.losses
        return vocabulary_parallel.parts(
            logits, self.target, losses.weight, classes.start, self.layout.classes,
            losses.ignore_index, losses.label_smoothing, losses.softcap,
        )  # fmt: skip

    def merge(self, parts: Tensor) -> None:
        """Takes the parts of all blocks, [blocks, rows, ...]; the rows' losses are known then."""
        losses = self.losses
        masses = self._masses() if losses.label_smoothing > 0 else None
        loss, self.statistics, _ = vocabulary_parallel.merge(
            parts, self.target, losses.weight, masses, self.layout.classes, SUM,
            losses.ignore_index, losses.label_smoothing, losses.dtype,
        )  # fmt: skip
        losses.sums.append(loss)
        if losses.z_loss != 0:
            rows = slice(0, self.layout.rows)
            losses.square_sums.append(losses.squares(rows, self.statistics).sum())

    def _masses(self) -> Tensor:
        """The sum of the class weights in each block."""
        layout, weight = self.layout, self.losses.weight
        sums = []
        for classes in map(layout.classes_of, range(layout.blocks)):
            if weight is None:
                count = classes.stop - classes.start
                sums.append(self.target.new_full((), count, dtype=self.losses.dtype))
            else:
                sums.append(weight[classes].sum(dtype=torch.float64).to(self.losses.dtype))
        return torch.stack(sums)

    def write_gradient(self, classes: slice, logits: Tensor) -> None:
        """The gradient of a block's logits before the soft-cap, over them."""
        losses = self.losses
        vocabulary_parallel.gradient_(
            losses.factor, logits, self.target, losses.weight, self.statistics, classes.start,
            self.layout.classes, SUM, losses.ignore_index, losses.label_smoothing, losses.softcap,
            self.grad_squares,
        )  # fmt: skip
