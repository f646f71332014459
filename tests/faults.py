"""Faults that are planted in the passes."""

from __future__ import annotations

import inspect
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from compile_losses import (
    backend,
    default_backend,
    graphs,
    guard,
    inductor_passes,
    lazy,
    lower,
    options,
    pipeline,
    recognize,
    report,
    sites,
)
from compile_losses.recognize import steps

#: Where the functions are that raise.
SOURCES = (
    *(str(Path(module.__file__).parent) for module in (graphs, recognize, lower, lazy)),
    *(module.__file__ for module in (backend, inductor_passes, options, pipeline, report, sites)),
)
#: What undoes the changes of a function that raised; and the doors, where torch calls us.
GUARDS = (guard.__file__, steps.__file__)
DOORS = {
    function.__code__
    for function in (
        backend.rewritten,
        backend._as_torch_has_it,
        inductor_passes.Pass.__call__,
        inductor_passes.log_and_count,
    )
}
#: Functions of torch that raise as well where they are called in one of ours: all changes of a
#: graph, and what is done with a graph after them.
OF_TORCH = {
    function.__code__
    for function in (
        *(fx.Graph.lint, fx.Graph.create_node, fx.Graph.erase_node, fx.Graph.call_function),
        *(fx.Graph.graph_copy, fx.Graph.inserting_before, fx.Graph.find_nodes),
        *(fx.Node.replace_all_uses_with, fx.Node.replace_input_with),
        *(fx.GraphModule.recompile, _LazyGraphModule.recompile),
    )
}


class PlantedError(Exception):
    pass


class Faults:
    """Counts the calls of the functions of the passes, or lets one of them raise.

    Args:
        target, at: which function raises, and in which of its calls.
        event: ``"call"``, before it has done anything, or ``"return"``, when it has done all.
    """

    def __init__(
        self, target: types.CodeType | None = None, at: int = 1, event: str = "call"
    ) -> None:
        self.calls: Counter[types.CodeType] = Counter()
        self.target = target
        self.at = at
        self.event = event
        self.raised = False

    def profile(self, frame: types.FrameType, event: str, _) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(SOURCES) and code.co_filename not in GUARDS
        if event not in ("call", "return") or not (is_ours or code in OF_TORCH) or code in DOORS:
            return
        # A generator is called again whenever it goes on, and when it is thrown away.
        if code.co_name == "<genexpr>" or (
            code.co_flags & inspect.CO_GENERATOR
            and (event == "return" or frame.f_lineno != code.co_firstlineno)
        ):
            return
        self.calls[code] += event == "call"
        is_there = code is self.target and self.calls[code] == self.at and event == self.event
        if is_there and not self.raised:
            self.raised = True
            raise PlantedError(code.co_name)

    @contextmanager
    def watching(self, profile: Any = None) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(before)

    @contextmanager
    def planted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """In all that torch calls of ours, but not in what is called of torch's with the result."""

        def rewritten(gm, inputs, settings, inner):
            def outside(*given):
                with self.watching():
                    return inner(*given)

            with self.watching(self.profile):
                return backend_rewrites(gm, inputs, settings, outside)

        def run(own, graph):
            with self.watching(self.profile):
                run_pass(own, graph)

        backend_rewrites, run_pass = backend.rewritten, inductor_passes.Pass.__call__
        with monkeypatch.context() as patch:
            for module in (backend, default_backend):
                patch.setattr(module, "rewritten", rewritten)
            patch.setattr(inductor_passes.Pass, "__call__", run)
            yield
