"""The places of a chunk's logits in the memory of the weight's gradient, which is written last.

The classes are divided into blocks of equal width; the last block holds the rest, too. The logits
of the last blocks lie in a scratch buffer. The logits of the others, dense [rows, width], lie one
after another at the end of the weight's gradient, [classes, hidden]::

    |                  gradient of the weight, classes * hidden                  |
    |                        | logits 0 | logits 1 | ... | logits of the last packed block |
    | rows of block 0 | rows of block 1 | ...

The gradient's rows are written a block at a time, from the first on, each from the logits of its
own block, which nobody needs afterwards. So the rows up to those of block b must end before the
logits of b begin. Both bounds are linear in b, so it is enough to check the first and the last
packed block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

#: The widths and the beginnings of blocks are multiples of so many elements: 128 bytes in a 16-bit
#: dtype. A row that begins on a multiple of 16 bytes is faster to read, and to multiply.
ALIGNED = 64


@dataclass(frozen=True)
class BlockLayout:
    """The logits of ``rows`` rows, in ``blocks`` blocks of classes, the last ``scratch`` apart."""

    rows: int
    hidden: int
    classes: int
    blocks: int
    scratch: int

    @property
    def packed(self) -> int:
        """How many blocks lie in the weight's gradient."""
        return self.blocks - self.scratch

    @cached_property
    def width(self) -> int:
        """The classes of every block but the last."""
        return self.classes // self.blocks // ALIGNED * ALIGNED

    def classes_of(self, block: int) -> slice:
        first = block * self.width
        return slice(first, self.classes if block == self.blocks - 1 else first + self.width)

    @property
    def end(self) -> int:
        """The end of the packed blocks, in the weight's gradient."""
        return self.classes * self.hidden // ALIGNED * ALIGNED

    def offset(self, block: int) -> int:
        """The beginning of a block's logits, in the weight's gradient or in the scratch buffer."""
        if block >= self.packed:
            return (block - self.packed) * self.rows * self.width
        return self.end - (self.packed - block) * self.rows * self.width

    @property
    def scratch_elements(self) -> int:
        return self.rows * (self.classes - self.packed * self.width)

    def fits(self) -> bool:
        """Whether no logits are overwritten before they have been used."""
        if self.width == 0 or not 1 <= self.scratch < self.blocks:
            return False
        written = self.width * self.hidden
        last = self.packed - 1
        return self.offset(0) >= written and self.offset(last) >= (last + 1) * written


def smallest_scratch(rows: int, hidden: int, classes: int, blocks: int) -> BlockLayout | None:
    """The layout with so many blocks that has the fewest of them in the scratch buffer.

    If all blocks are equally wide, a layout fits if rows * packed <= hidden * (blocks - 1) and
    rows <= hidden * scratch.
    """
    layout = BlockLayout(rows, hidden, classes, blocks, 1)
    logits, written = rows * layout.width, layout.width * hidden
    if logits == 0 or written == 0:
        return None
    packed = min((layout.end - written) // logits, (layout.end - logits) // written, blocks - 1)
    return replace(layout, scratch=blocks - packed) if packed >= 1 else None
