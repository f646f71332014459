"""Views of rows: logits of one layer whose rows are some of others, or in another order."""

from __future__ import annotations

from dataclasses import replace

from compile_losses.op_traits import PARTS, RESHAPES
from compile_losses.recognize.graph.aten_replay import aten, same_sizes
from compile_losses.recognize.graph.symbolic_tensors import Value, computed_alike
from compile_losses.recognize.heads.head import computed
from compile_losses.recognize.heads.logits import Logits
from compile_losses.recognize.heads.readings import Move
from compile_losses.recognize.heads.with_head import rows_of

#: A call for all rows is not slower if so many of them are read.
LEAST_PART = 0.75
#: Ops that take some of the rows, or change their order or shape.
ROW_MOVES = (
    *(aten.permute.default, aten.reshape.default, aten.squeeze.dim, aten.unsqueeze.default),
    *PARTS,
)


def classes_last(input: Value, dim: int) -> Value:
    """A tensor with a dimension moved to the end."""
    rank = input.fake.dim()
    if dim == rank - 1:
        return input
    order = [d for d in range(rank) if d != dim] + [dim]
    return computed(aten.permute.default, input, order)


def flat_rows(input: Value) -> tuple[Value, list[float]]:
    """Input before its rows were brought into another shape, and its factors."""
    factors: list[float] = []
    while not input.whole:
        op, (inner, *rest) = input.op, input.args
        if op in RESHAPES and same_sizes(inner.fake.shape[-1:], input.fake.shape[-1:]):
            input = inner
        elif op is aten.mul.Tensor and isinstance(rest[0], int | float):
            factors.append(float(rest[0]))
            input = inner
        elif op is aten.permute.default and (before := _permuted_back(inner, rest[0])) is not None:
            input = before[0]
            factors += before[1]
        else:
            break
    return input, factors


def _permuted_back(value: Value, order: list[int]) -> tuple[Value, list[float]] | None:
    """A tensor before a permutation that an order undoes, and its factors; else None."""
    factors: list[float] = []
    while value.op is aten.mul.Tensor and isinstance(value.args[1], int | float):
        factors.append(float(value.args[1]))
        value = value.args[0]
    if value.whole or value.op is not aten.permute.default:
        return None
    inner, before = value.args
    rank = value.fake.dim()
    if [before[dim] % rank for dim in order] != list(range(rank)):
        return None
    return inner, factors


def count_rows(logits: Logits) -> int:
    """How many rows there are."""
    input = logits.input.fake
    return rows_of(input, input.shape[-1]) or 0


def of_all_rows(logits: Logits) -> Logits | None:
    """Logits like some, but of all rows of the layer; None if the rows are not views of these."""
    value, factors = logits.input, list[int | float]()
    while not value.whole and (value.op in ROW_MOVES or value.op is aten.mul.Tensor):
        if value.op is aten.mul.Tensor:
            factors.append(value.args[1])
        value = value.args[0]
    input = logits.head.input
    if not computed_alike(value, input) or not all(isinstance(f, int | float) for f in factors):
        return None
    for factor in reversed(factors):
        input = computed(aten.mul.Tensor, input, factor)
    return replace(logits, input=input, class_dim=input.fake.dim() - 1)


def moves_between(one: Logits, other: Logits) -> list[Move] | None:
    """The ops that make the rows of ``other`` of those of ``one``; empty if they are the same.

    Returns:
        None if ``other`` has more rows, or differs in more than its rows.
    """
    parts = zip((one.weight, one.bias), (other.weight, other.bias), strict=True)
    options = [(each.softcap, each.scale) for each in (one, other)]
    if options[0] != options[1] or not all(computed_alike(*pair) for pair in parts):
        return None
    base, factors = flat_rows(one.input)
    value, of_other = flat_rows(other.input)
    if not computed_alike(base, value):
        value, of_other = other.input, []
    moves: list[Move] = []
    while not computed_alike(base, value):
        if value.whole or not value.args:
            return None
        inner, *rest = value.args
        if value.op is aten.mul.Tensor and isinstance(rest[0], int | float):
            of_other.append(float(rest[0]))
        elif value.op in ROW_MOVES and all(isinstance(a, int | list | None) for a in rest):
            if value.op is aten.reshape.default:  # the hidden dimension is the last
                rest = [[*rest[0][:-1], 1]]
            moves.append((value.op, rest))
        else:
            return None
        value = inner
    return moves[::-1] if factors == of_other else None
