"""From a graph that is given lazy logits to a graph that is given their hidden state and head.

The placeholder of the logits becomes those of hidden state, weight and bias. The layer follows,
and the ops that lead from its output to the logits. So AOTAutograd never sees the tensor subclass.
If the logits were read before, have hooks, or are written to by the graph, the graph gets their
numbers instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from compile_losses.lazy.outputs import Compiled
from compile_losses.lazy.tensor import LazyLogits
from compile_losses.torch_internals.dynamo import name_input, source_of_input
from compile_losses.torch_internals.graphs import EXAMPLE
from compile_losses.torch_internals.ops import tree_map_only
from compile_losses.torch_internals.tensors import version_of

aten = torch.ops.aten


def open_lazy_inputs(
    gm: GraphModule, example_inputs: list[Any], *, as_numbers: bool = False
) -> tuple[GraphModule, list[Any], Callable[[Compiled], Compiled] | None]:
    """Gives a graph the hidden state and the head of its lazy inputs, in which it finds its loss.

    Args:
        gm, example_inputs: what Dynamo passes to a backend; they stay as they are.
        as_numbers: whether the graph gets the numbers of all lazy inputs instead.

    Returns:
        If no input is lazy, the same and None; else a new graph, examples of its inputs, and a
        function that makes of the compiled graph one that takes the inputs of ``gm``.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if not any(isinstance(node.meta.get(EXAMPLE), LazyLogits) for node in placeholders):
        return gm, example_inputs, None
    graph = Graph()
    copies: dict[Node, Node] = {}
    examples: list[Any] = []
    opened: dict[int, _Opened | None] = {}
    for place, (node, given) in enumerate(zip(placeholders, example_inputs, strict=True)):
        fake = node.meta.get(EXAMPLE)
        if not isinstance(fake, LazyLogits):
            copies[node] = graph.node_copy(node)
            examples.append(given)
            continue
        opened[place] = one = None if as_numbers else _open(graph, node, fake)
        if one is None:
            copies[node] = _plain_input(graph, node, fake)
        examples += one.examples if one else [copies[node].meta[EXAMPLE]]
    for place, one in opened.items():
        if one is not None:
            copies[placeholders[place]] = one.compute(graph)
    graph.output(graph.graph_copy(gm.graph, copies))
    for node in graph.nodes:
        if EXAMPLE in node.meta:
            node.meta[EXAMPLE] = tree_map_only(LazyLogits, _plain_example, node.meta[EXAMPLE])
    result = GraphModule(gm, graph)
    result.meta = dict(gm.meta)

    written = [place for place in opened if version_of(placeholders[place].meta[EXAMPLE]) > 0]

    def around(compiled: Compiled) -> Compiled:
        def run(*given: Any) -> Any:
            taken: list[Any] = []
            copies: dict[int, Tensor] = {}
            for place, value in enumerate(given):
                if place not in opened or not isinstance(value, LazyLogits):
                    taken.append(value)
                elif opened[place] is None:
                    taken.append(value.plain())
                    if place in written:
                        taken[-1] = copies[place] = taken[-1].clone()
                else:
                    taken += value.opened().tensors
            results = compiled(*taken)
            for place, copy in copies.items():
                given[place].copy_(copy)
            return results

        return run

    return result, examples, around


class _Opened:
    """One lazy input: placeholders of its head's tensors, and their examples."""

    def __init__(self, fake: LazyLogits, inputs: list[Node], meta: dict[str, Any]) -> None:
        self.fake = fake
        self.inputs = inputs
        self.meta = meta

    @property
    def examples(self) -> list[Tensor]:
        return [node.meta[EXAMPLE] for node in self.inputs]

    def compute(self, graph: Graph) -> Node:
        """The logits, as the graph that returned them would have computed them."""
        head = self.fake.unread_head()
        assert head is not None

        def call(op: Any, *args: Any, **kwargs: Any) -> Node:
            node = graph.call_function(op, args, kwargs)
            examples = [a.meta[EXAMPLE] if isinstance(a, Node) else a for a in args]
            with fake_mode, torch.set_grad_enabled(self.fake.requires_grad):
                node.meta = {**self.meta, EXAMPLE: op(*examples, **kwargs)}
            return node

        fake_mode = self.inputs[0].meta[EXAMPLE].fake_mode
        cast = [
            node
            if node.meta[EXAMPLE].dtype == head.dtype
            else call(aten.to.dtype, node, head.dtype)
            for node in self.inputs
        ]
        if head.is_transposed:
            cast[1] = call(aten.t.default, cast[1])
        result = call(aten.linear.default, *cast)
        for op, args, kwargs in self.fake.steps:
            result = call(op, result, *args, **dict(kwargs))
        return result


def _open(graph: Graph, node: Node, fake: LazyLogits) -> _Opened | None:
    """None if the logits have to be computed before: if they were read, if the graph writes to
    them, or if autocast would change them."""
    head = fake.unread_head()
    if head is None or version_of(fake) > 0:
        return None
    device = head.input.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != head.dtype:
        return None
    inputs = []
    for name, tensor in zip(("hidden", "weight", "bias"), head.tensors, strict=False):
        made = graph.placeholder(f"{node.name}_{name}")
        made.meta[EXAMPLE] = tensor
        name_input(made, source_of_input(node), name)
        inputs.append(made)
    return _Opened(fake, inputs, {k: v for k, v in node.meta.items() if k == "stack_trace"})


def _plain_input(graph: Graph, node: Node, fake: LazyLogits) -> Node:
    made = graph.placeholder(node.name)
    made.meta[EXAMPLE] = _plain_example(fake)
    name_input(made, source_of_input(node))
    return made


def _plain_example(fake: LazyLogits) -> Tensor:
    """The same of a plain tensor; no leaf, as AOTAutograd is to know."""
    plain = fake.numbers.detach().requires_grad_(fake.requires_grad)
    with torch.enable_grad():
        example: Tensor = aten.alias.default(plain)
    return example
