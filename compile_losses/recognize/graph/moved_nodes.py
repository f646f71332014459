"""Nodes that make class indices, moved to an earlier place in a Dynamo graph.

A call that reads the logits for several losses stands where the first of them stood. What the later
losses read besides may be made only after that, and there it must be known.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses import graphs
from compile_losses.graphs import later_sources
from compile_losses.recognize.graph.aten_replay import AtenReplay
from compile_losses.recognize.graph.memory import memory_of
from compile_losses.recognize.graph.symbolic_tensors import Value, example
from compile_losses.torch_internals.ops import is_pure, tree_leaves

#: Functions whose tensors are made of numbers alone, the same ones each time.
_FACTORIES = (torch.arange, torch.full, torch.ones, torch.tensor, torch.zeros)


def move_before(nodes: list[Node], place: Node, replay: AtenReplay) -> bool:
    """Moves what ``nodes`` are made of to before a place; False where that can't be done."""
    *_, last = later_sources(nodes, place) or [place]
    memory = memory_of(place.graph)
    writers = [writer for each in memory.writers.values() for writer in each]
    if memory.unexplained or any(place < w and w < last for w in writers):
        return False
    return graphs.move_before(nodes, place, partial(_is_fixed, replay=replay))


def _is_fixed(node: Node, replay: AtenReplay) -> bool:
    """Whether a node makes the same integers wherever its arguments are there.

    Integers have no gradients, and autocast does not change them.
    """
    value = example(node)
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(value, int | torch.SymInt | torch.Size):
        return True
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        return False
    if node.target in _FACTORIES:
        return True
    made = replay.of(node)
    return made.op is not None and _is_pure(made, node)


def _is_pure(value: Value, node: Node) -> bool:
    """Whether all ops of a node that lead to a value are without random numbers."""
    if value.op is None or value.node is not node:
        return True  # an argument
    arguments = (a for a in tree_leaves((value.args, value.kwargs)) if isinstance(a, Value))
    return is_pure(value.op) and all(_is_pure(argument, node) for argument in arguments)
