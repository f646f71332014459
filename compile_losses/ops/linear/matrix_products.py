"""The matrix products of linear cross entropy, a chunk of logits at a time, and their sums."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library, switches
from compile_losses.device_constants import constants_of
from compile_losses.torch_internals.ops import has_kernel, key_of_device

if TYPE_CHECKING:
    from compile_losses.ops.linear.weight_sum import WeightSum

aten = torch.ops.aten

#: Products that are added to a sum in float32 are made in blocks of about this size, on devices
#: that can't add them up in the product.
BLOCK_BYTES = 64 * 2**20

#: A product on a CPU rounds the last rows differently if there is no multiple of this. Chunks of
#: another size, or a batch with more rows, would make other bits of these.
ROWS_ALIKE = 16

#: A product on a GPU is made by another kernel for other numbers of rows. Products of so many rows
#: each make the same bits of a row in any of their places.
PIECE = 256

#: Which rows, their input and their logits, which may be overwritten.
Chunk: TypeAlias = tuple[slice, Tensor, Tensor]


def chunks_of_logits(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    chunk: int,
    kept: Tensor | None = None,
    start: int = 0,
    scale: float = 1.0,
) -> Iterator[Chunk]:
    """Chunks of the rows kept, from start on. The logits of all chunks lie in one buffer.

    With the option ``batch_invariant`` the logits of a row do not depend on the chunks, nor on
    other rows. On a CPU that is so without it, unless all rows are fewer than a chunk has at least.
    """
    count = len(input) if kept is None else len(kept)
    layout = _layout(input, count)
    classes = len(linear_weight)
    most = layout.rows(max(0, min(chunk, count - start)))
    buffer = input.new_empty((most, layout.stride(classes)))[:, :classes]
    for first in range(start, count, chunk):
        rows = slice(first, min(first + chunk, count))
        part = rows_of(input, rows, kept)
        more = layout.rows(len(part)) - len(part)
        padded = F.pad(part, (0, 0, 0, more)) if more else part
        for some, logits in layout.pieces(padded, buffer):
            write_logits(some, linear_weight, linear_bias, logits, scale)
        yield rows, part, buffer[: len(part)]


@dataclass(frozen=True)
class Layout:
    """How the products of chunks and the buffer of their logits lie.

    Attributes:
        alike: the rows of a chunk are padded to a multiple of this.
        piece: the rows of one product; None for all of a chunk.
        packet: rows of the buffer begin at a multiple of so many elements.
    """

    alike: int = 1
    piece: int | None = None
    packet: int = 1

    def rows(self, count: int) -> int:
        return -(-count // self.alike) * self.alike

    def pieces(self, input: Tensor, buffer: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """The rows of each product, and where its logits lie. A single piece is not split, which
        would take the host time."""
        buffer = buffer[: len(input)]
        if self.piece is None:
            return [(input, buffer)]
        return zip(input.split(self.piece), buffer.split(self.piece), strict=True)

    def stride(self, classes: int) -> int:
        return -(-classes // self.packet) * self.packet


def _layout(input: Tensor, count: int) -> Layout:
    """That for so many rows."""
    if input.device.type == "cpu":
        few = count < constants_of(input.device).least_rows
        return Layout(1 if few and not switches.is_batch_invariant() else ROWS_ALIKE)
    if not switches.is_batch_invariant():
        return Layout()
    if library.no_kernels(input.device) is not None:
        _warn_of_sums(input.device.type)
    # Kernels read a row in another order if it begins elsewhere between two boundaries.
    return Layout(PIECE, PIECE, 16 // input.element_size())


@functools.cache
def _warn_of_sums(device_type: str) -> None:
    """Once for each device type: torch's reductions choose their order by the number of rows."""
    warnings.warn(
        f"batch_invariant: expected kernels for {device_type}, and there are none. The products of "
        "a head are the same bits in every batch, but torch's sums over classes may not be",
        stacklevel=2,
    )


def parts_of(chunk: Chunk, part: int) -> Iterator[tuple[slice, Tensor]]:
    """Parts of a chunk of at most so many rows: which rows, and their logits."""
    rows, _, logits = chunk
    for first in range(0, len(logits), part):
        some = logits[first : first + part]
        yield slice(rows.start + first, rows.start + first + len(some)), some


