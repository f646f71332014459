"""The two doors into torch.compile. The only file that touches Inductor's configuration.

``torch.compile(model, backend="compile_losses")`` needs no import: the name is an entry point.
``compile_losses.enable()`` makes plain ``torch.compile(model)`` do the same.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch.fx import Graph, GraphModule

from compile_losses import switches
from compile_losses.lazy import Compiled, open_lazy_inputs, plain, return_lazily
from compile_losses.library import fingerprint, loaded
from compile_losses.lower import Decision, donated_buffers, in_place, lower_or_leave, plan
from compile_losses.lower.decision import log
from compile_losses.recognize import rewrite, rewrite_graph
from compile_losses.recognize.linear import prefer_memory_by_default
from compile_losses.recognize.returned_logits import Lazily
from compile_losses.report import Report
from compile_losses.torch_internals import warn_if_untested
from compile_losses.torch_internals.dynamo import ShortenTraceback, is_captured, lookup_backend
from compile_losses.torch_internals.inductor import (
    JOINT,
    POST_GRAD,
    PRE_GRAD,
    CustomGraphPass,
    InductorBackend,
    compile_fx,
    compile_with_inductor,
    config,
    go_around_inductor,
    inside_post_grad_passes,
    inside_pre_grad_passes,
    is_to_be_saved,
    uses_cuda_graphs,
    without_autograd_cache,
)

fused = torch.ops.fused

#: The option of the backend that names another backend to compile the rewritten graph.
INNER_BACKEND = "inner_backend"
#: The option that compares every loss with its rewrite while compiling.
VERIFY = "verify"
#: The option that raises what goes wrong inside this package.
STRICT = "strict"
#: The option that takes linear cross entropy where it saves memory and may cost time.
PREFER_MEMORY = "prefer_memory"
#: The options that name the losses to rewrite, and those to leave alone.
LOSSES, EXCEPT = "losses", "except"


class _Pass(CustomGraphPass):
    """A pass of ours before a pass of the user's, in one of Inductor's slots.

    The uuid enters the keys of Inductor's and AOTAutograd's caches, which know neither our
    autograd formulas nor our kernels.
    """

    def __init__(self, previous: Any, *, strict: bool | None = None) -> None:
        self.previous = _as_tuple(previous)
        self.replaced = previous
        self.strict = strict
        #: How many calls of enable() this pass is there for; 0 for the backend's own.
        self.calls = 0

    def run(self, graph: Graph) -> None:
        """What the pass itself does; the base class only identifies the package."""

    def __call__(self, graph: Graph) -> None:
        self.run(graph)
        for other in self.previous:
            other(graph)

    def uuid(self) -> Any:
        ids = [getattr(other, "uuid", lambda: None)() for other in self.previous]
        if None in ids:  # as without us: an unidentified pass switches the caches off
            return None
        environment = switches.environment()
        return (type(self).__name__, fingerprint(), loaded(), *environment, *_rank(), *ids)


def _rank() -> tuple[int, ...]:
    """Graphs of DTensors hold which shard a rank has; the keys of torch's caches do not."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return ()
    return (distributed.get_rank(),)


class _RewritePass(_Pass):
    #: What enable() was told of lazy logits; None is the environment's.
    lazy_logits: bool | None = None

    def run(self, graph: Graph) -> None:
        # What is written to around such a graph only the graph around it tells; which comes later.
        if inside_pre_grad_passes() or not switches.runs(switches.REWRITE):
            return
        module = graph.owning_module
        if module is not None and "compile_losses" in module.meta:
            return  # as what is compiled around Inductor has rewritten it
        report = rewrite_graph(graph, strict=self.strict, lowers=switches.runs(switches.PLAN))
        if module is not None:
            module.meta["compile_losses"] = report
            _tell_of(module)


def _tell_of(gm: GraphModule) -> None:
    """Logs a line, and counts, what became of the losses of a graph, if they were looked for."""
    report: Report | None = gm.meta.get("compile_losses")
    if report is None:
        return
    log.info("%s", report.summary)
    for site in report.losses:
        switches.counters()[site.status][site.op] += 1


class _LoweringPass(_Pass):
    """A pass on AOTAutograd's graphs; ``decisions`` collects what it decided, if anyone asks."""

    #: Its name for COMPILE_LOSSES_PASSES.
    name = ""

    def __init__(
        self, previous: Any, decisions: list[Decision] | None = None, *, strict: bool | None = None
    ) -> None:
        super().__init__(previous, strict=strict)
        self.decisions = decisions

    def lower(self, graph: Graph) -> list[Decision]:
        raise NotImplementedError

    def run(self, graph: Graph) -> None:
        if not switches.runs(self.name):
            return
        found = lower_or_leave(self.lower, graph, strict=self.strict)
        if self.decisions is not None:
            self.decisions += found
        else:
            switches.counters()["plan"].update(decision.choice for decision in found)


