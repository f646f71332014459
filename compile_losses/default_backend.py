"""``enable`` and ``disable``: make plain ``torch.compile(model)`` rewrite losses, or stop it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch.fx import GraphModule

from compile_losses import passes, switches
from compile_losses.backend import rewritten, saved_with_package
from compile_losses.inductor_passes import (
    install,
    installed_rewrite,
    set_settings,
    take_out,
    told,
)
from compile_losses.known_heads import doors
from compile_losses.lazy import Compiled
from compile_losses.options import INDUCTOR, InvalidOptionError, Settings
from compile_losses.torch_internals import warn_if_untested
from compile_losses.torch_internals.dynamo import lookup_backend
from compile_losses.torch_internals.inductor import InductorBackend, go_around_inductor
from compile_losses.traced import settings_by

#: Whether COMPILE_LOSSES_ENABLE=1 switches the package on, and whether ``disable`` was called.
_in_every_thread = _was_disabled = False


class _Enabled:
    """The result of enable(): the end of a ``with`` block undoes the call."""

    def __init__(self, before: Settings) -> None:
        self.before = before

    def __enter__(self) -> _Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        first = installed_rewrite()
        if first is not None:
            first.calls -= 1
            if first.calls > 0:
                set_settings(self.before)
                _open(self.before)
                return
        doors.in_eager_code(frozenset())
        take_out()


def _compile(
    following: Compiled, inductor: Any, gm: GraphModule, example_inputs: list[Any], **options: Any
) -> Compiled:
    """After enable(), ``torch.compile`` calls this in the place of its default backend.

    Losses are rewritten before Inductor looks into its caches, as under our own backend: a pass of
    Inductor's does not run on a graph from a cache, and can't change the results of a graph.

    Args:
        following: the default backend, which has the same other arguments.
    """
    first = installed_rewrite()
    if first is None and _in_every_thread:
        install(Settings(door=switches.ENVIRONMENT))
        first = installed_rewrite()
    if first is None or first.has_run(gm):
        return following(inductor, gm, example_inputs, **options)
    settings, other = first.settings, first.settings.inner_backend
    if other == INDUCTOR:
        settings = replace(settings, inductor=inductor)

    def inner(gm: GraphModule, example_inputs: list[Any]) -> Compiled:
        with told(gm):
            if other != INDUCTOR:
                return lookup_backend(other)(gm, example_inputs)
            return saved_with_package(following(inductor, gm, example_inputs, **options))

    if not switches.runs(passes.REWRITE):
        return inner(gm, example_inputs)
    return rewritten(gm, example_inputs, settings, inner)


def enable_in_every_thread() -> None:
    """As ``enable()`` for each thread that compiles, by COMPILE_LOSSES_ENABLE=1; until ``disable``.

    Raises:
        InvalidOptionError: a variable in the environment names an unknown loss or pass.
    """
    global _in_every_thread
    if _was_disabled:
        return
    try:
        switches.check_environment()
    except RuntimeError as error:
        raise InvalidOptionError(str(error)) from None
    warn_if_untested()
    _in_every_thread = True
    _open(Settings(door=switches.ENVIRONMENT))
    go_around_inductor(_compile)


def enable(
    *,
    losses: Iterable[str] | None = None,
    except_: Iterable[str] | None = None,
    lazy_logits: bool | str | None = None,
    known_heads: bool | None = None,
    prefer_memory: bool | None = None,
    batch_invariant: bool | None = None,
    kernels: bool | None = None,
    verify: bool | None = None,
    strict: bool | None = None,
    inner_backend: Any = None,
    **others: Any,
) -> _Enabled:
    """Makes ``torch.compile`` with its default backend rewrite losses, from now on.

    Passes that are in Inductor's slots already keep running, after ours. Functions that were
    compiled before stay as they are. Usable as a context manager; enabling twice is enabling once,
    with the options of both calls. The inner of two ``with`` blocks leaves the outer one on, with
    its options.

    Heads that other libraries have fused (``compile_losses.known_heads``) are computed by this
    package where nothing is compiled, too, in all threads, unless ``known_heads=False``.

    Since torch 2.13 each thread has its own configuration of Inductor: call ``enable`` in each
    thread that compiles.

    Args:
        losses, except_, lazy_logits, known_heads, prefer_memory, batch_invariant, kernels, verify,
        strict: as the backend's options, see :func:`compile_losses.backend.compile_losses`; by
            default as the environment says.
        inner_backend: another backend to compile the rewritten graph, in the place of Inductor; the
            ``mode`` and the ``options`` of ``torch.compile`` are Inductor's, and are not used then.
        others: ``except``, as in ``enable(**options)`` with the dictionary that the backend takes.

    Raises:
        InvalidOptionError: an unknown option, loss or backend; a value of a wrong kind; a variable
            in the environment that names an unknown loss or pass. It is a RuntimeError.
    """
    given = {
        "losses": losses,
        "except": except_,
        "lazy_logits": lazy_logits,
        "known_heads": known_heads,
        "prefer_memory": prefer_memory,
        "batch_invariant": batch_invariant,
        "kernels": kernels,
        "verify": verify,
        "strict": strict,
        "inner_backend": inner_backend,
        **others,
    }
    first = installed_rewrite()
    before = Settings(door=switches.ENABLE) if first is None else first.settings
    try:
        switches.check_environment()
        settings = before.changed(given)
        settings.apply()
    except RuntimeError as error:
        raise InvalidOptionError(str(error)) from None
    warn_if_untested()
    install(settings)
    _open(settings)
    go_around_inductor(_compile)
    return _Enabled(before)


def _open(settings: Settings) -> None:
    """Has known heads met in eager code, too."""
    doors.in_eager_code(settings.losses if settings.takes_heads else frozenset())


def disable() -> None:
    """Undoes :func:`enable`, and puts back the passes that were in Inductor's slots before.

    Backwards that are not compiled yet still need our last pass. As long as there are any, that
    pass stays in its slot, where it does nothing to other graphs; call this again later to take it
    out.
    """
    global _in_every_thread, _was_disabled
    _in_every_thread, _was_disabled = False, True
    doors.in_eager_code(frozenset())
    take_out()


def _settings_of(backend: Any) -> Settings | None:
    """The settings of ``enable()``, if a backend is the default one and it is on."""
    if not isinstance(backend, InductorBackend):
        return None
    first = installed_rewrite()
    if first is None and _in_every_thread:
        return Settings(door=switches.ENVIRONMENT)
    return None if first is None else first.settings


settings_by(_settings_of)
