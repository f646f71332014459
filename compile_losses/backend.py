"""The backend: ``torch.compile(model, backend="compile_losses")``.

The name is an entry point, so the model's code needs no import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from torch.fx import GraphModule

from compile_losses import passes, switches
from compile_losses.distributed import are_dtensors
from compile_losses.graphs import value_of
from compile_losses.guard import Failure, attempt, failure_of, is_strict, warn_of
from compile_losses.inductor_passes import LOWERING, told, users_passes
from compile_losses.known_heads import doors
from compile_losses.lazy import Compiled, open_lazy_inputs, plain, return_lazily
from compile_losses.options import InvalidOptionError as InvalidOptionError
from compile_losses.options import Settings
from compile_losses.recognize import failed
from compile_losses.recognize.steps import Graphs
from compile_losses.torch_internals import warn_if_untested
from compile_losses.torch_internals.dynamo import backend_of, is_captured, lookup_backend
from compile_losses.torch_internals.inductor import InductorError, compile_with_inductor
from compile_losses.traced import settings_by

if TYPE_CHECKING:
    from compile_losses.distributed.agreement import Agreement

T = TypeVar("T")


def compile_losses(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Compiled:
    """A Dynamo backend: rewrites the losses, then compiles with Inductor.

    Args:
        gm, example_inputs: as Dynamo passes them to a backend.
        mode: as for ``torch.compile``'s own backend.
        options: Inductor's options, and this package's options, which ``enable`` has as well. The
            defaults of the latter are environment variables; docs/getting-started.md has a table:

            - ``losses``, ``except``: the names of the losses to rewrite, and of the losses to leave
              alone: ops, and ``"elementwise"`` (COMPILE_LOSSES_ONLY, COMPILE_LOSSES_EXCEPT).
              ``except`` may also have places, such as ``"train.py:16"``.
            - ``lazy_logits``: whether logits that a graph returns beside their loss are computed
              when they are read, as :class:`compile_losses.lazy.LazyLogits`, if the loss can be
              computed without them. ``"auto"``: where that pays, and before the head changes; True:
              also for logits that go to the next graph, and until they are read
              (COMPILE_LOSSES_LAZY_LOGITS=auto or 1).
            - ``known_heads``: whether calls of heads that other libraries have fused, which are in
              ``compile_losses.known_heads``, become ops of ours (COMPILE_LOSSES_KNOWN_HEADS=0:
              they do not).
            - ``prefer_memory``: whether heads also go without their logits where that saves less
              than half of them, where they have to be computed twice for the gradients of unreduced
              losses, and where their rows are read by what is no known loss; and whether the
              gradients of logits that the caller holds wait for the backward. Each may cost time
              (COMPILE_LOSSES_PREFER_MEMORY=1).
            - ``batch_invariant``: whether the numbers of each row of a head, such as its tokens'
              log-probabilities, are the same bits whatever rows are computed with it, with and
              without gradients; for all calls of the process, compiled or not, until it is given
              otherwise (COMPILE_LOSSES_BATCH_INVARIANT=1).
            - ``kernels``: whether the built kernels compute; without them torch's own ops do; for
              all calls of the process, compiled or not, until it is given otherwise
              (COMPILE_LOSSES_KERNELS=0).
            - ``verify``: whether to evaluate every loss and its rewrite on random numbers, and to
              leave a loss to torch if they differ (COMPILE_LOSSES_VERIFY=1).
            - ``strict``: whether to raise errors inside this package, instead of leaving a
              loss to torch (COMPILE_LOSSES_STRICT=1).
            - ``inner_backend``: another backend to hand the rewritten graph to: a name
              (``"aot_eager"``, ``"eager"``, ...), or a function.

    Raises:
        InvalidOptionError: an unknown mode, option, loss or backend; a value of a wrong kind. It is
            a RuntimeError.
    """
    warn_if_untested()
    settings = Settings.of(mode, options)

    def inner(gm: GraphModule, example_inputs: list[Any]) -> Compiled:
        with told(gm):
            if settings.inductor is not None:
                return _through_inductor(gm, example_inputs, settings)
            given = (("mode", mode), ("options", settings.others))
            keywords = {k: v for k, v in given if v}
            return lookup_backend(settings.inner_backend)(gm, example_inputs, **keywords)

    if not switches.runs(passes.REWRITE):
        return inner(gm, example_inputs)
    return rewritten(gm, example_inputs, settings, inner)


def _through_inductor(gm: GraphModule, example_inputs: list[Any], settings: Settings) -> Compiled:
    inductor = settings.inductor
    for slot, kind in LOWERING.items():
        users = users_passes(slot, inductor.config)
        inductor.config[slot] = kind(users, settings)
    return saved_with_package(compile_with_inductor(inductor, gm, example_inputs))


def saved_with_package(compiled: Compiled) -> Compiled:
    """What Inductor compiled, in a form that imports this package if it is saved and loaded."""
    if getattr(compiled, "serialize", None) is None:  # not ahead of time
        return compiled
    from compile_losses.artifact import Artifact

    return Artifact(compiled)


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
        The compiled graph. If logits are lazy, a wrapper opens lazy inputs or makes lazy outputs.
        If Inductor can't compile the graph as it was rewritten and planned, it is compiled as torch
        has it.
    """
    with switches.through(settings.door):
        made: list[Compiled] = []
        before: list[Graphs] = []

        def compiled(*given: Any) -> Any:
            return made[0](*given)

        def prepare() -> _Prepared:
            before.append(Graphs(gm.graph, gm))
            return _prepared(gm, example_inputs, settings, compiled)

        def put_back(failure: Failure) -> _Prepared:
            for graphs in before:
                graphs.restore()
            return _as_torch_has_it(gm, example_inputs, failure, compiled)

        agreement = attempt(lambda: _agreement_on(gm), strict=settings.strict)
        if isinstance(agreement, Failure):
            agreement = None
        prepared = attempt(prepare, strict=settings.strict)
        if agreement is not None:
            prepared = _as_others("rewritten", agreement, prepared, gm)
        if isinstance(prepared, Failure):
            prepared = put_back(prepared)
        graph, examples, function = prepared
        failure: Failure | None = None
        try:
            made.append(inner(graph, examples))
        except InductorError as error:
            if is_strict(settings.strict):
                raise
            failure = failure_of(error)
        if agreement is not None:
            failure = _as_others("compiled", agreement, failure, gm)
        if failure is not None:
            graph, examples, function = put_back(failure)
            made.clear()
            with switches.without_passes():
                made.append(inner(graph, examples))  # raises if torch can't compile it either
            warn_of(failure)
        return made[0] if function is compiled else function