class _PlanPass(_LoweringPass):
    name = switches.PLAN
    #: The backend's option of that name; None is the environment's.
    prefer_memory: bool | None = None
    #: The losses that the backend's options leave; None are the environment's.
    losses: frozenset[str] | None = None

    def lower(self, graph: Graph) -> list[Decision]:
        decisions = plan(
            graph, prefer_memory=self._prefers_memory(), elementwise=self._takes_elementwise()
        )
        if self.calls:
            _note_backward(graph)
        return decisions

    def _prefers_memory(self) -> bool:
        return prefer_memory_by_default() if self.prefer_memory is None else self.prefer_memory

    def _takes_elementwise(self) -> bool:
        losses = switches.chosen() if self.losses is None else self.losses
        return switches.ELEMENTWISE in losses

    def uuid(self) -> Any:
        own = super().uuid()
        return own and (*own, self._prefers_memory(), self._takes_elementwise())


class _InPlacePass(_LoweringPass):
    name = switches.IN_PLACE

    def lower(self, graph: Graph) -> list[Decision]:
        _note_compiled(graph)
        # The numbers of donated buffers are those of the outermost graph's inputs.
        inside = inside_post_grad_passes()
        return in_place(graph, () if inside else donated_buffers())

    def uuid(self) -> Any:
        own = super().uuid()
        return own and (*own, donated_buffers())  # what it overwrites depends on that


class _Stop(BaseException):
    """Ends a compilation of which only the graphs were wanted."""


class _LastPass(_InPlacePass):
    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        raise _Stop


def _as_tuple(passes: Any) -> tuple[Callable[[Graph], Any], ...]:
    if passes is None:
        return ()
    return tuple(passes) if isinstance(passes, list | tuple) else (passes,)


