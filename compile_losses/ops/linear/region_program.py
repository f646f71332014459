"""What is computed of each row of products, as a text.

A region is a head with all that reads its logits row by row. Its text, JSON, says in this order:

``products``      the logits, [rows, classes]: a tensor of rows times a shared one, and a shared one
                  that is added or null
``known``         the other tensors that the steps read, each of rows or shared
``steps``         see :mod:`compile_losses.ops.linear.steps`; the values before the first step are
                  the products and what is known
``columns``       values [rows, 1] that are results
``row_products``  values [rows, classes] whose product with a shared tensor is a result
``sums``          values [rows, classes] whose transposed product with a tensor of rows is a result;
                  or, if it is turned, that tensor's transposed product with the value
``totals``        values [rows, classes] whose sum over the rows is a result

In a step a number of each row is [rows, 1] and a number of each class [classes], so that both are
broadcast against logits. No step mixes rows: any rows make the same numbers as all rows together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from compile_losses.graphs import straight_line
from compile_losses.op_traits import FILLED
from compile_losses.ops.linear.row_function import is_of_elements
from compile_losses.ops.linear.steps import Operand, Step, decode, encode, given, name_of

aten = torch.ops.aten

#: Reductions of the classes of a row. Their second argument is ``[1]``, or 1 for those that take
#: one dimension, and they keep it.
REDUCTIONS = (
    *(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default),
    *(aten.logsumexp.default, aten.var.correction, aten.any.dims, aten.all.dims),
)
REDUCTIONS_OF_ONE = (
    *(aten.argmax.default, aten.argmin.default, aten.any.dim, aten.all.dim, aten.prod.dim_int),
)
#: Ops that read or write classes by their index, along dimension 1.
INDEXED = (*(aten.gather.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default),)
#: Ops that pick classes, the same of each row, along dimension 1.
PICKS = (aten.index_select.default, aten.slice.Tensor)
#: The same by an index in a list: ``[None, index]`` of all rows' classes. ``[index]`` says what a
#: table, one number of each class, has of the class of each row.
BY_LISTS = (aten.index.Tensor, aten.index_put.default)
#: What is read with all classes of each row.
SPREAD = aten.expand_as.default


@dataclass(frozen=True)
class Place:
    """A tensor that an op is given: one of rows, or one that all rows share."""

    is_of_rows: bool
    index: int


@dataclass(frozen=True)
class Product:
    """The logits ``rows[input] @ shared[columns]``, with ``shared[bias]`` added if it has one."""

    input: int
    columns: int
    bias: int | None


@dataclass(frozen=True)
class RowProduct:
    """``value @ shared[other]``, [rows, width]."""

    value: int
    other: int


@dataclass(frozen=True)
class Sum:
    """``value.T @ rows[other]``, or ``rows[other].T @ value`` if it is turned.

    Attributes:
        classes: how many the value has.
    """

    value: int
    other: int
    is_turned: bool
    classes: int


@dataclass(frozen=True)
class Total:
    """The sum over rows of a value that has so many classes."""

    value: int
    classes: int


@dataclass(frozen=True)
class Program:
    """See the module.

    Attributes:
        columns: the numbers of the values.
        dtypes: of all results, in their order: columns, row_products, sums, totals.
    """

    products: tuple[Product, ...]
    known: tuple[Place, ...]
    steps: tuple[Step, ...]
    columns: tuple[int, ...]
    row_products: tuple[RowProduct, ...]
    sums: tuple[Sum, ...]
    totals: tuple[Total, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def read(self) -> list[int]:
        """The values that results are made of, each once."""
        ends: tuple[RowProduct | Sum | Total, ...] = (*self.row_products, *self.sums, *self.totals)
        return list(dict.fromkeys((*self.columns, *(end.value for end in ends))))

    @property
    def has_gradients(self) -> bool:
        return bool(self.row_products or self.sums or self.totals)

    def text(self) -> str:
        """
        Raises:
            TypeError: a step is none, or has an argument that has no text.
        """
        plain = {**asdict(self), "steps": [encode(step, is_step) for step in self.steps]}
        plain["dtypes"] = list(map(name_of, self.dtypes))
        return json.dumps(plain)

    def function(self) -> GraphModule:
        """The steps: a function of products and what is known, of the values that are read."""
        return straight_line(len(self.products) + len(self.known), self.steps, given, self.read)


def is_step(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a step computes each row for itself."""
    if op in BY_LISTS:
        picks: Any = args[1] if len(args) > 1 else None
        is_list = isinstance(picks, list) and isinstance(picks[-1], Operand)
        return is_list and picks[:-1] in ([], [None])
    if is_of_elements(op) or op in FILLED:
        return not any(type(argument) is list for argument in (*args, *kwargs.values()))
    if len(args) < 2 or not isinstance(args[0], Operand):
        return False
    if op in REDUCTIONS or op in REDUCTIONS_OF_ONE:
        return args[1] == ([1] if op in REDUCTIONS else 1) and kwargs.get("keepdim") is True
    if op in INDEXED:
        return args[1] == 1 and isinstance(args[2], Operand)
    if op in PICKS:
        return args[1] == 1
    if op is aten.slice_scatter.default:
        return isinstance(args[1], Operand) and args[2] == 1
    if op is aten.index_add.default:
        return args[1] == 1 and all(isinstance(each, Operand) for each in args[2:])
    return op is SPREAD and isinstance(args[1], Operand)


@lru_cache(maxsize=128)
def parsed(text: str) -> Program:
    """The program of a text."""
    written = json.loads(text)

    def each(name: str, kind: Callable[..., Any]) -> tuple[Any, ...]:
        return tuple(kind(**fields) for fields in written[name])

    return Program(
        each("products", Product),
        each("known", Place),
        tuple(decode(step, is_step, "program") for step in written["steps"]),
        tuple(written["columns"]),
        each("row_products", RowProduct),
        each("sums", Sum),
        each("totals", Total),
        tuple(getattr(torch, name) for name in written["dtypes"]),
    )


def columns_of(tensor: Tensor) -> Tensor:
    """One number of each row, [rows], as steps read it."""
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
