"""From a graph that is given lazy logits to a graph that is given their hidden state and head.

The placeholder of the logits becomes those of hidden state, weight and bias. The layer follows,
and the ops that lead from its output to the logits. So AOTAutograd never sees the tensor subclass.
If the logits were read before, have hooks, or are written to by the graph, the graph gets their
numbers instead. What a graph returns of the logits themselves, it is spared: its caller makes that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from compile_losses.graphs import emit, emit_input, erase, give_value
from compile_losses.lazy.calls import Calls, Outside
from compile_losses.lazy.head import Step
from compile_losses.lazy.outputs import Compiled
from compile_losses.lazy.tensor import LazyLogits
from compile_losses.torch_internals.dynamo import name_input, source_of_input
from compile_losses.torch_internals.eager import without_saved_tensors_hooks
from compile_losses.torch_internals.graphs import EXAMPLE
from compile_losses.torch_internals.ops import tree_leaves, tree_map_only
from compile_losses.torch_internals.tensors import storage_id, taking_symbols, version_of

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
    with taking_symbols(), without_saved_tensors_hooks():
        return _open_all(gm, example_inputs, as_numbers)


def _open_all(
    gm: GraphModule, example_inputs: list[Any], as_numbers: bool
) -> tuple[GraphModule, list[Any], Callable[[Compiled], Compiled]]:
    """See ``open_lazy_inputs``."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    fakes = [node.meta.get(EXAMPLE) for node in placeholders]
    lazy = {place: fake for place, fake in enumerate(fakes) if isinstance(fake, LazyLogits)}
    written = frozenset(place for place, fake in enumerate(fakes) if _is_written(fake))
    (output,) = gm.graph.find_nodes(op="output")
    returned = list(output.args[0])
    outside = _made_outside(returned, lazy)

    graph = Graph()
    copies: dict[Node, Node] = {}
    examples: list[Any] = []
    opened: dict[int, _Opened] = {}
    for place, (node, given) in enumerate(zip(placeholders, example_inputs, strict=True)):
        one = None if as_numbers or place not in lazy else _open(graph, node, lazy[place])
        if one is not None:
            opened[place] = one
            examples += one.examples
            continue
        if place not in lazy:
            copies[node] = graph.node_copy(node)
            examples.append(given)
            continue
        copies[node] = _plain_input(graph, node, lazy[place])
        # A graph that writes is called with logits that share no memory; see Calls.
        examples.append(_apart(lazy[place]) if written else copies[node].meta[EXAMPLE])
    for place, one in opened.items():
        copies[placeholders[place]] = one.compute(graph)
    results = list(graph.graph_copy(gm.graph, copies))  # type: ignore[arg-type]
    graph.output(tuple(node for place, node in enumerate(results) if place not in outside))
    for place in outside:
        _erase(results[place])
    for node in graph.nodes:
        if EXAMPLE in node.meta:
            give_value(node, tree_map_only(LazyLogits, _plain_example, node.meta[EXAMPLE]))
    result = GraphModule(gm, graph)
    result.meta = dict(gm.meta)
    rest = {at: node for at, node in enumerate(results) if at not in outside}
    watched, refusal = _watched(rest, graph)
    calls = Calls(
        gm,
        frozenset(opened),
        written,
        outside,
        watched,
        "it changes one of its inputs in place" if written else refusal,
        is_uncompiled=_is_tangled(returned, outside, lazy),
    )
    return result, examples, calls.around


def _is_written(fake: Any) -> bool:
    return isinstance(fake, Tensor) and not fake.is_inference() and version_of(fake) > 0


def _made_outside(returned: list[Any], lazy: dict[int, LazyLogits]) -> dict[int, Outside]:
    """The results that are views of the logits, or copies that wait as the logits do."""
    places = {id(fake): place for place, fake in lazy.items()}
    found = {}
    for at, node in enumerate(returned):
        made = fake = node.meta.get(EXAMPLE) if isinstance(node, Node) else None
        steps: list[Step] = []
        while isinstance(made, LazyLogits) and id(made) not in places and made.made_by is not None:
            made, step = made.made_by
            steps.append(step)
        place = places.get(id(made))
        if place is None or fake is None:
            continue
        # A copy holds what was there before a write, and what Dynamo changes sizes for is no step.
        is_view = fake._memory is lazy[place]._memory
        if is_view or not _is_written(made):
            found[at] = Outside(place, tuple(reversed(steps)), fake.requires_grad)
    return found