def rows_of(input: Tensor, rows: slice, kept: Tensor | None) -> Tensor:
    """Some of the rows kept."""
    return input[rows] if kept is None else input.index_select(0, kept[rows])


def write_logits(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    logits: Tensor,
    scale: float = 1.0,
) -> None:
    if linear_bias is not None:
        torch.addmm(linear_bias, input, linear_weight.t(), beta=scale, alpha=scale, out=logits)
    elif scale != 1:
        torch.addmm(logits, input, linear_weight.t(), beta=0, alpha=scale, out=logits)
    else:
        torch.mm(input, linear_weight.t(), out=logits)


def add_product(total: Tensor, a: Tensor, b: Tensor, *, starts: bool) -> None:
    """total += a @ b, or total = a @ b if it starts; in total's dtype, which may be float32."""
    if total.dtype == a.dtype:
        if starts:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
    elif has_kernel("aten::addmm.dtype_out", key_of_device(total.device.type)):
        if starts:
            aten.mm.dtype_out(a, b, total.dtype, out=total)
        else:
            aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        _add_rounded_product(total, a, b, starts=starts)


def _add_rounded_product(total: Tensor, a: Tensor, b: Tensor, *, starts: bool) -> None:
    """The product is rounded to its operands' dtype before it is added."""
    count = max(1, BLOCK_BYTES // max(1, b.shape[1] * b.dtype.itemsize))
    buffer = b.new_empty((min(len(a), count), b.shape[1]))
    for first in range(0, len(a), count):
        rows = a[first : first + count]
        product = buffer[: len(rows)]
        torch.mm(rows, b, out=product)
        place = total[first : first + count]
        if starts:
            place.copy_(product)
        else:
            place += product


class Gradients:
    """The gradients of input, linear_weight and linear_bias, as far as needed: sums over chunks.

    Args:
        rows: of input's gradient.
        wide: whether the weight's gradient is added up in float32.
        dtype: of the bias's sum.
        total: what the weight's gradient is a part of; by default it is a result.
    """

    def __init__(
        self,
        linear_weight: Tensor,
        rows: int,
        needs: Sequence[bool],
        dtype: torch.dtype,
        *,
        wide: bool,
        total: WeightSum | None = None,
    ) -> None:
        self.total = total
        needs_input, self.needs_weight, self.needs_bias = needs
        classes, hidden = linear_weight.shape
        self.linear_weight, self.needs_input, self.wide = linear_weight, needs_input, wide
        self.input = linear_weight.new_empty((rows, hidden) if needs_input else 0)
        self.bias_sum = linear_weight.new_zeros(classes if self.needs_bias else 0, dtype=dtype)
        self.starts = True

    @functools.cached_property
    def weight(self) -> Tensor:
        """The sum that is the weight's gradient, or is rounded to it.

        The first chunk's logits, and what their loss holds besides, are computed before there is
        memory for it.
        """
        dtype = torch.float32 if self.wide else self.linear_weight.dtype
        return self.linear_weight.new_empty(
            self.linear_weight.shape if self.needs_weight and self.total is None else 0, dtype=dtype
        )

    def add(self, rows: slice, input: Tensor, of_logits: Tensor) -> None:
        """Adds the part of a chunk of rows, from the gradient of its logits."""
        if self.needs_input:
            torch.mm(of_logits, self.linear_weight, out=self.input[rows])
        if self.total is not None:
            self.total.add(of_logits.t(), input, wide=self.wide)
        elif self.needs_weight:
            add_product(self.weight, of_logits.t(), input, starts=self.starts)
        if self.needs_bias:
            self.bias_sum += of_logits.sum(0)
        self.starts = False

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients; empty if they are not needed."""
        if self.total is not None:
            self.total.begin(self.linear_weight, self.linear_weight.shape)
        elif self.starts:
            self.weight.zero_()
        dtype = self.linear_weight.dtype
        return self.input, self.weight.to(dtype), self.bias_sum.to(dtype)


def add_chunks(
    gradients: Gradients,
    chunks: Iterable[Chunk],
    part: int,
    write_gradient: Callable[[slice, Tensor], None],
) -> None:
    """Adds what all chunks contribute.

    Args:
        part: how many rows of a chunk the function computes at a time.
        write_gradient: writes the gradient of some rows' logits over these.
    """
    for chunk in chunks:
        for some in parts_of(chunk, part):
            write_gradient(*some)
        gradients.add(*chunk)
