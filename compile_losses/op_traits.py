"""What ATen's ops are: the one table that recognition, lazy logits and the passes on lower graphs
read.

An op stands in each set whose trait it has. The rules at the end say where a dimension of a tensor
is after a view. A set that belongs to one decision of one module stands in that module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

from compile_losses.torch_internals.ops import OpOverload, schema_of

aten = torch.ops.aten

#: What casts are in traced graphs.
CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
#: Without a rounding mode, which other overloads have.
QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
#: Ops that only scale.
SCALINGS = (*PRODUCTS, *QUOTIENTS, aten.neg.default)
#: Their result may have a multiple of the second operand.
SUMS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
#: Their result is filled with one number, and has the shape of their argument.
FILLED = (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)
#: What a gradient of some elements is put into: zeros around them.
SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default)

#: Reductions of all dimensions, and of those that are named.
TOTALS = (aten.sum.default, aten.sum.dim_IntList)
MEANS = (aten.mean.default, aten.mean.dim)
#: The largest and smallest numbers along a dimension, or their places.
EXTREMES = (
    *(aten.argmax.default, aten.argmin.default, aten.amax.default, aten.amin.default),
    *(aten.max.dim, aten.min.dim, aten.topk.default),
)

#: The same tensor.
ALIASES = (aten.alias.default, aten.detach.default)
#: The same numbers in the same order, in another shape.
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
#: Dimensions of one are added or left out.
_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
ONES = (aten.unsqueeze.default, *_SQUEEZES)
#: Dimensions in another order.
TURNS = (aten.permute.default, aten.transpose.int, aten.t.default)
#: Some places along a dimension.
PARTS = (aten.slice.Tensor, aten.select.int)
#: The same numbers in the same order, in the same memory.
IN_PLACE = (*ALIASES, *RESHAPES, *ONES)
#: The same numbers in the same order, or each several times where it is expanded.
IN_ORDER = (*IN_PLACE, aten.clone.default, aten.expand.default)
#: The same numbers in the same order, if the result has as many as the argument.
SAME_IF_AS_MANY = (*IN_ORDER, *PARTS)
#: Views of the memory of their first argument, without those that autograd has for itself.
VIEWS = frozenset((*IN_PLACE, *TURNS, *PARTS, aten.expand.default))


def is_pointwise(op: Any) -> bool:
    """Whether torch says of an op that it works element by element."""
    return isinstance(op, OpOverload) and torch.Tag.pointwise in op.tags


@cache
def shares_memory(op: Any) -> bool:
    """Whether a result of an op lies in an argument's memory, by the op's schema."""
    returns = schema_of(op).returns if isinstance(op, OpOverload) else ()
    return any(result.alias_info is not None for result in returns)


@cache
def is_one_view(op: Any) -> bool:
    """Whether an op's only result is another view of the memory of its first argument."""
    schema = schema_of(op)
    is_one = [str(result.type) for result in schema.returns] == ["Tensor"]
    return is_one and shares_memory(op) and not schema.is_mutable


@cache
def named_dims(op: Any) -> tuple[tuple[int, Any], ...]:
    """The places of the arguments by which an op names dimensions, and their defaults."""
    return tuple(
        (place, argument.default_value)
        for place, argument in enumerate(schema_of(op).arguments)
        if argument.name in ("dim", "dims", "dim0", "dim1")
    )


@dataclass(frozen=True)
class View:
    """A call of an op of one tensor.

    Attributes:
        args: all of the call.
        before, after: the shapes of the tensor and of the result, to which no rule adds a guard.
    """

    op: Any
    args: Sequence[Any]
    before: Sequence[Any]
    after: Sequence[Any]

    @property
    def dims(self) -> list[int]:
        """The dimensions that the call names, counted from 0; of ``unsqueeze``, in the result."""
        args, rank = self.args, len(self.before) + (self.op is aten.unsqueeze.default)
        given = [args[place] if len(args) > place else dim for place, dim in named_dims(self.op)]
        named = given[0] if given and isinstance(given[0], list | tuple) else given
        return [dim % max(rank, 1) for dim in named]

    @property
    def order(self) -> list[int]:
        """Which dimension of its argument each dimension of the result of one of TURNS is."""
        order = list(range(max(len(self.before), 1)))
        if self.op is aten.permute.default:
            return self.dims
        one, other = self.dims or (0, order[-1])
        order[one], order[other] = other, one
        return order

    def place_of(self, dim: int) -> int | None:
        """Where a dimension of the tensor is in the result; None if the view cuts the dimension or
        merges it, or where that is not known.

        The same view, with another size in that place, can be taken of a tensor that has another
        size in the dimension.
        """
        rule = _RULES.get(self.op)
        return None if rule is None else rule(self, dim)


_Rule: TypeAlias = Callable[[View, int], int | None]
_RULES: dict[Any, _Rule] = {}


def _rule(*ops: Any) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(ops, rule))
        return rule

    return register


@_rule(*TURNS)
def _turned(view: View, dim: int) -> int:
    return view.order.index(dim)


@_rule(*RESHAPES)
def _reshaped(view: View, dim: int) -> int | None:
    """Known of the last dimension, if it stays the last."""
    # Imported here: eager losses, which read this module too, load no compiler.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    before, after = view.before, view.after
    is_last = dim == len(before) - 1 and bool(after)
    return len(after) - 1 if is_last and statically_known_true(after[-1] == before[-1]) else None


@_rule(aten.unsqueeze.default)
def _unsqueezed(view: View, dim: int) -> int:
    (new,) = view.dims
    return dim + (new <= dim)


@_rule(*PARTS, aten.squeeze.dim)
def _cut(view: View, dim: int) -> int | None:
    """A dimension that is not one stays in a squeeze."""
    (cut,) = view.dims
    is_gone = len(view.after) < len(view.before) and cut < dim
    return None if dim == cut else dim - is_gone


#: The views for which there is a rule.
FOLLOWED = frozenset(_RULES)