def _is_tangled(
    returned: list[Any], outside: dict[int, Outside], lazy: dict[int, LazyLogits]
) -> bool:
    """Whether results share memory with the logits in another way, or the graph makes other
    tensors of these in place."""
    memories = [fake._memory for fake in lazy.values()]
    storages = {storage_id(memory.made) for memory in memories if memory.made is not None}
    for at, node in enumerate(returned):
        fake = node.meta.get(EXAMPLE) if isinstance(node, Node) else None
        if at in outside or not isinstance(fake, Tensor):
            continue
        if isinstance(fake, LazyLogits):
            if any(fake._memory is memory for memory in memories):
                return True
        elif fake.layout == torch.strided and storage_id(fake) in storages:
            return True
    return any(fake.is_replaced for fake in lazy.values())


def _erase(node: Node) -> None:
    """Takes a node out that makes logits which nothing reads."""
    made = tree_leaves(node.meta.get(EXAMPLE))
    waits = all(isinstance(fake, LazyLogits) and not _is_written(fake) for fake in made)
    if node.op in ("call_function", "call_method") and waits and not node.users:
        sources = node.all_input_nodes
        erase(node)
        for source in sources:
            _erase(source)


def _watched(kept: dict[int, Any], graph: Graph) -> tuple[tuple[int, ...], str | None]:
    """The places of results that need a gradient and share no memory, and why some do not."""
    fakes = {at: node.meta.get(EXAMPLE) for at, node in kept.items() if isinstance(node, Node)}
    tensors = {at: fake for at, fake in fakes.items() if isinstance(fake, Tensor)}
    given = {id(node): node.meta.get(EXAMPLE) for node in graph.find_nodes(op="placeholder")}
    seen = Counter(storage_id(fake) for fake in tensors.values())
    inputs = {storage_id(fake) for fake in given.values() if isinstance(fake, Tensor)}
    found, refusal = [], None
    for at, fake in tensors.items():
        if not fake.requires_grad or storage_id(fake) in inputs:
            continue
        if seen[storage_id(fake)] > 1:
            refusal = "its results share memory"
        else:
            found.append(at)
    return tuple(found), refusal


class _Opened:
    """One lazy input: placeholders of its head's tensors, and their examples."""

    def __init__(self, fake: LazyLogits, inputs: list[Node], logits: Node) -> None:
        self.fake = fake
        self.inputs = inputs
        self.logits = logits

    @property
    def examples(self) -> list[Tensor]:
        return [node.meta[EXAMPLE] for node in self.inputs]

    def compute(self, graph: Graph) -> Node:
        """The logits, as the graph that returned them would have computed them."""
        head = self.fake.unread_head()
        assert head is not None

        def call(op: Any, *args: Any, **kwargs: Any) -> Node:
            with torch.set_grad_enabled(self.fake.requires_grad):
                return emit(graph, op, args, kwargs, like=self.logits)

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
        made = emit_input(graph, f"{node.name}_{name}", tensor)
        name_input(made, source_of_input(node), name)
        inputs.append(made)
    return _Opened(fake, inputs, node)


def _plain_input(graph: Graph, node: Node, fake: LazyLogits) -> Node:
    made = emit_input(graph, node.name, _plain_example(fake))
    name_input(made, source_of_input(node))
    return made


def _apart(fake: LazyLogits) -> Tensor:
    """The same of a plain tensor in memory of its own."""
    numbers: Any = fake.numbers
    with numbers.fake_mode:
        apart = torch.empty_strided(
            numbers.size(), numbers.stride(), dtype=numbers.dtype, device=numbers.device
        )
    return _no_leaf(apart, fake.requires_grad)


def _plain_example(fake: LazyLogits) -> Tensor:
    """The same of a plain tensor."""
    return _no_leaf(fake.numbers.detach(), fake.requires_grad)


def _no_leaf(plain: Tensor, requires_grad: bool) -> Tensor:
    """An alias, which is no leaf of the autograd graph: AOTAutograd is to know that."""
    with torch.enable_grad():
        example: Tensor = aten.alias.default(plain.requires_grad_(requires_grad))
    return example
