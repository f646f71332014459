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
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses.graphs import descendants
from compile_losses.lower.known_factors import has_one_element
from compile_losses.lower.node_relations import is_turned_matrix
from compile_losses.lower.regions.rules import EXTREMES_OF_TWO, RULES, largest_of_two
from compile_losses.lower.regions.steps import (
    CLASSES,
    COLUMN,
    LOGITS,
    NONE,
    NUMBER,
    End,
    Head,
    NotOfRowsError,
    Read,
    Step,
    broadcasts,
    head_of,
    same,
    same_shape,
    with_one,
)
from compile_losses.op_traits import MEANS, TOTALS
from compile_losses.ops.linear.row_function import is_of_elements
from compile_losses.sites import in_words
from compile_losses.torch_internals.ops import OpOverload, named_arguments

aten = torch.ops.aten


class Rows:
    """The rows of some products, and what a graph computes of them.

    Args:
        products: logits [rows, classes], calls of ``head_of``.
        opaque: calls of fused ops that will be torch's ops of the logits.

    Attributes:
        sizes: how many classes logits have, each number with a node that has so many. Those of a
            product are its own; a part of them that an index picks is a number, too.
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
        self.rows = self.product.meta["val"].shape[0]
        self.sizes: dict[int, Node | None] = {}
        for product in products:
            self.sizes.setdefault(product.meta["val"].shape[1], product)
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
            and isinstance(value.shape[axis], int)
            and value.shape[axis] in self.sizes
            and same(value.numel(), self.rows * value.shape[axis])
        )

    def of_size(self, classes: Any) -> Read | None:
        """Logits of so many classes, for what has their size; None if there are none."""
        node = self.sizes.get(classes)
        return None if node is None else Read(node, LOGITS, ())

    def look_at_whole(self, node: Any, axis: int) -> str | None:
        """The kind of what a part of the classes is picked of, which may be more than any logits
        have so far."""
        value = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(value, Tensor) or value.dim() < max(2, -axis):
            return None
        classes = value.shape[axis]
        is_new = isinstance(classes, int) and classes > 1 and classes not in self.sizes
        if is_new:
            self.sizes[classes] = None
        kind = self.look_at(node, axis)
        if is_new and self.sizes[classes] is None:
            del self.sizes[classes]
        return kind

    def is_column(self, value: Any) -> bool:
        """Whether a tensor has as many numbers as there are rows."""
        return isinstance(value, Tensor) and same(value.numel(), self.rows)

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
            return largest_of_two(self, node, value, axis)
        if node.op != "call_function" or not isinstance(target, OpOverload):
            return None
        rule = RULES.get(target)
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
            fits = own == COLUMN or (own is None and broadcasts(value.shape, shape))
            return Read(argument, COLUMN, shape) if fits else None
        ones = with_one(shape, axis)
        if own == COLUMN:
            return Read(argument, COLUMN, ones) if same_shape(value.shape, ones) else None
        if own == LOGITS or same_shape(value.shape, shape):
            step = self.step(argument)
            if step is None:
                is_known = argument not in self.made
            else:
                is_known = step.axis == axis and same_shape(value.shape, shape)
            return Read(argument, LOGITS, shape, axis) if is_known else None
        padded = (*[1] * (len(shape) - value.dim()), *value.shape)
        if same(padded[axis], 1) and broadcasts(value.shape, ones):
            return Read(argument, COLUMN, ones)
        if all(same(size, 1) for size in with_one(padded, axis)):
            is_of_classes = same(padded[axis], shape[axis])
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
                if self.sizes[value.shape[-1]] is None:
                    self.sizes[value.shape[-1]] = node
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
            return NONE if read is None else read

        args = [argument(given) for given in node.args]
        kwargs = {name: argument(given) for name, given in named.items()}
        if any(given is NONE for given in (*args, *kwargs.values())):
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