def _agreement_on(gm: GraphModule) -> Agreement | None:
    if not any(are_dtensors(value_of(node)) for node in gm.graph.nodes):
        return None
    from compile_losses.distributed.agreement import agreement_on

    return agreement_on(gm)


def _as_others(stage: str, agreement: Agreement, result: T, gm: GraphModule) -> T | Failure:
    """A result of this rank, or a failure if it is another one than that of the other ranks.

    Raises:
        RuntimeError: this rank compiles alone, and made something else of the graph than before.
    """
    report = gm.meta.get("compile_losses")
    found = [] if report is None else [f"{s.op} {s.status}" for s in report.losses] + report.errors
    fails = isinstance(result, Failure)
    outcome = result.reason if isinstance(result, Failure) else ", ".join(found)
    reason = attempt(lambda: agreement.difference(stage, outcome, fails=fails))
    if conflict := agreement.conflict(stage, outcome):
        raise RuntimeError(f"compile_losses: {conflict}")
    if reason is None or isinstance(reason, Failure):
        return result if reason is None else reason
    failure = Failure(reason)
    if not isinstance(result, Failure):
        warn_of(failure)
    return failure


#: A graph to compile, examples of its inputs, and a function that takes the inputs of another.
_Prepared: TypeAlias = tuple[GraphModule, list[Any], Compiled]


def _prepared(
    gm: GraphModule, example_inputs: list[Any], settings: Settings, compiled: Compiled
) -> _Prepared:
    """The graph to compile, examples of its inputs, and the function that takes gm's inputs.

    Args:
        compiled: will be the compiled graph.
    """
    opened, examples, around = open_lazy_inputs(gm, example_inputs)
    lazily = settings.lazily(opened)
    gm.meta["compile_losses"] = settings.rewrite(opened, lazily)
    function = compiled
    if lazily is not None and lazily.outputs:
        function = return_lazily(opened, lazily.outputs, lambda _: compiled, lazily.automatic)
    if around is not None:
        return opened, examples, around(function)
    if lazily is not None and not is_captured(gm):  # a part takes plain logits
        return opened, examples, lambda *given: function(*map(plain, given))
    return opened, examples, function


def _as_torch_has_it(
    gm: GraphModule, example_inputs: list[Any], failure: Failure, compiled: Compiled
) -> _Prepared:
    """The same without rewrites: the graph takes the numbers of lazy inputs."""
    opened, examples, around = open_lazy_inputs(gm, example_inputs, as_numbers=True)
    for each in (gm, opened):
        each.meta["compile_losses"] = failed(failure)
    return opened, examples, compiled if around is None else around(compiled)


def _settings_of(backend: Any) -> Settings | None:
    """The settings by which a backend of ours rewrites; None if it is another's.

    Args:
        backend: as ``torch.compile`` has it, with its options, or a function of ours that has
            settings as an attribute.
    """
    function = getattr(backend, "compiler_fn", backend)
    if function is compile_losses:
        given = getattr(backend, "kwargs", {})
        return Settings.of(given.get("mode"), given.get("options"))
    return getattr(function, "settings", None)


def given_to(function: Callable[..., Any]) -> tuple[str | None, dict[str, Any] | None]:
    """The mode and the options with which a function was compiled for our backend; both None if it
    was not."""
    backend = backend_of(function)
    if getattr(backend, "compiler_fn", None) is not compile_losses:
        return None, None
    given = getattr(backend, "kwargs", {})
    return given.get("mode"), dict(given.get("options") or {})


settings_by(_settings_of)
# What is traced for this backend is traced before it is called.
doors.watch()
