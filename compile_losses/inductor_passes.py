"""The passes that are put into Inductor's slots. The only module that reads or sets the slots.

A pass of ours keeps the pass that it found in its slot, and runs it afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.fx import Graph, GraphModule

from compile_losses import passes, switches
from compile_losses.graphs import annotate
from compile_losses.guard import attempt
from compile_losses.library import fingerprint, loaded
from compile_losses.lower import Decision, donated_buffers, in_place, lower_or_leave, plan
from compile_losses.lower.decision import log
from compile_losses.options import Settings
from compile_losses.pipeline import dump_folder
from compile_losses.report import Report
from compile_losses.report.log_line import compilation, note
from compile_losses.torch_internals.inductor import (
    JOINT,
    POST_GRAD,
    PRE_GRAD,
    CustomGraphPass,
    config,
    inside_post_grad_passes,
    inside_pre_grad_passes,
)

fused = torch.ops.fused


class Pass(CustomGraphPass):
    """A pass of ours before a pass of the user's, in one of Inductor's slots.

    The uuid enters the keys of Inductor's and AOTAutograd's caches. These keys contain neither our
    autograd formulas nor our kernels.
    """

    def __init__(self, previous: Any, settings: Settings | None = None) -> None:
        self.previous = _as_tuple(previous)
        self.replaced = previous
        self.settings = settings or Settings()
        #: The number of calls of enable() that need this pass; 0 for the backend's own pass.
        self.calls = 0

    def run(self, graph: Graph) -> None:
        """Runs the pass itself; the base class only identifies the package."""

    def __call__(self, graph: Graph) -> None:
        attempt(lambda: self.run(graph), strict=self.settings.strict)
        for other in self.previous:
            other(graph)

    def uuid(self) -> Any:
        ids = [getattr(other, "uuid", lambda: None)() for other in self.previous]
        # A pass without an id switches the caches off, also without us. So does a dump: what comes
        # from a cache passes no pass.
        if None in ids or dump_folder() is not None:
            return None
        given = (*switches.environment(), *self.settings.key)
        return (type(self).__name__, fingerprint(), loaded(), *given, *_rank(), *ids)


def _rank() -> tuple[int, ...]:
    """Graphs of DTensors depend on the rank's shard; the keys of torch's caches do not."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return ()
    return (distributed.get_rank(),)


class RewritePass(Pass):
    """Recognition, on the graph that Dynamo captured."""

    @staticmethod
    def has_run(module: GraphModule) -> bool:
        """Whether recognition has been done, as it is before Inductor is called."""
        return "compile_losses" in module.meta

    def run(self, graph: Graph) -> None:
        # A graph inside another is left to the pass on the outer graph, which runs later and knows
        # the mutations after the inner graph.
        if inside_pre_grad_passes() or not switches.runs(passes.REWRITE):
            return
        module = graph.owning_module
        if module is not None and self.has_run(module):
            return
        with switches.through(self.settings.door):
            report = self.settings.rewrite_graph(graph, module=module)
        if module is not None:
            module.meta["compile_losses"] = report
            log_and_count(module)


def log_and_count(gm: GraphModule) -> None:
    """Logs a line on the losses of a graph and counts them, if recognition ran."""
    report: Report | None = gm.meta.get("compile_losses")
    if report is None:
        return
    log.info("%s", report.summary)
    for site in report.losses:
        switches.counters()[site.status][site.op] += 1


@contextmanager
def told(gm: GraphModule) -> Iterator[None]:
    """Around the compilation of a rewritten graph, whose losses it logs and counts."""
    log_and_count(gm)
    with compilation(gm):
        yield


class LoweringPass(Pass):
    """A pass on AOTAutograd's graphs; ``decisions`` collects its decisions, if given."""

    #: The pass's name in COMPILE_LOSSES_PASSES.
    name = ""

    def __init__(
        self,
        previous: Any,
        settings: Settings | None = None,
        decisions: list[Decision] | None = None,
    ) -> None:
        super().__init__(previous, settings)
        self.decisions = decisions

    def lower(self, graph: Graph) -> list[Decision]:
        raise NotImplementedError

    def run(self, graph: Graph) -> None:
        if not switches.runs(self.name):
            return
        found = lower_or_leave(self.lower, graph, strict=self.settings.strict)
        if self.decisions is not None:
            self.decisions += found
        else:
            switches.counters()["plan"].update(decision.choice for decision in found)
            note(found)


