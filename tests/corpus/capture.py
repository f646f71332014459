"""The graphs of a program, made once a session: Dynamo's, and those of AOTAutograd.

Each call returns a copy, which a test may change. The values in it are fakes. No graph outlives a
session: nodes refer to fake modes, sources and Python functions, which no file holds safely.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import detect_fake_mode
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from compile_losses import inductor_passes
from compile_losses.lower import Decision, donated_buffers, in_place, plan
from compile_losses.recognize import rewrite
from compile_losses.recognize.heads import with_head
from compile_losses.report import Report
from compile_losses.request import Request
from compile_losses.torch_internals.inductor import JOINT, without_autograd_cache
from tests.constants import set_constants
from tests.corpus.program import Program


class _Stop(BaseException):
    """Ends a compilation once its graphs are complete."""


#: Constants of devices for which small tensors are worth what large ones are.
SMALL: dict[str, Any] = {
    "least_rows": 4,
    "logits_bytes": 1,
    "small_bytes": 0,
    "small_simple_bytes": 0,
    "statistics_bytes": 0,
    "statistics_classes": 0,
    "moves_gradients": True,
    "least_gradient_bytes": 0,
    "longest_row": 64,
    "shortest_row": 2,
    "many_rows": 2,
    "merges_loops": False,
    "writes_over": True,
}


def take_small_as_large(patch: pytest.MonkeyPatch) -> None:
    """Small tensors are worth what large ones are."""
    set_constants(patch, **SMALL)
    patch.setattr("compile_losses.ops.linear.matrix_products.BLOCK_BYTES", 1000)
    patch.setattr(with_head, "COPIED_WEIGHTS", 1)


@contextmanager
def small_as_large() -> Iterator[None]:
    """The same, while a graph is made."""
    with pytest.MonkeyPatch.context() as patch:
        take_small_as_large(patch)
        yield


def copied(gm: GraphModule) -> GraphModule:
    """A copy whose nodes may be changed; the fakes are shared.

    Its code is made when it first runs, which most copies never do.
    """
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    (output,), (ours,) = gm.graph.find_nodes(op="output"), graph.find_nodes(op="output")
    ours.meta = dict(output.meta)
    copy = _LazyGraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    return copy


@dataclass
class Captured:
    """A graph that Dynamo made of a program.

    Attributes:
        inputs: examples of what the graph is called with, not fakes.
    """

    gm: GraphModule
    inputs: list[Any]


@functools.cache
def _captured(program: Program) -> Captured:
    found: list[Captured] = []

    def keep(gm: GraphModule, inputs: list[Any]) -> Any:
        found.append(Captured(copied(gm), inputs))
        raise _Stop  # before guards and bytecode are made, which nobody needs

    torch._dynamo.reset()
    with program.around(), torch.random.fork_rng(), suppress(_Stop):
        torch.manual_seed(0)
        inputs = tuple(program.make())
        torch.compile(program.function, backend=keep, fullgraph=True, dynamic=False)(*inputs)
    torch._dynamo.reset()
    return found[-1]


def captured(program: Program) -> Captured:
    """The graph that Dynamo makes of a program."""
    found = _captured(program)
    return Captured(copied(found.gm), found.inputs)


@functools.cache
def _recognised(program: Program) -> Captured:
    found = captured(program)
    with small_as_large(), program.around():
        rewrite(found.gm, lowers=True)
    return found


def recognised(program: Program) -> tuple[Captured, Report]:
    """The same graph with its losses rewritten, and the report."""
    found = _recognised(program)
    return Captured(copied(found.gm), found.inputs), found.gm.meta["compile_losses"]


@dataclass
class Parts:
    """A joint graph, and what the partitioner makes of it.

    Attributes:
        joint: as AOTAutograd made it; of inference where nothing has a gradient.
        planned: after the plan.
        forward, backward: None where there is no such graph.
        donated: the places of the backward's inputs that it may overwrite.
        decisions: of the plan.
    """

    joint: GraphModule
    planned: GraphModule
    forward: GraphModule
    backward: GraphModule | None
    donated: tuple[int, ...]
    decisions: list[Decision]


def _compile(found: Captured, joint: Any, inner: Any) -> None:
    """Compiles with a pass on the joint graph, and with what compiles its parts."""
    fakes = [node.meta.get("example_value") for node in found.gm.graph.nodes]
    context = TracingContext(detect_fake_mode(fakes))

    class Joint(inductor_passes.Pass):
        def run(self, graph: Graph) -> None:
            joint(graph)

    options = {"force_disable_caches": True, JOINT: Joint(None)}
    with suppress(_Stop), tracing(context), without_autograd_cache():
        compile_fx.compile_fx(found.gm, found.inputs, inner_compile=inner, config_patches=options)


@functools.cache
def _parts(program: Program) -> Parts:
    made: list[tuple[GraphModule, tuple[int, ...]]] = []
    decisions: list[Decision] = []
    graphs: list[GraphModule] = []

    def lower(graph: Graph) -> None:
        graphs.append(copied(graph.owning_module))
        decisions.extend(plan(graph))
        graphs.append(copied(graph.owning_module))

    def keep(gm: GraphModule, *_: Any, **__: Any) -> Any:
        view_to_reshape(gm)  # as Inductor does before its passes
        made.append((copied(gm), donated_buffers()))
        return lambda *_: None

    with small_as_large(), patch.dict(torch._inductor.config._config):
        _compile(recognised(program)[0], lower, keep)
    (forward, _), *rest = made
    backward, donated = rest[0] if rest else (None, ())
    return Parts(*graphs, forward, backward, donated, decisions)


def joint(program: Program) -> GraphModule:
    """AOTAutograd's joint graph, or that of inference, of the recognised program."""
    return copied(_parts(program).joint)


def parts(program: Program) -> Parts:
    """The joint graph before and after the plan, and the forward and the backward graph."""
    found = _parts(program)
    graphs = (found.joint, found.planned, found.forward, found.backward)
    return Parts(*(g and copied(g) for g in graphs), found.donated, found.decisions)


def fake_mode_of(graph: Graph) -> Any:
    return detect_fake_mode([node.meta.get("val") for node in graph.nodes])


def planned(gm: GraphModule, **options: Any) -> list[Decision]:
    """Plans a joint graph, as Inductor has it done.

    Args:
        options: of the request, as the backend has them.
    """
    with small_as_large(), V.set_fake_mode(fake_mode_of(gm.graph)):
        return plan(gm.graph, Request.of(**options))


def put_in_place(gm: GraphModule, donated: Sequence[int] = ()) -> list[Decision]:
    """Runs the last pass on a forward or backward graph."""
    with small_as_large(), V.set_fake_mode(fake_mode_of(gm.graph)):
        return in_place(gm.graph, donated)


def inputs_for(gm: GraphModule) -> list[Any]:
    """Numbers for a graph's inputs, of the shapes, strides and dtypes of its fakes.

    Integers are 0 or 1: class indices, of any number of classes.
    """
    generator = torch.Generator().manual_seed(0)
    return [_number_like(node, generator) for node in gm.graph.find_nodes(op="placeholder")]


def _number_like(node: Node, generator: torch.Generator) -> Any:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if value.is_floating_point():
        return made.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
    return made.copy_(torch.randint(2, value.shape, generator=generator))
