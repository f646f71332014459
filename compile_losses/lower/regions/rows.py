"""What of a joint graph is a function of each row of a head's logits.

The logits are a product, [rows, classes]. From it the search goes down the graph. A node belongs to
the rows if a rule says that each row of it depends on the same row of the logits alone. It is then
either *logits*, as many numbers as these in the same order, or a *column*, one number of each row.
What such nodes read besides is known: one number, a number of each class, one of each row, or a
tensor of the logits' size, which the rows take along if a rule says how it is made of smaller ones.

No values are tried. A node without a rule lies outside; if it reads logits, they can't be left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.graphs import descendants
from compile_losses.lower.early_sizes import key_of
from compile_losses.lower.known_factors import has_one_element
from compile_losses.lower.node_relations import filled_with, is_turned_matrix, view_of
from compile_losses.op_traits import (
    FILLED,
    MEANS,
    SAME_IF_AS_MANY,
    SCATTERS,
    TOTALS,
    TURNS,
)
from compile_losses.ops.linear.region_program import (
    INDEXED,
    REDUCTIONS,
    REDUCTIONS_OF_ONE,
    SPREAD,
)
from compile_losses.ops.linear.row_function import is_of_elements
from compile_losses.sites import in_words
from compile_losses.torch_internals.ops import OpOverload, named_arguments, schema_of

aten = torch.ops.aten

#: The kinds of what steps read.
LOGITS, COLUMN, CLASSES, NUMBER = "logits", "column", "classes", "number"


@dataclass(frozen=True)
class Read:
    """A node as a step reads it.

    Attributes:
        kind: one of the kinds above.
        shape: what the node is broadcast to before.
        axis: the dimension of the classes, counted from the end; of logits.
    """

    node: Node
    kind: str
    shape: tuple[Any, ...] = field(compare=False)
    axis: int = -1
    #: The shape as a part of a key, which symbols can't be.
    key: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", key_of(self.shape))


@dataclass(frozen=True)
class Step:
    """How a node is computed of a chunk of rows.

    Attributes:
        kind: LOGITS or COLUMN.
        op: None if the node is the first argument, in another shape.
        args, kwargs: the nodes among them as a Read.
        axis: the dimension of the classes, counted from the end; of logits.
    """

    kind: str
    op: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    axis: int = -1

    @property
    def reads(self) -> Iterator[Read]:
        return (a for a in (*self.args, *self.kwargs.values()) if isinstance(a, Read))


@dataclass(frozen=True)
class Head:
    """The product that makes logits, ``input @ columns``, with a bias or without."""

    input: Node
    columns: Node
    bias: Node | None


@dataclass(frozen=True)
class End:
    """A node that leaves the rows: a product of logits' gradients, or their sum over rows.

    Attributes:
        node: the result.
        logits: what it is made of.
        other: the other factor; None of a sum.
        is_sum: whether it is a sum over the rows.
        is_turned: whether ``other`` comes first.
    """

    node: Node
    logits: Node
    other: Node | None
    is_sum: bool
    is_turned: bool = False


class NotOfRowsError(Exception):
    """Why logits can't be left out."""


def head_of(node: Node) -> Head | None:
    """The head that a node is the product of, if it is one."""
    if node.target is aten.mm.default:
        input, columns = node.args
        return Head(input, columns, None)  # type: ignore[arg-type]
    if node.target is aten.addmm.default and not node.kwargs:
        bias, input, columns = node.args
        is_vector = bias.meta["val"].dim() == 1  # type: ignore[union-attr]
        return Head(input, columns, bias) if is_vector else None  # type: ignore[arg-type]
    return None


