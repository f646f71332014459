"""How nodes of a graph are computed of a chunk of rows: what the search and the rules share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.lower.early_sizes import key_of

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
        args, kwargs: the nodes among them as a Read, also in a list.
        axis: the dimension of the classes, counted from the end; of logits.
    """

    kind: str
    op: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    axis: int = -1

    @property
    def reads(self) -> Iterator[Read]:
        given = (*self.args, *self.kwargs.values())
        each = (e for a in given for e in (a if isinstance(a, list) else [a]))
        return (e for e in each if isinstance(e, Read))


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


def with_one(shape: Sequence[Any], axis: int) -> tuple[Any, ...]:
    """A shape with one along an axis."""
    place = axis % len(shape)
    return (*shape[:place], 1, *shape[place + 1 :])


#: An argument that no step can read.
NONE: Any = object()


def same(one: Any, other: Any) -> bool:
    return bool(statically_known_true(one == other))


def same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(same, one, other))


def broadcasts(shape: Sequence[Any], to: Sequence[Any]) -> bool:
    """Whether a shape is broadcast to another one, whose numbers are at least as many."""
    if len(shape) > len(to):
        return False
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return all(same(one, 1) or same(one, other) for one, other in pairs)
