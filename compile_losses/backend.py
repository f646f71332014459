"""The two doors into torch.compile. The only file that touches Inductor's configuration.

``torch.compile(model, backend="compile_losses")`` needs no import: the name is an entry point.
``compile_losses.enable()`` makes plain ``torch.compile(model)`` do the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from compile_losses.library import fingerprint
from compile_losses.lower import Decision, in_place, plan
from compile_losses.recognize import rewrite, rewrite_graph
from compile_losses.recognize.verify import verify_by_default

#: The option of the backend that names another backend to compile the rewritten graph.
INNER_BACKEND = "inner_backend"
#: The option that compares every loss with its rewrite while compiling.
VERIFY = "verify"


class _Pass(CustomGraphPass):
    """A pass of ours before a pass of the user's, in one of Inductor's slots.

    The uuid enters the keys of Inductor's and AOTAutograd's caches, which know neither our
    autograd formulas nor our kernels.
    """

    def __init__(self, previous: Any) -> None:
        self.previous = _as_tuple(previous)
        self.replaced = previous

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
        return (type(self).__name__, fingerprint(), *_rank(), *ids)


def _rank() -> tuple[int, ...]:
    """Graphs of DTensors hold which shard a rank has; the keys of torch's caches do not."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return ()
    return (distributed.get_rank(),)


class _RewritePass(_Pass):
    def run(self, graph: Graph) -> None:
        report = rewrite_graph(graph)
        if graph.owning_module is not None:
            graph.owning_module.meta["compile_losses"] = report

    def uuid(self) -> Any:
        own = super().uuid()
        return own and (*own, verify_by_default())  # what it declines depends on that


class _LoweringPass(_Pass):
    """A pass on AOTAutograd's graphs; ``decisions`` collects what it decided, if anyone asks."""

    lower: Callable[[Graph], list[Decision]]

    def __init__(self, previous: Any, decisions: list[Decision] | None = None) -> None:
        super().__init__(previous)
        self.decisions = decisions

    def run(self, graph: Graph) -> None:
        found = self.lower(graph)
        if self.decisions is not None:
            self.decisions += found


class _PlanPass(_LoweringPass):
    lower = staticmethod(plan)


class _InPlacePass(_LoweringPass):
    lower = staticmethod(in_place)


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
) -> Callable[..., Any]:
    """A Dynamo backend: rewrites the losses, then compiles with Inductor.

    Args:
        gm, example_inputs: what Dynamo passes to a backend.
        mode: as for ``torch.compile``'s own backend.
        options: Inductor's options, and ``inner_backend``: the name of another backend to hand the
            rewritten graph to (``"aot_eager"``, ``"eager"``, ...); and ``verify``: whether to
            evaluate every loss and its rewrite on random numbers, and to leave alone what differs
            (by default if COMPILE_LOSSES_VERIFY=1 is in the environment).
    """
    options = dict(options or {})
    inner = options.pop(INNER_BACKEND, "inductor")
    rewrite(gm, verify=options.pop(VERIFY, None))
    if inner != "inductor":
        keywords = {k: v for k, v in (("mode", mode), ("options", options)) if v}
        return torch._dynamo.lookup_backend(inner)(gm, example_inputs, **keywords)
    inductor = torch._TorchCompileInductorWrapper(mode, options, dynamic=None)
    for slot, kind in _LOWERING.items():
        inductor.config[slot] = kind(_users(inductor.config.get(slot, getattr(config, slot))))
    return inductor(gm, example_inputs)


#: Inductor's slots and the passes that go there.
_LOWERING: dict[str, type[_Pass]] = {
    "joint_custom_pre_pass": _PlanPass,
    "post_grad_custom_post_pass": _InPlacePass,
}
_SLOTS: dict[str, type[_Pass]] = {"pre_grad_custom_pass": _RewritePass, **_LOWERING}


def decide(gm: GraphModule, example_inputs: list[Any]) -> list[Decision]:
    """What the passes on AOTAutograd's graphs decide about a rewritten Dynamo graph.

    Compiles a copy of it with Inductor up to those passes: no code is generated, nothing comes from
    a cache or goes into one, and ``gm`` stays as it is. Only inside a Dynamo backend.
    """
    from torch._inductor import compile_fx

    decisions: list[Decision] = []
    passes = {slot: _users(getattr(config, slot)) for slot in _SLOTS}
    passes["joint_custom_pre_pass"] = _PlanPass(passes["joint_custom_pre_pass"], decisions)
    passes["post_grad_custom_post_pass"] = _LastPass(
        passes["post_grad_custom_post_pass"], decisions
    )

    def without_code(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(_Stop):
            compile_fx.compile_fx_inner(*args, **kwargs)
        return lambda *_: None  # the compiled function, which nobody calls

    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    aot = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
    with torch._functorch.config.patch(aot):
        compile_fx.compile_fx(
            copy,
            example_inputs,
            inner_compile=without_code,
            config_patches={"force_disable_caches": True, **passes},
        )
    return decisions


def _users(current: Any) -> Any:
    """What is in a slot but for a pass of ours."""
    return current.replaced if isinstance(current, _Pass) else current


class _Enabled:
    """What enable() returns: ends with the ``with`` block, if there is one."""

    def __enter__(self) -> _Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        disable()


def enable() -> _Enabled:
    """Makes ``torch.compile`` with its default backend rewrite losses, from now on.

    Passes that are in Inductor's slots already keep running, after ours. Functions that were
    compiled before stay as they are. Usable as a context manager; enabling twice is enabling once.
    """
    for slot, kind in _SLOTS.items():
        current = getattr(config, slot)
        if not isinstance(current, _Pass):
            setattr(config, slot, kind(current))
    return _Enabled()


def disable() -> None:
    """Undoes :func:`enable`; the passes that were there before are there again."""
    for slot in _SLOTS:
        setattr(config, slot, _users(getattr(config, slot)))
