"""Which rows of a head count in a joint graph.

The numbers of a row count if something of them reaches what the graph returns. They do not if the
target of the row is ignored, or if all that reads them multiplies them by zero, or chooses another
number, as with a mask::

    losses = linear_cross_entropy_forward(...)
    masked = losses * mask
    loss = masked.sum() / mask.sum()

Such a row has a gradient of zero. This is not taken for granted: the gradients that the graph gives
to the numbers are looked through in the same way.

A condition says of each row, by tensors that are known before the head, whether it may count. It
holds for more rows than do count where an op between has no rule.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.device_constants import is_worth_waiting
from compile_losses.graphs import (
    ancestors,
    annotate,
    descendants,
    emit,
    give,
    is_movable,
    later_sources,
    move_before,
)
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import hint_of
from compile_losses.lower.early_sizes import is_symbolic, key_of
from compile_losses.lower.fused_calls import fused_call
from compile_losses.lower.held_logits import grad_outputs_of
from compile_losses.lower.known_factors import has_one_element
from compile_losses.lower.linear_losses import COUNTS, differentiated
from compile_losses.lower.node_relations import filled_with
from compile_losses.lower.row_gradients import as_broadcast, as_rows, values_of
from compile_losses.op_traits import (
    CASTS,
    PRODUCTS,
    QUOTIENTS,
    SAME_IF_AS_MANY,
    SCATTERS,
    SUMS,
    is_pointwise,
)
from compile_losses.ops.checks import NOTHING_IGNORED
from compile_losses.ops.linear.row_function import SUM
from compile_losses.ops.linear.row_statistics import NLL
from compile_losses.sites import shorten, source_of
from compile_losses.torch_internals.inductor import config
from compile_losses.torch_internals.ops import named_arguments

aten = torch.ops.aten
fused = torch.ops.fused

_CONJUNCTIONS = (*PRODUCTS, aten.bitwise_and.Tensor, aten.logical_and.default)
#: Ops whose result is zero if their only tensor is.
_OF_ONE = (*CASTS, aten.neg.default)
#: A mask is computed at the front of the graph if that takes no more ops, and if these read and
#: write no tensor of more numbers of each row.
_MOST_OPS, _MOST_NUMBERS = 64, 16


@dataclass(frozen=True)
class Shape:
    """A shape that can be a key, as a symbol can't.

    Attributes:
        key: its sizes, a symbol's as an expression.
    """

    key: tuple[Any, ...]
    sizes: tuple[Any, ...] = field(compare=False, repr=False)

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(key_of(tensor.shape), tuple(tensor.shape))

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True)
class Nonzero:
    """Where a known tensor is not zero, or is.

    Attributes:
        shape: that of the tensor beside it, to which it is broadcast.
        is_zero: whether it is meant where it is zero.
    """

    node: Node
    shape: Shape
    is_zero: bool = False


@dataclass(frozen=True)
class Differs:
    """Where a target is another class index than the one that is ignored."""

    target: Node
    ignore_index: int


@dataclass(frozen=True)
class Joined:
    """Where all of some conditions hold, or any of them."""

    conditions: frozenset[Condition]
    by_and: bool


Condition: TypeAlias = "bool | Nonzero | Differs | Joined"


def _both(*conditions: Condition) -> Condition:
    return _joined(conditions, by_and=True)


def _either(*conditions: Condition) -> Condition:
    return _joined(conditions, by_and=False)


def _joined(conditions: Sequence[Condition], *, by_and: bool) -> Condition:
    """Without what changes nothing: True of those that all hold, False of those of which any."""
    found: set[Condition] = set()
    for each in conditions:
        if each is (not by_and):
            return each
        if isinstance(each, Joined) and each.by_and == by_and:
            found |= each.conditions
        elif each is not by_and:
            found.add(each)
    if not found:
        return by_and
    # A or (A and B) is A, and so is A and (A or B).
    found = {c for c in found if not (isinstance(c, Joined) and c.conditions & (found - {c}))}
    return next(iter(found)) if len(found) == 1 else Joined(frozenset(found), by_and)


def count_rows(graph: AtenGraph) -> None:
    """Has the rows counted that count for a head, at the front of the graph if that can be done.

    Otherwise a cross entropy counts the targets that are not ignored itself, and a GPU's host waits
    for all that comes before; others compute all rows.
    """
    for losses, backwards in differentiated(graph):
        if len(backwards) == 1 and _is_worthwhile(losses):
            search = _Search(losses, backwards[0], graph.backward)
            _count(search.condition(), [losses, *backwards], search)
    for node, name, part in graph.calls:
        if (name, part) == ("linear_cross_entropy", "with_grad") and _is_worthwhile(node):
            _count(_target_differs(node), [node], None)


def _count(condition: Condition, calls: Sequence[Node], search: _Search | None) -> None:
    """Gives calls the rows that count, if there is a condition and it can be computed before."""
    if isinstance(condition, bool):
        return
    first, *_ = calls
    counted = _Emission(first, search).run(condition)
    if counted is None:
        return
    for call in calls:
        give(call, counted=counted)
    annotate(counted, COUNTS, _in_words(condition))


def _in_words(condition: Condition) -> str:
    """What a condition reads, as far as a user knows it."""
    if isinstance(condition, Joined):
        word = " and " if condition.by_and else " or "
        return word.join(dict.fromkeys(map(_in_words, sorted(condition.conditions, key=repr))))
    if isinstance(condition, Differs):
        return f"a target that is not {condition.ignore_index}"
    assert isinstance(condition, Nonzero)
    file, line = source_of(condition.node)
    where = f" ({shorten(file)}:{line})" if line else ""
    return f"{'a zero' if condition.is_zero else 'no zero'} in a mask{where}"


def _target_differs(node: Node) -> Condition:
    named = named_arguments(node)
    return _differs(named.get("target"), named.get("ignore_index"))


def _differs(target: Any, ignored: Any) -> Condition:
    if not isinstance(target, Node) or type(ignored) is not int or ignored <= NOTHING_IGNORED:
        return True
    return Differs(target, ignored)


def _is_worthwhile(node: Node) -> bool:
    """Whether the products take far longer than it takes to count, and the number of rows may be
    another one in each run."""
    if config.triton.cudagraphs:
        return False
    named = named_arguments(node)
    rows = named["input"].meta["val"].shape[0]
    weight: Tensor = named["linear_weight"].meta["val"]
    return is_worth_waiting(weight.device, 6 * hint_of(weight.numel()) * hint_of(rows))


class _Search:
    """Looks for the rows that count.

    Attributes:
        late: what depends on the numbers of the rows.
    """

    def __init__(self, losses: Node, backward_call: Node, backward: set[Node]) -> None:
        self.losses, self.backward_call, self.backward = losses, backward_call, backward
        values = values_of(losses)
        self.rows = values[-1].shape[0]
        several = [v.shape[1] for v in values if v.dim() == 2]
        self.columns = {1, *(columns for columns in several if type(columns) is int)}
        self.late = set(descendants([losses]))
        self.counts: dict[Node, Condition] = {}
        self.nonzero: dict[tuple[Node, Shape], Condition] = {}

    def condition(self) -> Condition:
        """Which rows may count."""
        for node in reversed(list(self.losses.graph.nodes)):
            if node in self.late and node is not self.losses:
                self.counts[node] = _either(*(self._reads(user, node) for user in node.users))
        differs = _target_differs(self.losses)
        found = [self._of_gradient(each) for each in grad_outputs_of(self.backward_call)]
        if not isinstance(self.losses.meta["val"], tuple | list):
            found += [self._reads(user, self.losses) for user in self.losses.users]
            return _both(differs, _either(*found))
        for place, item in ((user.args[1], user) for user in self.losses.users):
            found.append(_both(differs, self.counts[item]) if place == NLL else self.counts[item])
        return _either(*found)

    def _of_gradient(self, gradient: Node | None) -> Condition:
        if gradient is None:
            return False
        shape = self._shape(gradient)
        return True if shape is None else self._nonzero(gradient, shape)

    def _reads(self, user: Node, node: Node) -> Condition:
        """For which rows a reader lets the numbers of the row reach what the graph returns."""
        if user is self.backward_call:
            return False  # the gradients that it is given are asked
        if user.op == "output":
            return True
        beyond, target = self.counts[user], user.target
        shape, own = self._shape(user), self._shape(node)
        if shape is None or own is None:
            return True
        if target is SUM and not user.kwargs and shape.key[-1:] != own.key[-1:]:
            return beyond if user.args[1] in ([-1], [len(own) - 1]) else True
        if not self._is_beside(own, shape):
            return True
        if target in _CONJUNCTIONS and not user.kwargs:
            others = [a for a in user.args[:2] if a is not node]
            return _both(beyond, *(self._nonzero(other, shape) for other in others))
        if target is aten.where.self:
            chosen, one, other = user.args
            if node is chosen:
                return beyond
            holds = self._nonzero(chosen, shape) if node is one else False
            fails = self._zero(chosen, shape) if node is other else False
            return _both(beyond, _either(holds, fails))
        if target in SCATTERS and self._is_whole(user):
            return beyond if node is user.args[1] else False
        if is_pointwise(target) or target in (*CASTS, *SAME_IF_AS_MANY):
            return beyond
        return True

    def _nonzero(self, value: Any, shape: Shape) -> Condition:
        """Where a value may be other than zero.

        Args:
            shape: that it is broadcast to.
        """
        if not isinstance(value, Node):
            return not isinstance(value, int | float) or value != 0
        key = value, shape
        if key not in self.nonzero:
            self.nonzero[key] = True  # what is too deep below
            self.nonzero[key] = self._found_nonzero(value, shape)
        return self.nonzero[key]

    def _found_nonzero(self, node: Node, shape: Shape) -> Condition:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return True
        constant = filled_with(node)
        if constant is not None:
            return constant != 0
        if node not in self.late and node not in self.backward:
            return True if has_one_element(value) else Nonzero(node, shape)
        if Shape.of(value) != shape:
            return True
        target, args = node.target, node.args
        if target in _CONJUNCTIONS:
            return _both(*(self._nonzero(argument, shape) for argument in args[:2]))
        if target in QUOTIENTS or target in _OF_ONE:
            return self._nonzero(args[0], shape)
        if target in SUMS:
            return _either(*(self._nonzero(argument, shape) for argument in args[:2]))
        if target is aten.where.self:
            chosen, one, other = args
            return _either(
                _both(self._nonzero(chosen, shape), self._nonzero(one, shape)),
                _both(self._zero(chosen, shape), self._nonzero(other, shape)),
            )
        if target in SCATTERS and self._is_whole(node):
            target, args = SAME_IF_AS_MANY[0], args[1:]
        if target in SAME_IF_AS_MANY and isinstance(args[0], Node):
            before = self._shape(args[0])
            if before is not None and self.columns_of(before) == self.columns_of(shape):
                return self._nonzero(args[0], before)
        return True

    def _is_whole(self, scatter: Node) -> bool:
        """Whether what is put into zeros has as many numbers as these, so that none is left."""
        whole, part = self._shape(scatter), scatter.args[1]
        own = self._shape(part) if isinstance(part, Node) else None
        both = whole is not None and own is not None
        return both and self.columns_of(whole) == self.columns_of(own)  # type: ignore[arg-type]

    def _zero(self, chosen: Any, shape: Shape) -> Condition:
        """Where a condition of the graph may not hold."""
        holds = self._nonzero(chosen, shape)
        is_exact = isinstance(holds, Nonzero) and holds.node is chosen
        return Nonzero(chosen, shape, is_zero=True) if is_exact else True

    def _is_beside(self, own: Shape, shape: Shape) -> bool:
        """Whether the numbers of each row stay with their row if a tensor is broadcast, or viewed.

        Args:
            own: the tensor's shape.
            shape: that of the result.
        """
        one, columns = self.columns_of(own), self.columns_of(shape)
        return one == columns or (one == 1 and own.key[:-1] == shape.key[:-1])

    def _shape(self, node: Node) -> Shape | None:
        """That of a tensor which has numbers of each row."""
        value = node.meta.get("val")
        shape = Shape.of(value) if isinstance(value, Tensor) else None
        return None if shape is None or self.columns_of(shape) is None else shape

    def columns_of(self, shape: Shape) -> int | None:
        """How many numbers of each row a tensor of a shape has; None if it is no such tensor."""
        count = reduce(operator.mul, shape.sizes, 1)
        for columns in self.columns:
            if statically_known_true(count == self.rows * columns) and (
                columns == 1 or shape.key[-1] == columns
            ):
                return columns
        return None


class _Emission:
    """Puts a condition into the graph, as early as what it reads is known."""

    def __init__(self, losses: Node, search: _Search | None) -> None:
        self.losses, self.search = losses, search

    def run(self, condition: Condition) -> Node | None:
        """The node that counts; None if what the condition reads can't be computed before."""
        read = list(_read(condition))
        place = _front(self.losses, read) or self.losses
        if not move_before(read, place):
            return None
        self.place = place
        mask = self._mask(condition)
        return mask and emit(place, fused.counted_rows.default, (mask,), like=self.losses)

    def _mask(self, condition: Condition) -> Node | None:
        """A node that holds bool [rows]."""
        if isinstance(condition, Joined):
            masks = [self._mask(each) for each in sorted(condition.conditions, key=repr)]
            op = aten.bitwise_and.Tensor if condition.by_and else aten.bitwise_or.Tensor
            if any(mask is None for mask in masks):
                return None
            return reduce(lambda one, other: self._emit(op, one, other), masks)
        if isinstance(condition, Differs):
            return self._emit(aten.ne.Scalar, condition.target, condition.ignore_index)
        assert isinstance(condition, Nonzero)
        node, shape = condition.node, condition.shape
        is_bool = node.meta["val"].dtype == torch.bool
        if condition.is_zero:
            node = self._emit(aten.eq.Scalar, node, 0)
        elif not is_bool:
            node = self._emit(aten.ne.Scalar, node, 0)
        assert self.search is not None
        columns = self.search.columns_of(shape)
        assert columns is not None
        whole = as_broadcast(node, shape.sizes, self.place, self.losses)
        if whole is None:
            return None
        rows = as_rows(whole, columns, self.place, self.losses)
        return rows if columns == 1 else self._emit(aten.any.dim, rows, 1)

    def _emit(self, op: Any, *args: Any) -> Node:
        return emit(self.place, op, args, like=self.losses)


def _read(condition: Condition) -> list[Node]:
    """The nodes that a condition reads."""
    if isinstance(condition, Joined):
        nodes = (node for each in condition.conditions for node in _read(each))
        return list(dict.fromkeys(nodes))
    if isinstance(condition, Differs):
        return [condition.target]
    return [condition.node] if isinstance(condition, Nonzero) else []


def _front(losses: Node, read: Sequence[Node]) -> Node | None:
    """The first node that computes something else with tensors, if a mask can be computed before it
    at little cost: not of what a model's layers make."""
    made = set(ancestors(read))
    first = next(
        node
        for node in losses.graph.nodes
        if node.op == "call_function" and node not in made and not is_symbolic(node)
    )
    late = later_sources(read, first)
    rows = hint_of(values_of(losses)[-1].shape[0])
    cheap = len(late) <= _MOST_OPS and all(is_movable(n) and _is_cheap(n, rows) for n in late)
    return first if cheap else None


def _is_cheap(node: Node, rows: int) -> bool:
    """Whether a node reads and writes few numbers of each row."""
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    sizes = [hint_of(value.numel()) for value in values if isinstance(value, Tensor)]
    return fused_call(node) is None and max(sizes, default=0) <= _MOST_NUMBERS * rows
