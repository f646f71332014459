"""From a graph that returns logits to a graph that returns their hidden state.

AOTAutograd then hands the backward a gradient of the hidden state's size. For logits that are
returned and not read it would hand zeros of the logits' size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compile_losses.graphs import erase_unused, give
from compile_losses.lazy.automatic import Automatic
from compile_losses.lazy.head import Head, Step, apply
from compile_losses.lazy.node import Wishes, lazy_logits
from compile_losses.switches import LAZY_LOGITS, how_to_set

#: A compiled graph, or what stands for one.
Compiled = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class LazyOutput:
    """An output of a Dynamo graph that is made of a linear layer's output alone.

    Attributes:
        node: the output.
        input, weight, bias: nodes of the layer's arguments.
        dtype: what they are cast to.
        is_transposed: whether weight is [hidden, classes].
        steps: the ops that lead from the layer's output to ``node``.
        requires_grad: whether gradients go from ``node`` to the layer.
        path: the nodes of the layer and of the steps, which have no other effect.
    """

    node: Node
    input: Node
    weight: Node
    bias: Node | None
    dtype: torch.dtype
    is_transposed: bool
    steps: tuple[Step, ...]
    requires_grad: bool
    path: tuple[Node, ...]

    @property
    def sources(self) -> tuple[Node, ...]:
        both = self.input, self.weight
        return both if self.bias is None else (*both, self.bias)


def return_lazily(
    gm: GraphModule,
    outputs: list[LazyOutput],
    compile: Callable[[GraphModule], Compiled],
    automatic: Automatic | None = None,
) -> Compiled:
    """Compiles a graph that returns, in the place of some outputs, the layer's input.

    Args:
        gm: as Dynamo captured it, its losses rewritten; some of its outputs change.
        outputs: which are to be lazy.
        compile: the rest of the backend.
        automatic: the function that is compiled, with ``"auto"``.

    Returns:
        A function that returns the results of ``gm``, with a :class:`LazyLogits` in the place of
        each of these outputs.
    """
    (output,) = gm.graph.find_nodes(op="output")
    returned: list[Any] = list(output.args[0])
    lazy = {one.node: one for one in outputs}
    inputs = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    kept = [node for node in returned if node not in lazy]
    places: dict[Any, int] = {}
    for place, node in enumerate(kept):
        if isinstance(node, Node):
            places.setdefault(node, place)

    def getter(source: Node) -> Callable[[Any, Any], Tensor]:
        """Takes a tensor from the graph's inputs, or else from its results."""
        if source in inputs:
            place = inputs[source]
            return lambda given, made: given[place]
        if source.op == "get_attr":
            get = operator.attrgetter(str(source.target))
            return lambda given, made: get(gm)
        place = places.setdefault(source, len(kept))
        if place == len(kept):
            kept.append(source)
        return lambda given, made: made[place]

    made_of = {node: [getter(source) for source in one.sources] for node, one in lazy.items()}
    give(output, (tuple(kept),))
    erase_unused(sorted({n for one in outputs for n in one.path}, reverse=True))
    gm.graph.lint()
    gm.recompile()
    compiled = compile(gm)
    remedy = how_to_set(LAZY_LOGITS, False)

    def run(*given: Any) -> list[Any]:
        made = compiled(*given)
        call = None if automatic is None else automatic.call()
        if call is not None:
            call.watch_backward(made)
        rest = iter(made)
        #: The output of each head; the results that are made of it start from it.
        heads: dict[tuple[Node, ...], Tensor] = {}
        results = []
        for node in returned:
            one = lazy.get(node)
            if one is None:
                results.append(next(rest))
                continue
            if one.sources not in heads:
                input, weight, *bias = (get(given, made) for get in made_of[node])
                head = Head(input, weight, bias[0] if bias else None, one.dtype, one.is_transposed)
                heads[one.sources] = lazy_logits(head, Wishes(remedy, call))
            result = apply(heads[one.sources], one.steps)
            is_cut = result.requires_grad and not one.requires_grad
            results.append(result.detach() if is_cut else result)
        return results

    return run