def compile_losses(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Compiled:
    """A Dynamo backend: rewrites the losses, then compiles with Inductor.

    Args:
        gm, example_inputs: what Dynamo passes to a backend.
        mode: as for ``torch.compile``'s own backend.
        options: Inductor's options, and those of this package, for each of which a variable in the
            environment is the default; docs/getting-started.md has them in a table:

            - ``inner_backend``: the name of another backend to hand the rewritten graph to
              (``"aot_eager"``, ``"eager"``, ...).
            - ``losses``, ``except``: the names of the losses to rewrite, and of those to leave
              alone: ops, and ``"elementwise"`` (COMPILE_LOSSES_ONLY, COMPILE_LOSSES_EXCEPT).
            - ``lazy_logits``: whether logits that a graph returns beside their loss are computed
              when they are read, as :class:`compile_losses.lazy.LazyLogits`, where the loss can be
              computed without them (COMPILE_LOSSES_LAZY_LOGITS=1).
            - ``prefer_memory``: whether linear cross entropy is also taken where it saves less than
              half of the logits, or has to compute them twice for the gradients of unreduced
              losses, which may cost time (COMPILE_LOSSES_PREFER_MEMORY=1).
            - ``verify``: whether to evaluate every loss and its rewrite on random numbers, and to
              leave alone what differs (COMPILE_LOSSES_VERIFY=1).
            - ``strict``: whether to raise what goes wrong inside this package, instead of leaving a
              loss to torch (COMPILE_LOSSES_STRICT=1).

    Raises:
        RuntimeError: a mode or an option that Inductor does not have; a loss that there is not.
    """
    warn_if_untested()
    settings = Settings.of(mode, options)

    def inner(gm: GraphModule, example_inputs: list[Any]) -> Compiled:
        _tell_of(gm)
        if settings.inductor is not None:
            return _through_inductor(gm, example_inputs, settings)
        given = (("mode", mode), ("options", settings.others))
        keywords = {k: v for k, v in given if v}
        return lookup_backend(settings.inner_backend)(gm, example_inputs, **keywords)

    if not switches.runs(switches.REWRITE):
        return inner(gm, example_inputs)
    return rewritten(gm, example_inputs, settings, inner)


def _through_inductor(gm: GraphModule, example_inputs: list[Any], settings: Settings) -> Compiled:
    inductor = settings.inductor
    for slot, kind in _LOWERING.items():
        users = _users(inductor.config.get(slot, getattr(config, slot)))
        own = inductor.config[slot] = kind(users, strict=settings.strict)
        if isinstance(own, _PlanPass):
            own.prefer_memory, own.losses = settings.prefer_memory, settings.losses
    compiled = compile_with_inductor(inductor, gm, example_inputs)
    if getattr(compiled, "serialize", None) is not None:  # compiled ahead of time, to be saved
        from compile_losses.artifact import Artifact

        return Artifact(compiled)
    return compiled


def rewritten(
    gm: GraphModule,
    example_inputs: list[Any],
    settings: Settings,
    inner: Callable[[GraphModule, list[Any]], Compiled],
) -> Compiled:
    """Rewrites the losses of a Dynamo graph, and compiles it.

    Args:
        inner: compiles the rewritten graph.

    Returns:
        What was compiled; where logits come or go lazily, with what opens or makes these around it.
    """
    opened, examples, around = open_lazy_inputs(gm, example_inputs)
    lazily = settings.lazily(opened)
    settings.rewrite(opened, lazily)
    if lazily is not None and lazily.outputs:
        compiled = return_lazily(opened, lazily.outputs, lambda graph: inner(graph, examples))
    else:
        compiled = inner(opened, examples)
    if around is not None:
        gm.meta["compile_losses"] = opened.meta["compile_losses"]
        return around(compiled)
    if lazily is not None and not is_captured(gm):  # Dynamo knows no lazy inputs of a part
        return lambda *given: compiled(*map(plain, given))
    return compiled


@dataclass(frozen=True)
class Settings:
    """The options of the backend, read; None is what the environment says.

    Attributes:
        inductor: Inductor with its own options and the mode; None where another backend compiles.
        others: the options that are not this package's.
    """

    inner_backend: str
    verify: bool | None
    strict: bool | None
    prefer_memory: bool | None
    lazy_logits: bool | None
    losses: frozenset[str]
    inductor: Any
    others: dict[str, Any]

    @classmethod
    def of(cls, mode: str | None, options: dict[str, Any] | None) -> Settings:
        """
        Raises:
            InvalidOptionError: a mode, an option or a loss that there is not.
        """
        others = dict(options or {})
        inner = others.pop(INNER_BACKEND, "inductor")
        verify, strict = others.pop(VERIFY, None), others.pop(STRICT, None)
        prefer_memory = others.pop(PREFER_MEMORY, None)
        lazy_logits = others.pop(switches.LAZY_LOGITS, None)
        only, excluded = others.pop(LOSSES, None), others.pop(EXCEPT, None)
        try:
            switches.check_environment()
            losses = switches.chosen(only, excluded)
            inductor = InductorBackend(mode, others, dynamic=None) if inner == "inductor" else None
        except RuntimeError as error:
            raise InvalidOptionError(str(error)) from None
        return cls(inner, verify, strict, prefer_memory, lazy_logits, losses, inductor, others)

    def lazily(self, gm: GraphModule) -> Lazily | None:
        """How logits that a Dynamo graph returns become lazy; None where nobody asks for that."""
        if not switches.returns_lazy_logits(self.lazy_logits):
            return None
        if is_to_be_saved():
            return Lazily("the compiled graph is to be saved")
        if self.inductor is not None and uses_cuda_graphs(self.inductor.config):
            return Lazily("a CUDA graph uses the memory of what it returned anew")
        return Lazily()

    def rewrite(self, gm: GraphModule, lazily: Lazily | None = None) -> Report:
        """Rewrites a Dynamo graph."""
        rewrite(
            gm,
            verify=self.verify,
            strict=self.strict,
            prefer_memory=self.prefer_memory,
            losses=self.losses,
            lowers=self.inductor is not None and switches.runs(switches.PLAN),
            lazily=lazily,
        )
        report: Report = gm.meta["compile_losses"]
        return report


class InvalidOptionError(ShortenTraceback):
    """A mode or an option that there is not; a RuntimeError, as stock torch.compile's."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


#: Inductor's slots and the passes that go there.
_LOWERING: dict[str, type[_Pass]] = {
    JOINT: _PlanPass,
    POST_GRAD: _InPlacePass,
}
_SLOTS: dict[str, type[_Pass]] = {PRE_GRAD: _RewritePass, **_LOWERING}


def decide(
    gm: GraphModule, example_inputs: list[Any], settings: Settings | None = None
) -> list[Decision]:
    """What the passes on AOTAutograd's graphs decide about a rewritten Dynamo graph.

    Compiles a copy of it with Inductor up to those passes: no code is generated, nothing comes from
    a cache or goes into one, and ``gm`` stays as it is. Only inside a Dynamo backend.
    """
    decisions: list[Decision] = []
    settings = settings or Settings.of(None, None)
    given: dict[str, Any] = {} if settings.inductor is None else settings.inductor.config
    passes = {slot: _users(given.get(slot, getattr(config, slot))) for slot in _SLOTS}
    passes[JOINT] = planning = _PlanPass(passes[JOINT], decisions)
    planning.prefer_memory, planning.losses = settings.prefer_memory, settings.losses
    passes[POST_GRAD] = _LastPass(passes[POST_GRAD], decisions)

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


def _users(current: Any) -> Any:
    """What is in a slot but for a pass of ours."""
    return current.replaced if isinstance(current, _Pass) else current


class _Backward:
    """Lives, in the meta of nodes, as long as a backward may still be compiled."""


#: Those planned by the passes of :func:`enable`.
_to_come: WeakSet[_Backward] = WeakSet()


def _note_backward(graph: Graph) -> None:
    """Notes that a backward is yet to be compiled, if a joint graph scales gradients in it."""
    scales = [node for node in graph.nodes if node.target is fused.scale.default]
    if scales:
        backward = _Backward()
        weakref.finalize(backward, _leave)  # the last of its callbacks: the set forgets it before
        _to_come.add(backward)
        for scale in scales:
            scale.meta["compile_losses_backward"] = backward


def _note_compiled(graph: Graph) -> None:
    backwards = {node.meta.get("compile_losses_backward") for node in graph.nodes} - {None}
    if backwards:
        _to_come.difference_update(backwards)
        _leave()


def _leave() -> None:
    """Takes the last pass out of its slot, if it was left for backwards and none is to come.

    May be called at any time, when a backward is garbage: also while a compilation has a pass of
    its own in the slot, which stays.
    """
    current = getattr(config, POST_GRAD)
    left = isinstance(current, _Pass) and current.calls > 0
    if left and not _is_enabled() and not _to_come:
        setattr(config, POST_GRAD, _users(current))


def _is_enabled() -> bool:
    return isinstance(getattr(config, PRE_GRAD), _Pass)


class _Enabled:
    """What enable() returns: a ``with`` block ends what the call began."""

    def __enter__(self) -> _Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        first = getattr(config, PRE_GRAD)
        if isinstance(first, _RewritePass):
            first.calls -= 1
            if first.calls > 0:
                return
        disable()


def _compile_lazily(
    inductor: Any, gm: GraphModule, example_inputs: list[Any], **options: Any
) -> Compiled:
    """What ``torch.compile`` calls with enable(lazy_logits=True), in the place of Inductor."""
    first = getattr(config, PRE_GRAD)
    is_on = isinstance(first, _RewritePass) and switches.runs(switches.REWRITE)
    if not is_on or not switches.returns_lazy_logits(first.lazy_logits):
        return compile_with_inductor(inductor, gm, example_inputs, **options)
    settings = replace(Settings.of(None, None), lazy_logits=True, inductor=inductor)

    def inner(gm: GraphModule, example_inputs: list[Any]) -> Compiled:
        _tell_of(gm)
        return compile_with_inductor(inductor, gm, example_inputs, **options)

    return rewritten(gm, example_inputs, settings, inner)


def enable(*, lazy_logits: bool | None = None) -> _Enabled:
    """Makes ``torch.compile`` with its default backend rewrite losses, from now on.

    Passes that are in Inductor's slots already keep running, after ours. Functions that were
    compiled before stay as they are. Usable as a context manager; enabling twice is enabling once,
    and the inner of two ``with`` blocks leaves the outer one on.

    Inductor's configuration is that of a thread since torch 2.13: a thread that compiles calls
    ``enable`` itself.

    Args:
        lazy_logits: as the backend's option; by default if COMPILE_LOSSES_LAZY_LOGITS=1 is in the
            environment.

    Raises:
        RuntimeError: a variable in the environment names a loss or a pass that there is not.
    """
    switches.check_environment()
    warn_if_untested()
    for slot, kind in _SLOTS.items():
        current = getattr(config, slot)
        if not isinstance(current, _Pass):
            current = kind(current)
            setattr(config, slot, current)
        current.calls += 1
        if isinstance(current, _RewritePass) and lazy_logits is not None:
            current.lazy_logits = lazy_logits
    if switches.returns_lazy_logits(lazy_logits):
        # A pass on a graph can't change what its caller gets.
        go_around_inductor(_compile_lazily)
    return _Enabled()


def disable() -> None:
    """Undoes :func:`enable`; the passes that were there before are there again.

    A backward that is yet to be compiled still gets our last pass. Until no such backward is left
    that pass stays in its slot, where it does nothing to other graphs; calling this again then
    takes it out.
    """
    for slot in _SLOTS:
        if slot != POST_GRAD:
            setattr(config, slot, _users(getattr(config, slot)))
    _leave()