class Rows:
    """The rows of some products, and what a graph computes of them.

    Args:
        products: logits [rows, classes], calls of ``head_of``.
        opaque: calls of fused ops that will be torch's ops of the logits.

    Attributes:
        steps: how each node of the rows is computed, in the graph's order.
        beside: the same of nodes that are made of no logits but have their size.
        heads: the products among both.
        ends: the nodes that leave the rows.
        wholes: sums and means of all logits, each with the step that makes a column of its logits,
            whose own sum or mean it is.

    Raises:
        NotOfRowsError: something reads logits that is no function of rows.
    """

    def __init__(self, products: Sequence[Node], opaque: Iterable[Node] = ()) -> None:
        self.product, self.opaque = products[0], set(opaque)
        self.rows, self.classes = self.product.meta["val"].shape
        self.steps: dict[Node, Step] = dict.fromkeys(products, Step(LOGITS, None))
        self.beside: dict[Node, Step] = {}
        self.heads: dict[Node, Head] = {}
        self.ends: dict[Node, End] = {}
        self.wholes: dict[Node, Step] = {}
        self.looked_at: set[Node] = set()
        self.made = set(descendants(products))
        for product in products:
            head = head_of(product)
            assert head is not None
            if {head.input, head.columns, head.bias} & {*products, *self.made}:
                raise NotOfRowsError("one product is made of another")
            self.heads[product] = head
        for node in sorted(self.made - {*products}):
            step = self._step(node)
            if step is not None and not self._mixes_rows(step):
                self.steps[node] = step
        for node in list(self.steps):
            if self.kind(node) == LOGITS:
                self._find_ends(node)

    def _mixes_rows(self, step: Step) -> bool:
        """Whether a column is made of columns and of what lies outside, which is made of them."""
        if any(read.kind == LOGITS for read in step.reads):
            return False
        return any(read.node in self.made and self.step(read.node) is None for read in step.reads)

    def kind(self, node: Node) -> str | None:
        step = self.step(node)
        return None if step is None else step.kind

    def step(self, node: Node) -> Step | None:
        return self.steps.get(node) or self.beside.get(node)

    def is_logits(self, value: Any, axis: int = -1) -> bool:
        """Whether a tensor has the logits' size, and the classes along an axis."""
        return (
            isinstance(value, Tensor)
            and value.dim() >= max(2, -axis)
            and _same(value.shape[axis], self.classes)
            and _same(value.numel(), self.rows * self.classes)
        )

    def is_column(self, value: Any) -> bool:
        """Whether a tensor has as many numbers as there are rows."""
        return isinstance(value, Tensor) and _same(value.numel(), self.rows)

    def _step(self, node: Node, axis: int = -1) -> Step | None:
        """How a node is computed; None where no rule says.

        Args:
            axis: that of the classes, if the node reads no logits of which it is known.
        """
        target: Any = node.target
        value = node.meta.get("val")
        sources = (self.step(source) for source in node.all_input_nodes)
        known = next((s.axis for s in sources if s is not None and s.kind == LOGITS), None)
        if known is not None:
            axis = known
        elif isinstance(value, Tensor) and not self.is_column(value):
            axis = next(
                (a for a in range(-1, -value.dim() - 1, -1) if self.is_logits(value, a)), axis
            )
        if node in self.opaque or (target is operator.getitem and node.args[0] in self.opaque):
            return Step(LOGITS, None, axis=axis) if self.is_logits(value, axis) else None
        if not isinstance(value, Tensor) or value.is_complex():
            return None
        if target is operator.getitem:
            return _largest(self, node, value, axis)
        if node.op != "call_function" or not isinstance(target, OpOverload):
            return None
        rule = _RULES.get(target)
        if rule is not None:
            return rule(self, node, value, axis)
        return self._of_elements(node, value, axis) if is_of_elements(target) else None

    def read(self, argument: Any, kind: str, shape: Sequence[Any], axis: int = -1) -> Read | None:
        """How a step reads a node; None if it can't.

        Args:
            kind, shape, axis: of the step's result.
        """
        value = argument.meta.get("val") if isinstance(argument, Node) else None
        if not isinstance(value, Tensor):
            return None
        shape = tuple(shape)
        own = self.look_at(argument, axis)
        if own is None and has_one_element(value):
            return Read(argument, NUMBER, tuple(value.shape))
        if kind == COLUMN:
            fits = own == COLUMN or (own is None and _broadcasts(value.shape, shape))
            return Read(argument, COLUMN, shape) if fits else None
        ones = _with_one(shape, axis)
        if own == COLUMN:
            return Read(argument, COLUMN, ones) if _same_shape(value.shape, ones) else None
        if own == LOGITS or _same_shape(value.shape, shape):
            step = self.step(argument)
            if step is None:
                is_known = argument not in self.made
            else:
                is_known = step.axis == axis and _same_shape(value.shape, shape)
            return Read(argument, LOGITS, shape, axis) if is_known else None
        padded = (*[1] * (len(shape) - value.dim()), *value.shape)
        if _same(padded[axis], 1) and _broadcasts(value.shape, ones):
            return Read(argument, COLUMN, ones)
        if all(_same(size, 1) for size in _with_one(padded, axis)):
            is_of_classes = _same(padded[axis], self.classes)
            return Read(argument, CLASSES, tuple(value.shape)) if is_of_classes else None
        return None

    def look_at(self, node: Any, axis: int = -1) -> str | None:
        """The kind of what a node of the rows reads; None if it is known, or lies outside."""
        if not isinstance(node, Node):
            return None
        value = node.meta.get("val")
        if self.step(node) is None and node not in self.made and isinstance(value, Tensor):
            self._take_along(node, value, axis)
        return self.kind(node)

    def _take_along(self, node: Node, value: Tensor, axis: int) -> None:
        """Finds out how a tensor of the logits' size is made, if a rule says, and a column of such
        tensors."""
        is_logits = self.is_logits(value, axis)
        if node in self.looked_at or not (is_logits or self.is_column(value)):
            return
        self.looked_at.add(node)
        head = head_of(node) if is_logits else None
        if head is not None:
            if axis == -1 and not {head.input, head.columns, head.bias} & self.made:
                self.beside[node], self.heads[node] = Step(LOGITS, None), head
            return
        step = self._step(node, axis)
        if step is None:
            return
        if step.kind == LOGITS or any(self.kind(read.node) is not None for read in step.reads):
            self.beside[node] = step

    def _of_elements(self, node: Node, value: Tensor, axis: int) -> Step | None:
        is_logits = self.is_logits(value, axis)
        named = dict(node.kwargs)
        if node.target is aten._to_copy.default:
            named = {name: v for name, v in named.items() if v is not None}
            if set(named) - {"dtype"}:
                return None
        if not is_logits and not self.is_column(value):
            return None
        kind = LOGITS if is_logits else COLUMN

        def argument(given: Any) -> Any:
            if not isinstance(given, Node):
                return given
            read = self.read(given, kind, value.shape, axis)
            return _NONE if read is None else read

        args = [argument(given) for given in node.args]
        kwargs = {name: argument(given) for name, given in named.items()}
        if any(given is _NONE for given in (*args, *kwargs.values())):
            return None
        step = Step(kind, node.target, tuple(args), kwargs, axis)
        kinds = {read.kind for read in step.reads}
        # A step makes logits of what is broadcast to them.
        is_whole = LOGITS in kinds or {CLASSES, COLUMN} <= kinds
        return step if is_whole or not is_logits else None

    def _find_ends(self, logits: Node) -> None:
        """Notes what leaves the rows from logits.

        Raises:
            NotOfRowsError: a reader is neither of the rows, nor such an end.
        """
        for user in logits.users:
            if user in self.steps or user in self.opaque:
                continue
            if user.target in EXTREMES_OF_TWO and all(each in self.steps for each in user.users):
                continue
            whole = self._whole(logits, user)
            if whole is not None:
                self.wholes[user] = whole
                continue
            end = self._end(logits, user)
            if end is None:
                what = (
                    "they are returned" if user.op == "output" else f"{in_words(user)} reads them"
                )
                raise NotOfRowsError(what)
            self.ends[user] = end

    def _whole(self, logits: Node, user: Node) -> Step | None:
        """How the column is computed whose sum or mean is a number of all logits; None if a reader
        is no such number."""
        op = next((ops[-1] for ops in (TOTALS, MEANS) if user.target in ops), None)
        if op is None or not has_one_element(user.meta["val"]):
            return None
        result, given = user.meta["val"].dtype, named_arguments(user).get("dtype")
        if result in (torch.float16, torch.bfloat16):
            # Torch adds up in float32: the numbers of the rows may be larger than their sum.
            if given not in (None, logits.meta["val"].dtype):
                return None
            given = torch.float32
        options = {"keepdim": True, "dtype": given}
        return Step(COLUMN, op, (self.as_it_is(logits), [1]), options)

    def as_it_is(self, node: Node) -> Read:
        """How a node of the rows is read that is not broadcast."""
        step = self.step(node)
        assert step is not None
        return Read(node, step.kind, tuple(node.meta["val"].shape), step.axis)

    def _end(self, logits: Node, user: Node) -> End | None:
        """The end that a reader of logits is; None if it is none."""
        rank, axis = logits.meta["val"].dim(), self.steps[logits].axis
        if user.target is aten.sum.dim_IntList and not user.kwargs:
            dims = {dim % rank for dim in named_arguments(user)["dim"] or range(rank)}
            is_total = dims == set(range(rank)) - {axis % rank}
            return End(user, logits, None, True) if is_total else None
        if user.target is not aten.mm.default or rank != 2:
            return None
        left, right = user.args
        if left is logits:
            return self._product(user, logits, right, is_sum=axis == -2)
        is_turned = axis == -1 and isinstance(left, Node) and is_turned_matrix(left)
        if not is_turned:
            return None
        return self._product(user, logits, left.args[0], is_sum=True, is_turned=True)  # type: ignore[union-attr]

    def _product(
        self, node: Node, logits: Node, other: Any, *, is_sum: bool, is_turned: bool = False
    ) -> End | None:
        if not isinstance(other, Node) or other in self.made or other.meta["val"].dim() != 2:
            return None
        return End(node, logits, other, is_sum, is_turned)


