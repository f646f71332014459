"""Compiles a graph up to the last of our passes, to know their decisions about it."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.fx import Graph, GraphModule

from compile_losses.inductor_passes import SLOTS, InPlacePass, PlanPass, users_passes
from compile_losses.lower import Decision
from compile_losses.options import Settings
from compile_losses.torch_internals.inductor import (
    JOINT,
    POST_GRAD,
    compile_fx,
    without_autograd_cache,
)


class _Stop(BaseException):
    """Ends a compilation once its graphs are complete."""


class _LastPass(InPlacePass):
    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        raise _Stop


def decide(
    gm: GraphModule, example_inputs: list[Any], settings: Settings | None = None
) -> list[Decision]:
    """The decisions of the passes on AOTAutograd's graphs about a rewritten Dynamo graph.

    Compiles a copy of the graph with Inductor up to those passes: no code is generated, no cache is
    read or written, and ``gm`` stays as it is. Only inside a Dynamo backend.
    """
    decisions: list[Decision] = []
    settings = settings or Settings.of(None, None)
    given: dict[str, Any] = {} if settings.inductor is None else settings.inductor.config
    passes = {slot: users_passes(slot, given) for slot in SLOTS}
    passes[JOINT] = PlanPass(passes[JOINT], settings, decisions)
    passes[POST_GRAD] = _LastPass(passes[POST_GRAD], settings, decisions)

    def without_code(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(_Stop):
            compile_fx.compile_fx_inner(*args, **kwargs)
        return lambda *_: None  # the compiled function, which nobody calls

    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    with without_autograd_cache():
        compile_fx.compile_fx(
            copy,
            example_inputs,
            inner_compile=without_code,
            config_patches={**given, "force_disable_caches": True, **passes},
        )
    return decisions
