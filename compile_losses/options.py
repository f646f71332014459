"""The options of both doors: their names, their values, and the record that the passes read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch.fx import Graph, GraphModule

from compile_losses import implementations, switches
from compile_losses.lazy.automatic import Automatic, why_over
from compile_losses.recognize import rewrite_graph
from compile_losses.recognize.returned_logits import Lazily
from compile_losses.recognize.steps import Graphs
from compile_losses.report import Report
from compile_losses.request import Request
from compile_losses.switches import (
    AUTO,
    BATCH_INVARIANT,
    EXCEPT,
    KERNELS,
    KNOWN_HEADS,
    LAZY_LOGITS,
    LOSSES,
    PREFER_MEMORY,
    guess,
)
from compile_losses.torch_internals.dynamo import (
    ShortenTraceback,
    code_that_is_compiled,
    list_backends,
    lookup_backend,
)
from compile_losses.torch_internals.eager import keeps_saved_tensors_elsewhere
from compile_losses.torch_internals.inductor import (
    InductorBackend,
    is_to_be_saved,
    list_options,
    uses_cuda_graphs,
)

#: The option that names another backend to compile the rewritten graph.
INNER_BACKEND = "inner_backend"
#: The option that compares every loss with its rewrite while compiling.
VERIFY = "verify"
#: The option that raises errors inside this package.
STRICT = "strict"
#: The default of ``inner_backend``.
INDUCTOR = "inductor"
#: The pass that gives unreduced losses of a head their gradients, or their logits.
_LOWERS = "plan.row_gradients"


class InvalidOptionError(ShortenTraceback):
    """An unknown mode, option or loss, or a wrong value; a RuntimeError, as in stock
    torch.compile."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