def _with_one(shape: Sequence[Any], axis: int) -> tuple[Any, ...]:
    """A shape with one along an axis."""
    place = axis % len(shape)
    return (*shape[:place], 1, *shape[place + 1 :])


#: An argument that no step can read.
_NONE: Any = object()

_Rule: TypeAlias = Callable[[Rows, Node, Tensor, int], Step | None]


def _in_another_shape(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """The same numbers in the same order; or a column's for all classes."""
    source = node.args[0]
    if not isinstance(source, Node):
        return None
    kind = rows.look_at(source, axis)
    of_product = Read(rows.product, LOGITS, ())
    spreads = node.target is aten.expand.default and rows.is_logits(value, axis)
    if kind is None:
        spread = rows.read(source, LOGITS, value.shape, axis) if spreads else None
        if spread is None or spread.kind == LOGITS:
            return None
        return Step(LOGITS, SPREAD, (spread, of_product), axis=axis)
    read = rows.as_it_is(source)
    if kind == LOGITS:
        is_same = _same_shape(value.shape, read.shape)
        new = read.axis if is_same else _axis_after(read, value.shape)
        return None if new is None else Step(LOGITS, None, (read,), axis=new)
    if rows.is_column(value):
        return Step(COLUMN, None, (read,))
    if spreads and _same_shape(read.shape, _with_one(value.shape, axis)):
        return Step(LOGITS, SPREAD, (read, of_product), axis=axis)
    return None


def _axis_after(read: Read, after: Sequence[Any]) -> int | None:
    """Where the classes are in another shape of the same numbers; None if they are cut, or merged
    with rows."""
    place = read.axis % len(read.shape)
    first, classes, last = read.shape[:place], read.shape[place], read.shape[place + 1 :]
    for new, size in enumerate(after):
        sides = _same(prod(first), prod(after[:new])), _same(prod(last), prod(after[new + 1 :]))
        if _same(size, classes) and all(sides):
            return new - len(after)
    return None


def _turned(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """Logits whose classes move, while the rows stay in their order."""
    source = node.args[0]
    if not isinstance(source, Node) or rows.look_at(source, axis) != LOGITS:
        return None
    read, order = rows.as_it_is(source), view_of(node).order
    place = read.axis % len(order)
    others = [dim for dim in order if dim != place]
    if others != sorted(others):
        return None
    return Step(LOGITS, None, (read,), axis=order.index(place) - len(order))


def _scattered(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """A column that fills all of what it is put into."""
    source = node.args[1]
    if isinstance(source, Node) and rows.look_at(source) == COLUMN and rows.is_column(value):
        return Step(COLUMN, None, (rows.as_it_is(source),))
    return None


def _filled(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    number = filled_with(node)
    if number is None or not rows.is_logits(value, axis):
        return None
    like = Read(rows.product, LOGITS, ())
    dtype = {"dtype": value.dtype}
    return Step(LOGITS, aten.full_like.default, (like, number), dtype, axis)


def _reduced(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """A number of each row, of all classes."""
    named = named_arguments(node)
    names = [argument.name for argument in schema_of(node.target).arguments]
    source, dim = named.pop(names[0]), named.pop("dim")
    named.pop("keepdim", None)
    if not isinstance(source, Node) or any(isinstance(v, Node) for v in named.values()):
        return None
    of_source = source.meta["val"]
    dims = dim if isinstance(dim, list | tuple) else [dim]
    if not rows.is_column(value) or len(dims) != 1 or dims[0] is None:
        return None
    place = dims[0] % of_source.dim()
    kind = rows.look_at(source, place - of_source.dim())
    if kind is None:
        return None
    read = rows.as_it_is(source)
    if kind == COLUMN:
        is_one = node.target in _OF_ONE_NUMBER and _same(of_source.shape[place], 1)
        is_plain = named.get("dtype") in (None, of_source.dtype) and value.dtype == of_source.dtype
        return Step(COLUMN, None, (read,)) if is_one and is_plain else None
    if place != read.axis % of_source.dim():
        return None
    options = {name: v for name, v in named.items() if v is not None}
    which: Any = [1] if node.target in REDUCTIONS else 1
    return Step(COLUMN, node.target, (read, which), {**options, "keepdim": True})


#: Of one number they are that number.
_OF_ONE_NUMBER = (*(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default),)


def _largest(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """The largest logit of each row, or its place: one of two results."""
    both: Any
    index: Any
    both, index = node.args
    ops = EXTREMES_OF_TWO.get(both.target)
    if ops is None:
        return None
    named = named_arguments(both)
    source = named["self"]
    if rows.look_at(source, axis) != LOGITS or not rows.is_column(value):
        return None
    read, rank = rows.as_it_is(source), source.meta["val"].dim()
    if named["dim"] % rank != read.axis % rank:
        return None
    which: Any = [1] if index == 0 else 1
    return Step(COLUMN, ops[index], (read, which), {"keepdim": True})


#: What the results are of the ops that return the largest or smallest numbers and their places.
EXTREMES_OF_TWO: dict[Any, tuple[Any, Any]] = {
    aten.max.dim: (aten.amax.default, aten.argmax.default),
    aten.min.dim: (aten.amin.default, aten.argmin.default),
}


def _indexed(rows: Rows, node: Node, value: Tensor, axis: int) -> Step | None:
    """One class of each row is read, or written."""
    base: Any
    dim: Any
    base, dim, index, *rest = node.args
    if node.kwargs or not isinstance(index, Node):
        return None
    shape = base.meta["val"].shape
    axis = dim % len(shape) - len(shape)
    if not rows.is_logits(base.meta["val"], axis):
        return None
    of_base = rows.read(base, LOGITS, shape, axis)
    ones = _with_one(shape, axis)
    if of_base is None or not _same_shape(index.meta["val"].shape, ones):
        return None
    of_index = rows.read(index, COLUMN, ones)
    values = [_of_index(rows, each, ones) for each in rest]
    if of_index is None or of_index.kind == NUMBER or any(each is _NONE for each in values):
        return None
    kind = COLUMN if node.target is aten.gather.default else LOGITS
    return Step(kind, node.target, (of_base, 1, of_index, *values), axis=axis)


def _of_index(rows: Rows, argument: Any, ones: Sequence[Any]) -> Any:
    """What is written to the class of each row: a number, or a column of the index's shape."""
    if not isinstance(argument, Node):
        return argument
    if not _same_shape(argument.meta["val"].shape, ones):
        return _NONE
    read = rows.read(argument, COLUMN, ones)
    return read if read is not None and read.kind == COLUMN else _NONE


_RULES: dict[Any, _Rule] = {
    **dict.fromkeys((*FILLED, aten.full.default, aten.zeros.default, aten.ones.default), _filled),
    **dict.fromkeys(SAME_IF_AS_MANY, _in_another_shape),
    **dict.fromkeys(TURNS, _turned),
    **dict.fromkeys(SCATTERS, _scattered),
    **dict.fromkeys((*REDUCTIONS, *REDUCTIONS_OF_ONE), _reduced),
    **dict.fromkeys(INDEXED, _indexed),
}


def _same(one: Any, other: Any) -> bool:
    return bool(statically_known_true(one == other))


def _same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(_same, one, other))


def _broadcasts(shape: Sequence[Any], to: Sequence[Any]) -> bool:
    """Whether a shape is broadcast to another one, whose numbers are at least as many."""
    if len(shape) > len(to):
        return False
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return all(_same(one, 1) or _same(one, other) for one, other in pairs)
