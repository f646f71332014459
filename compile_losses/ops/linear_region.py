"""A head with all that reads its logits row by row, a chunk of rows at a time.

``fused::linear_region(Tensor[] rows, Tensor[] shared, str program) -> Tensor[]`` is what the pass
``plan.regions`` puts into graphs. Each of ``rows`` has the rows as its first dimension; ``shared``
are the weights, and what else all rows read. The program says what is computed
(:mod:`compile_losses.ops.linear.region_program`): products make a chunk's logits, a function of
each row makes numbers of the row and gradients of the logits, and of a gradient products make rows
of input's gradient and add to that of the weight. Logits are never held for more than a chunk.

Results, in the program's order: numbers of each row, [rows]; products of each row, [rows, width];
sums over rows, [classes, width] or, turned, [width, classes]; totals, [classes].

Inductor compiles the function once for each device and dtype, when it is first called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.ops.linear.chunk_size import chunk_rows, sums_in_float32
from compile_losses.ops.linear.reference import autocast_off
from compile_losses.ops.linear.region_program import Product, Program, columns_of, parsed
from compile_losses.ops.linear.weight_sum import WeightSum, current_sum, rows_of_sum
from compile_losses.torch_internals.ops import BelowViews

linear_region = library.define(
    "linear_region(Tensor[] rows, Tensor[] shared, str program) -> Tensor[]"
)


def rows_at_a_time(
    widths: Sequence[int],
    has_gradients: bool,
    sums_weight: bool,
    rows: int,
    hidden: int,
    classes: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """How many rows of logits a region holds.

    Args:
        widths: how many classes each product has.
        has_gradients: whether the gradient of a chunk's logits lies beside them.
        sums_weight, rows, hidden, classes, dtype, device: as for :func:`chunk_rows`.
    """
    beside = sum(widths) / max(widths) - 1 + has_gradients
    return chunk_rows(
        rows, hidden, classes, dtype, device,
        beside=beside, sums_weight=sums_weight, is_taken=True,
    )  # fmt: skip


@dataclass(frozen=True)
class _Region:
    """A program with its tensors."""

    text: str
    rows: Sequence[Tensor]
    shared: Sequence[Tensor]

    @property
    def program(self) -> Program:
        return parsed(self.text)

    @property
    def count(self) -> int:
        return len(self.rows[0])

    def shapes(self) -> list[tuple[Any, ...]]:
        """Of the results."""
        program, rows, shared = self.program, self.rows, self.shared
        count = rows[0].shape[0]
        of_sums = [(each.classes, rows[each.other].shape[1]) for each in program.sums]
        turned = [each.is_turned for each in program.sums]
        return [
            *[(count,)] * len(program.columns),
            *((count, shared[each.other].shape[1]) for each in program.row_products),
            *(shape[::-1] if turn else shape for shape, turn in zip(of_sums, turned, strict=True)),
            *((each.classes,) for each in program.totals),
        ]

    def logits(self, product: Product, rows: slice) -> Tensor:
        input, columns = self.rows[product.input][rows], self.shared[product.columns]
        if product.bias is None:
            return torch.mm(input, columns)
        return torch.addmm(self.shared[product.bias], input, columns)

    def chunk(self) -> int:
        program = self.program
        input = self.rows[program.products[0].input]
        widths = [self.shared[product.columns].shape[1] for product in program.products]
        needs = widths, program.has_gradients, bool(program.sums)
        classes = max(widths)
        hidden = self.shared[program.products[widths.index(classes)].columns].shape[0]
        count = rows_of_sum(self.count)
        chunk = rows_at_a_time(*needs, count, hidden, classes, input.dtype, input.device)
        return max(1, min(chunk, self.count))

    def run(self) -> list[Tensor]:
        program, chunk = self.program, self.chunk()
        input = self.rows[program.products[0].input]
        shapes, dtypes = self.shapes(), program.dtypes
        first = len(program.columns) + len(program.row_products)
        last = first + len(program.sums)
        of_rows = [
            input.new_empty(shape, dtype=dtype)
            for shape, dtype in zip(shapes[:first], dtypes[:first], strict=True)
        ]
        shared = current_sum()
        sums = [
            shared
            if shared is not None and place in shared.places
            else WeightSum(self.count, dtypes[place])
            for place in range(first, last)
        ]
        totals = [
            input.new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
            for shape, dtype in zip(shapes[last:], dtypes[last:], strict=True)
        ]
        wide = sums_in_float32(rows_of_sum(self.count), chunk, input.dtype)
        function = _function(self.text, input.device)
        for start in range(0, self.count, chunk):
            rows = slice(start, min(start + chunk, self.count))
            self._add(function, rows, of_rows, sums, totals, wide=wide)
        for each, shape in zip(sums, shapes[first:last], strict=True):
            each.begin(input, shape)
        return [
            *of_rows,
            *(input.new_empty(0) if each is shared else each.result() for each in sums),
            *(total.to(dtype) for total, dtype in zip(totals, dtypes[last:], strict=True)),
        ]

    def _add(
        self,
        function: Callable[..., Sequence[Tensor]],
        rows: slice,
        results: list[Tensor],
        sums: list[WeightSum],
        totals: list[Tensor],
        *,
        wide: bool,
    ) -> None:
        """Computes a chunk of rows: its own results, and its part of the sums."""
        program = self.program
        products = [self.logits(product, rows) for product in program.products]
        known = [
            columns_of(self.rows[place.index][rows])
            if place.is_of_rows
            else self.shared[place.index]
            for place in program.known
        ]
        made = dict(zip(program.read, function(*products, *known), strict=True))
        del products
        places = iter(results)
        for number in program.columns:
            next(places)[rows] = made[number].expand(rows.stop - rows.start, 1).squeeze(1)
        for each in program.row_products:
            torch.mm(made[each.value], self.shared[each.other], out=next(places)[rows])
        for each_sum, total in zip(program.sums, sums, strict=True):
            of_logits, other = made[each_sum.value], self.rows[each_sum.other][rows]
            pair = (other, of_logits) if each_sum.is_turned else (of_logits, other)
            total.add(pair[0].t(), pair[1], wide=wide)
        for each_total, of_classes in zip(program.totals, totals, strict=True):
            of_classes += made[each_total.value].sum(0, dtype=of_classes.dtype)


@lru_cache(maxsize=128)
def _function(text: str, device: torch.device) -> Callable[..., Sequence[Tensor]]:
    """The steps of a program, compiled."""
    del device  # a function of its own for each: Dynamo counts how often one is compiled again
    # Imported here: eager losses, which import this module too, load no compiler.
    from compile_losses.torch_internals.dynamo import maybe_mark_dynamic

    graph = parsed(text).function()
    compiled = [torch.compile(graph, fullgraph=True)]

    def function(*values: Tensor) -> Sequence[Tensor]:
        for value in values:
            if value.dim() == 2:
                maybe_mark_dynamic(value, 0)
        with BelowViews():
            try:
                found: Sequence[Tensor] = compiled[0](*values)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if compiled[0] is graph:
                    raise
                warnings.warn(f"{_NOT_COMPILED}: {error}", stacklevel=2)
                compiled[0] = graph
                found = graph(*values)
        return found

    return function


#: Then the steps run one by one, in more memory and time.
_NOT_COMPILED = "compile_losses: what reads the logits could not be compiled, and runs op by op"


def _kernel(rows: list[Tensor], shared: list[Tensor], program: str) -> list[Tensor]:
    with autocast_off(rows[0]), torch.no_grad():
        return _Region(program, rows, shared).run()


def _fake(rows: list[Tensor], shared: list[Tensor], program: str) -> list[Tensor]:
    region = _Region(program, rows, shared)
    shapes = zip(region.shapes(), region.program.dtypes, strict=True)
    return [rows[0].new_empty(shape, dtype=dtype) for shape, dtype in shapes]


library.compose(linear_region, _kernel, _fake)