class PlanPass(LoweringPass):
    """The plan, on the joint graph or on the inference graph."""

    name = passes.PLAN

    def lower(self, graph: Graph) -> list[Decision]:
        decisions = plan(graph, self.settings.request)
        if self.calls:
            note_backward(graph)
        return decisions


class InPlacePass(LoweringPass):
    """The in-place pass, on the forward graph and on the backward graph."""

    name = passes.IN_PLACE

    def lower(self, graph: Graph) -> list[Decision]:
        _note_compiled(graph)
        # The numbers of donated buffers count the outermost graph's inputs.
        inside = inside_post_grad_passes()
        return in_place(graph, () if inside else donated_buffers())

    def uuid(self) -> Any:
        own = super().uuid()
        return own and (*own, donated_buffers())  # the pass's result depends on them


def _as_tuple(passes: Any) -> tuple[Callable[[Graph], Any], ...]:
    if passes is None:
        return ()
    return tuple(passes) if isinstance(passes, list | tuple) else (passes,)


#: Inductor's slots for AOTAutograd's graphs, and our passes for them.
LOWERING: dict[str, type[LoweringPass]] = {
    JOINT: PlanPass,
    POST_GRAD: InPlacePass,
}
SLOTS: dict[str, type[Pass]] = {PRE_GRAD: RewritePass, **LOWERING}


def users_passes(slot: str, options: Mapping[str, Any] | None = None) -> Any:
    """The pass in a slot, without a pass of ours.

    Args:
        options: Inductor's options for one compilation. If they leave the slot out, Inductor's
            configuration counts.
    """
    current = {**(options or {})}.get(slot, getattr(config, slot))
    return current.replaced if isinstance(current, Pass) else current


def install(settings: Settings) -> None:
    """Puts the passes into all slots, for one more call of ``enable``."""
    for slot, kind in SLOTS.items():
        current = getattr(config, slot)
        if not isinstance(current, Pass):
            current = kind(current)
            setattr(config, slot, current)
        current.calls += 1
    set_settings(settings)


def set_settings(settings: Settings) -> None:
    """Gives the passes that ``enable`` has put into the slots other settings."""
    for slot in SLOTS:
        current = getattr(config, slot)
        if isinstance(current, Pass):
            current.settings = settings


def take_out() -> None:
    """Puts back the earlier passes. Ours stays in the last slot while backwards may be to come."""
    for slot in SLOTS:
        if slot != POST_GRAD:
            setattr(config, slot, users_passes(slot))
    _leave()


def installed_rewrite() -> RewritePass | None:
    """The first pass, if ``enable`` has put it into its slot."""
    first = getattr(config, PRE_GRAD)
    return first if isinstance(first, RewritePass) else None


class _Backward:
    """An object in the meta of nodes. It lives as long as a backward may still be compiled."""


#: The backwards planned by passes that ``enable`` has put into the slots.
_to_come: WeakSet[_Backward] = WeakSet()


def note_backward(graph: Graph) -> None:
    """Notes that a backward is yet to be compiled, if a joint graph scales gradients in it."""
    scales = [node for node in graph.nodes if node.target is fused.scale.default]
    if scales:
        backward = _Backward()
        weakref.finalize(backward, _leave)  # the last of its callbacks: the set forgets it before
        _to_come.add(backward)
        for scale in scales:
            annotate(scale, "compile_losses_backward", backward)


def _note_compiled(graph: Graph) -> None:
    backwards = {node.meta.get("compile_losses_backward") for node in graph.nodes} - {None}
    if backwards:
        _to_come.difference_update(backwards)
        _leave()


def forget_backwards() -> None:
    """Takes the last pass out although backwards may be to come, as after Dynamo is reset."""
    _to_come.clear()
    _leave()


def _leave() -> None:
    """Takes the last pass out of its slot, if it was left for backwards and none is to come.

    Runs whenever a backward is collected, perhaps during a compilation that has a pass of its own
    in the slot. That pass stays.
    """
    current = getattr(config, POST_GRAD)
    left = isinstance(current, Pass) and current.calls > 0
    if left and installed_rewrite() is None and not _to_come:
        setattr(config, POST_GRAD, users_passes(POST_GRAD))