def _flag(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RuntimeError(f"{option}: expected True or False, got {value!r}")
    return value


def _laziness(option: str, value: Any) -> bool | str:
    if not isinstance(value, bool) and value != AUTO:
        raise RuntimeError(f"{option}: expected True, False or {AUTO!r}, got {value!r}")
    return value


def _losses(option: str, value: Any) -> tuple[str, ...]:
    names = switches.listed(option, value)
    switches.check_names(option, names, switches.losses())
    return tuple(names)


def _excluded(option: str, value: Any) -> tuple[str, ...]:
    names = switches.listed(option, value)
    switches.check_excluded(option, names)
    return tuple(names)


def _backend(option: str, value: Any) -> Any:
    if callable(value):
        return value
    if not isinstance(value, str):
        raise RuntimeError(f"{option}: expected the name of a backend, got {value!r}")
    if value != INDUCTOR:
        known = list_backends(None)
        try:
            lookup_backend(value)
        except Exception as error:
            if value in known:  # it is there, and can't be imported
                raise RuntimeError(f"{option}: {error}") from None
            raise RuntimeError(
                f"{option}: expected a backend of torch.compile ({', '.join(known)}), "
                f"got {value!r}{guess(value, known)}"
            ) from None
    return value


#: The options of both doors. Each has a function from a value to what Settings holds.
OPTIONS: dict[str, Callable[[str, Any], Any]] = {
    LOSSES: _losses,
    EXCEPT: _excluded,
    LAZY_LOGITS: _laziness,
    KNOWN_HEADS: _flag,
    PREFER_MEMORY: _flag,
    BATCH_INVARIANT: _flag,
    KERNELS: _flag,
    VERIFY: _flag,
    STRICT: _flag,
    INNER_BACKEND: _backend,
}
#: The fields of Settings for options whose names say less, or are Python's.
_FIELDS = {LOSSES: "only", EXCEPT: "excluded"}
#: The variables of options that have another name there.
_VARIABLES = {LOSSES: "COMPILE_LOSSES_ONLY", EXCEPT: "COMPILE_LOSSES_EXCEPT"}


@dataclass(frozen=True)
class Settings:
    """The options that were given at a door; None is the environment's setting.

    Attributes:
        inner_backend: the backend that compiles the rewritten graph: a name, or a function.
        only, excluded: the options ``losses`` and ``except``.
        door: how the options were given, for hints: one of ``switches.DOORS``.
        inductor: Inductor with its own options and the mode; None if another backend compiles, and
            until Inductor is called.
        others: the options that are not this package's.
    """

    inner_backend: Any = INDUCTOR
    verify: bool | None = None
    strict: bool | None = None
    prefer_memory: bool | None = None
    lazy_logits: bool | str | None = None
    known_heads: bool | None = None
    batch_invariant: bool | None = None
    kernels: bool | None = None
    only: tuple[str, ...] | None = None
    excluded: tuple[str, ...] | None = None
    door: str = switches.BACKEND
    inductor: Any = None
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, mode: str | None, options: Mapping[str, Any] | None) -> Settings:
        """The settings of our backend.

        Raises:
            InvalidOptionError: an unknown mode, option or loss; a value of a wrong kind.
        """
        if options is not None and not isinstance(options, Mapping):
            raise InvalidOptionError(f"options: expected a dictionary, got {options!r}")
        given = dict(options or {})
        own = {name: given.pop(name) for name in OPTIONS if name in given}
        try:
            switches.check_environment()
            settings = cls(others=given).changed(own)
            settings.apply()
            if settings.inner_backend != INDUCTOR:
                return settings
            inductors = list_options()
            for name in given:
                if str(name).replace("-", "_") not in inductors:
                    raise unknown(name, inductors)
            return replace(settings, inductor=InductorBackend(mode, given, dynamic=None))
        except RuntimeError as error:
            raise InvalidOptionError(str(error)) from None

    def changed(self, options: Mapping[str, Any]) -> Settings:
        """These settings with some options of ours given anew; an option that is None stays.

        Raises:
            RuntimeError: an unknown option, loss or backend; a value of a wrong kind.
        """
        fields = {}
        for name, value in options.items():
            if name not in OPTIONS:
                raise unknown(name)
            if value is not None:
                fields[_FIELDS.get(name, name)] = OPTIONS[name](name, value)
        return replace(self, **fields)

    def apply(self) -> None:
        """Sets what holds for all of the process."""
        if self.batch_invariant is not None:
            switches.be_batch_invariant(self.batch_invariant)
        if self.kernels is not None:
            implementations.use_kernels(self.kernels)

    @classmethod
    def variables(cls, options: Mapping[str, Any]) -> dict[str, str]:
        """Options of ours as variables in the environment.

        Raises:
            InvalidOptionError: an unknown option or loss; a value of a wrong kind; an option that
                has no variable.
        """
        try:
            cls().changed(options)
        except RuntimeError as error:
            raise InvalidOptionError(str(error)) from None
        found = {}
        for name, value in options.items():
            if name == INNER_BACKEND:
                raise InvalidOptionError(f"{name} has no variable in the environment")
            if name in (LOSSES, EXCEPT):
                # An empty list of losses is not the variable that is not set.
                if not value and name == LOSSES:
                    raise InvalidOptionError("losses: expected at least one, got []")
                variable, text = _VARIABLES[name], ",".join(value)
            else:
                variable = f"COMPILE_LOSSES_{name.upper()}"
                text = value if isinstance(value, str) else str(int(value))
            found[variable] = text
        return found

    @property
    def losses(self) -> frozenset[str]:
        """The losses that are rewritten."""
        return switches.chosen(self.only, self.excluded)

    @property
    def places(self) -> frozenset[str]:
        """The places whose losses are left alone."""
        return switches.places(self.excluded)

    @property
    def request(self) -> Request:
        """What is asked of the passes, with the environment's settings."""
        return Request.of(
            losses=self.losses,
            prefer_memory=self.prefer_memory,
            verify=self.verify,
            strict=self.strict,
            lowers=self.inner_backend == INDUCTOR and switches.runs(_LOWERS),
        )

    @property
    def takes_heads(self) -> bool:
        return switches.takes_heads(self.known_heads)

    @property
    def key(self) -> tuple[Any, ...]:
        """What compiled graphs depend on, for the keys of caches."""
        request = self.request
        is_lazy = switches.lazy_logits(self.lazy_logits)
        names = (*sorted(self.losses), *sorted(self.places))
        # What was compiled in spite of a fault is not what a user who wants to see it asks for.
        return (*names, request.prefer_memory, request.verify, is_lazy, request.strict)

    def lazily(self, gm: GraphModule) -> Lazily | None:
        """Makes logits that a Dynamo graph returns lazy; None if that is not requested."""
        how = switches.lazy_logits(self.lazy_logits)
        if not how:
            return None
        if is_to_be_saved():
            return Lazily("the compiled graph is to be saved")
        if self.inductor is not None and uses_cuda_graphs(self.inductor.config):
            return Lazily("a CUDA graph uses the memory of what it returned anew")
        if how != AUTO:
            return Lazily()
        of_losses = partial(Lazily, crosses=False)
        code = code_that_is_compiled()
        if code is None:
            return of_losses("it is not known which function is compiled")
        if keeps_saved_tensors_elsewhere():
            return of_losses("hooks take what its backward needs")
        if (over := why_over(code)) is not None:
            return of_losses(over)
        return of_losses(automatic=Automatic(code, switches.how_to_set(LAZY_LOGITS)))

    def rewrite(self, gm: GraphModule, lazily: Lazily | None = None) -> Report:
        """Rewrites a Dynamo graph."""
        gm.meta["compile_losses"] = report = self.rewrite_graph(gm.graph, lazily, module=gm)
        return report

    def rewrite_graph(
        self, graph: Graph, lazily: Lazily | None = None, *, module: GraphModule | None = None
    ) -> Report:
        graphs = Graphs(graph, module)
        try:
            with switches.leaving_out(self.places):
                request = replace(self.request, lazily=lazily)
                return rewrite_graph(graph, request=request, module=module)
        except Exception:
            # Dynamo erases the nodes of a graph that failed. In one that is no graph any more,
            # torch 2.15 fails at that, and hides the error.
            graphs.restore()
            raise


def unknown(name: str, inductors: Sequence[str] = ()) -> RuntimeError:
    """The error of an unknown option.

    Args:
        inductors: Inductor's options, where they may be given as well.
    """
    if not inductors and name.replace("-", "_") in list_options():
        return RuntimeError(
            f"{name!r} is an option of Inductor: torch.compile(..., options={{{name!r}: ...}})"
        )
    also = "; torch._inductor.list_options() has Inductor's" if inductors else ""
    # Among Inductor's 600 names there is one near to most others.
    meant = guess(name, OPTIONS) if guess(name, OPTIONS) != "." else guess(name, inductors)
    return RuntimeError(
        f"unknown option {name!r}{meant} compile_losses has {', '.join(OPTIONS)}{also}"
    )
