"""Tensors that are put together and taken apart again: read where they were made.

``torch.stack([head(x) for head in heads], 1)[:, k]`` is the output of one head, and so is a slice
of a concatenation that has the rows of one head. The parts are read in the place of what is taken
out, if all that reads the whole takes such a part out of it. Then nothing puts them together any
more, and each loss finds the layer of its logits. Cuts along other dimensions, between the two or
in the same call, are made of the part.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.graphs import emit, erase_unused, replace_uses
from compile_losses.op_traits import PARTS
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten, same_sizes
from compile_losses.recognize.graph.memory import may_be_left_out
from compile_losses.recognize.graph.symbolic_tensors import Value, example
from compile_losses.recognize.graph.unrolled import JOINS, is_join, parts_of

#: An op of one tensor, and its other arguments.
_Step = tuple[Any, tuple[Any, ...]]


@dataclass(frozen=True)
class _Taken:
    """What a node takes out of a whole.

    Attributes:
        node: it has the whole of one part, but for cuts along other dimensions.
        part: the node that made the part.
        steps: the cuts.
    """

    node: Node
    part: Node
    steps: tuple[_Step, ...]


def read_parts(graph: Graph) -> None:
    """Has the nodes that take parts out of a whole replaced by what is made of these parts."""
    for join in [node for node in graph.nodes if is_join(node)]:
        found = _all_taken(join)
        if found is None:
            continue
        taken, between = found
        for each in taken:
            made = each.part
            with torch.set_grad_enabled(example(each.node).requires_grad):
                for op, args in each.steps:
                    made = emit(each.node, op, (made, *args))
            replace_uses(each.node, made)
        erase_unused([each.node for each in reversed(taken)])
        erase_unused([*reversed(between), join])


def _all_taken(join: Node) -> tuple[list[_Taken], list[Node]] | None:
    """What is taken out of a whole, and the nodes between; None if something else reads it."""
    replay = AtenReplay()
    whole = replay.of(join)
    if whole.node is not join or whole.op not in JOINS:
        return None
    parts = whole.args[0]
    if not all(part.whole for part in parts):
        return None
    if not may_be_left_out(join, [join, *(part.node for part in parts)]):
        return None
    taken: list[_Taken] = []
    between: list[Node] = []
    waiting = list(join.users)
    while waiting:
        user = waiting.pop()
        if user in between or any(each.node is user for each in taken):
            continue
        if parts_of(user) is not None:
            between.append(user)
            waiting += user.users
            continue
        if not user.users and replay.of(user).op is not None:  # nobody reads what it makes
            between.append(user)
            continue
        steps = _steps_from(join, user, replay)
        if steps is None:
            return None
        one = _part(user, whole, steps)
        if one is not None:
            taken.append(one)
        else:
            between.append(user)
            waiting += user.users
    if not taken or not all(_is_alike(each) for each in taken):
        return None
    return sorted(taken, key=lambda each: each.node), sorted(between)


def _steps_from(join: Node, node: Node, replay: AtenReplay) -> list[_Step] | None:
    """The cuts that lead from a whole to a node; None if anything else does."""
    steps: list[_Step] = []
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        parts, index = parts_of(node.args[0]), node.args[1]
        if parts is not None and isinstance(index, int):
            start, stop = parts.bounds(index)
            is_row = parts.are_rows
            cut = (
                (aten.select.int, (parts.dim, start))
                if is_row
                else (aten.slice.Tensor, (parts.dim, start, stop, 1))
            )
            steps.append(cut)
            node = parts.tensor
    while node is not join:
        value = replay.of(node)
        while value.node is node:
            if value.op not in PARTS:
                return None
            steps.append((value.op, value.args[1:]))
            value = value.args[0]
        node = value.node  # which may have made what this node returns
    return steps[::-1]


def _part(node: Node, whole: Value, steps: list[_Step]) -> _Taken | None:
    """What is taken out of a whole by some ops; None if that is not one part, or cut otherwise."""
    parts, *rest = whole.args
    stacks = whole.op is aten.stack.default
    rank = whole.fake.dim()
    place = (rest[0] if rest else 0) % rank
    shape = list(whole.fake.shape)
    before: list[_Step] = []
    for at, (op, args) in enumerate(steps):
        dim = (args[0] if args else 0) % len(shape)
        if dim != place:
            if not all(isinstance(argument, int | None) for argument in args):
                return None
            # The parts of a stack lack its dimension.
            before.append((op, (dim - (stacks and dim > place), *args[1:])))
            if op is aten.select.int:
                del shape[dim]
                place -= dim < place
            continue
        index = _index(op, args, parts, stacks, place)
        if index is None or not all(_is_known(step) for step in steps[at + 1 :]):
            return None
        return _Taken(node, parts[index].node, (*before, *steps[at + 1 :]))
    return None


def _is_known(step: _Step) -> bool:
    return all(isinstance(argument, int | None) for argument in step[1])


def _index(op: Any, args: tuple[Any, ...], parts: Any, stacks: bool, place: int) -> int | None:
    """Which part is taken by an op along the dimension of a whole; None if it is not just one."""
    if stacks:
        index = args[1] if op is aten.select.int else None
        return index % len(parts) if isinstance(index, int) else None
    if op is not aten.slice.Tensor or args[3:] not in ((), (1,)):
        return None
    lengths = [part.fake.shape[place] for part in parts]
    rows = sum(lengths)
    start, stop = (*args[1:3], None, None)[:2]
    start = 0 if start is None else start
    start = start + rows if statically_known_true(start < 0) else start
    is_open = stop is None or (isinstance(stop, int) and stop == sys.maxsize)
    stop = rows if is_open or statically_known_true(stop >= rows) else stop
    stop = stop + rows if statically_known_true(stop < 0) else stop
    for index, length in enumerate(lengths):
        first = sum(lengths[:index])
        if statically_known_true(start == first) and statically_known_true(stop == first + length):
            return index
    return None


def _is_alike(taken: _Taken) -> bool:
    """Whether a part can stand for what is taken out: alike to torch, and laid out so that each
    view of what is taken out is one of the part."""
    one, other = example(taken.node), example(taken.part)
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and (one.dtype, one.device) == (other.dtype, other.device)
        and one.requires_grad == other.requires_grad
        and (bool(taken.steps) or same_sizes(one.shape, other.shape))
        and _is_contiguous(other)
    )


def _is_contiguous(tensor: Tensor) -> bool:
    """Without a guard on sizes that are symbols."""
    step: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not statically_known_true(stride == step):
            return False
        step = step * size
    return True
