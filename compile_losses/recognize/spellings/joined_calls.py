"""Chunks of rows that each have a call of cross entropy, put together again: one call.

``torch.cat([F.cross_entropy(x, t, reduction="none") for x, t in zip(xs, ts)])`` of the chunks of
two tensors is the cross entropy of these tensors. The chunks must be all rows, in order and each
once, of one tensor of logits and of one of class indices; casts and other ops of single rows may
stand between a tensor and its chunks. Chunks that each have a linear layer of their own are no
chunks of one tensor of logits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from compile_losses.graphs import ancestors
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten, compute
from compile_losses.recognize.graph.symbolic_tensors import example
from compile_losses.recognize.graph.unrolled import is_join, join
from compile_losses.recognize.match import Match
from compile_losses.recognize.spellings.table import bind, recognize_call


def joined_calls(node: Node, replay: AtenReplay) -> Match | None:
    """The match of a concatenation, or a stack, of the cross entropies of all rows; None if a node
    is no such thing."""
    pieces = _pieces(node)
    if pieces is None:
        return None
    found = [_call(piece) for piece in pieces]
    calls = [call for call in found if call is not None]
    if len(calls) < len(pieces) or any(call[2:] != calls[0][2:] for call in calls):
        return None
    stacks = getattr(node.target, "__name__", "") == "stack"
    input, target = (
        join([replay.of(call[place]) for call in calls], stacks, replay.resolve, compute)
        for place in (0, 1)
    )
    if input is None or target is None:
        return None
    rank = example(calls[0][0]).dim()
    if stacks and rank > 1:  # the classes, which come after the rows of a piece, go before them
        order = [0, 2, 1, *range(3, rank + 1)]
        input = compute(aten.permute.default, input, order)
    elif not stacks and rank < 2:
        return None
    if input is None:
        return None
    match = Match(node, "cross_entropy", (input.argument, target.argument, *calls[0][2:]))
    between = set(ancestors([node], until=set(match.inputs))) - {node}
    match.interior = sorted(between, reverse=True)
    return match


def _pieces(node: Node) -> list[Node] | None:
    """What a node puts together along the first dimension; None if it does something else."""
    if not is_join(node) or not isinstance(example(node), Tensor):
        return None
    arguments = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    pieces, dim = arguments.pop("tensors", None), arguments.pop("dim", 0)
    if arguments or type(dim) is not int or dim != 0 or not isinstance(pieces, list | tuple):
        return None
    nodes = [piece for piece in pieces if isinstance(piece, Node)]
    return nodes if 1 < len(nodes) == len(pieces) else None


def _call(node: Node) -> tuple[Any, ...] | None:
    """The op's arguments for a cross entropy of class indices, of each row; else None."""
    call = bind(node)
    if not isinstance(call, tuple) or call[0].name != "cross_entropy":
        return None
    match = recognize_call(node)
    if not isinstance(match, Match) or not all(isinstance(a, Node) for a in match.args[:2]):
        return None
    input, target = call[1]["input"], call[1]["target"]
    if (
        example(target).is_floating_point()
        or example(target).dim() == 0 != example(input).dim() - 1
    ):
        return None
    args = (input, target, *match.args[2:])
    return args if args[3] == REDUCTIONS["none"] else None
