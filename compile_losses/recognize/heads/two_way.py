"""Two cross entropies of one product, by its rows and by its columns: one call.

``linear_cross_entropy(a, b, rows)`` and ``linear_cross_entropy(b, a, columns)`` have the same
logits, once transposed. One call of ``fused::two_way_cross_entropy`` computes four products where
they would compute six. The operands may be scaled, cast and transposed on their way: the product of
both operands' factors counts, whichever of them is scaled. Such calls come from two products that a
program writes, or from one that is read by columns, too
(:mod:`compile_losses.recognize.heads.columns_apart`).
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_losses.graphs import ancestors, emit, erase_unused, replace_uses
from compile_losses.op_traits import CASTS, QUOTIENTS, SCALINGS, TURNS, View
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten, hashable
from compile_losses.recognize.graph.memory import memory_of, storage_of
from compile_losses.recognize.graph.moved_nodes import move_before
from compile_losses.recognize.graph.symbolic_tensors import Value, example
from compile_losses.recognize.heads.columns_apart import is_of_each
from compile_losses.recognize.heads.logits import followed_by
from compile_losses.recognize.heads.shared_logits import Rewritten
from compile_losses.torch_internals.ops import named_arguments
from compile_losses.torch_internals.tensors import FakeTensor

fused = torch.ops.fused

#: The options that both ops have, and those that have to be left at their defaults.
_SHARED = ("reduction", "ignore_index", "label_smoothing", "dtype")
_DEFAULTS = {"linear_bias": None, "weight": None, "softcap": None, "z_loss": 0.0}


@dataclass(frozen=True)
class Direction:
    """A cross entropy of a product.

    Attributes:
        rows, columns: what stands for the operands without their factors.
        factors: of the product, in any order.
        options: see ``_SHARED``.
    """

    node: Node
    input: Node
    weight: Node
    target: Node
    rows: Hashable
    columns: Hashable
    factors: frozenset[Any]
    options: tuple[Any, ...]

    def is_turned(self, other: Direction) -> bool:
        """Whether the other's product is this one's, transposed."""
        return (
            (self.rows, self.columns) == (other.columns, other.rows)
            and self.factors == other.factors
            and self.options == other.options
            and example(self.input).dtype == example(other.input).dtype
            and example(self.node).requires_grad == example(other.node).requires_grad
        )


def join_directions(graph: Graph, replay: AtenReplay) -> list[Rewritten]:
    """Has one call compute the cross entropies of each product by rows and by columns."""
    calls = graph.find_nodes(op="call_function", target=fused.linear_cross_entropy.default)
    left = [found for call in calls if (found := _direction(call, replay)) is not None]
    joined: list[Rewritten] = []
    while left:
        first, *left = left
        for second in left:
            if not first.is_turned(second) or not _reads_what_stays(first, second):
                continue
            if move_before([second.target], first.node, replay):
                left.remove(second)
                joined.append(_join(first, second))
                break
    return joined


def _reads_what_stays(first: Direction, second: Direction) -> bool:
    """Whether nothing is written to what the calls read apart from each other: the operands are
    computed alike, but a write would lie between them."""
    of_first, of_second = (set(ancestors([each.input, each.weight])) for each in (first, second))
    apart = of_first ^ of_second
    read = {n for each in apart for n in (each, *each.all_input_nodes)}
    read |= {each for d in (first, second) for each in (d.input, d.weight, d.target)}
    tensors = [example(node) for node in read if isinstance(example(node), Tensor)]
    storages = set(map(storage_of, tensors))
    memory = memory_of(first.node.graph)
    return None not in storages and not storages & {*memory.storages, *memory.later}


def _join(first: Direction, second: Direction) -> Rewritten:
    """Puts one call in the place of the losses of both directions."""
    args = (first.input, first.weight, first.target, second.target)
    options = dict(zip(_SHARED, first.options, strict=True))
    call = emit(first.node, fused.two_way_cross_entropy.default, args, options)
    for index, direction in enumerate((first, second)):
        value = example(call)[index]
        result = emit(first.node, operator.getitem, (call, index), like=direction.node, value=value)
        replace_uses(direction.node, result)
    readers = [first.node, second.node]
    erase_unused(readers)
    notes = ["one product of both directions, computed twice and never held"]
    return Rewritten(call, readers, notes, [])


def _direction(node: Node, replay: AtenReplay) -> Direction | None:
    """What a call of linear cross entropy computes; None if it has options that the op of both
    directions does not have."""
    given = named_arguments(node)
    operands = [given["input"], given["linear_weight"], given["target"]]
    if any(given[name] != default for name, default in _DEFAULTS.items()):
        return None
    if not all(isinstance(o, Node) and type(example(o)) is FakeTensor for o in operands):
        return None
    input, weight, target = operands
    if example(input).dim() != 2 or example(weight).dim() != 2:
        return None
    if example(target).dtype != torch.int64 or example(target).dim() != 1:
        return None
    of_input, of_weight = (_operand(replay.of(each), replay) for each in (input, weight))
    if of_input is None or of_weight is None:
        return None
    factors = [*of_input[1], *of_weight[1]]
    if given["ignore_index"] is None:
        given["ignore_index"] = -100
    options = tuple(map(given.__getitem__, _SHARED))
    counted = frozenset((factor, factors.count(factor)) for factor in factors)
    return Direction(node, input, weight, target, of_input[0], of_weight[0], counted, options)


def _operand(value: Value, replay: AtenReplay) -> tuple[Hashable, list[Hashable]] | None:
    """What stands for an operand without its factors, and what for each of these; None if it is
    transposed."""
    is_turned, factors = False, []
    while True:
        value = replay.resolve(value)
        source: Any = value.args[0] if value.op is not None and value.args else None
        if value.op in SCALINGS:
            source, factor = _scaled(value, replay)
            factors += [factor] * (source is not None)
        elif value.op in TURNS and isinstance(source, Value):
            is_turned ^= _order(value, source) == [1, 0]
        elif value.op not in CASTS:
            source = None
        if not isinstance(source, Value):
            return None if is_turned else (replay.key(value), factors)
        value = source


def _order(value: Value, source: Value) -> list[int]:
    return View(value.op, value.args, source.fake.shape, value.fake.shape).order


def _scaled(value: Value, replay: AtenReplay) -> tuple[Value | None, Hashable]:
    """The matrix that is scaled, by one number each, and what stands for the number; None for the
    matrix if it is not one number."""
    source = followed_by(value)
    numbers = [a for a in value.args if a is not source]
    if value.op is aten.neg.default:
        numbers = [-1]
    # Without another number the matrix is multiplied by itself.
    if source is None or not numbers or not is_of_each(value):
        return None, None
    keys = (replay.key(n) if isinstance(n, Value) else hashable(n) for n in numbers)
    return source, (value.op in QUOTIENTS, *keys)
