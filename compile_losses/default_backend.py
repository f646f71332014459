"""``enable`` and ``disable``: make plain ``torch.compile(model)`` rewrite losses, or stop it."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any

from torch.fx import GraphModule

from compile_losses import switches
from compile_losses.backend import rewritten, saved_with_package
from compile_losses.inductor_passes import (
    install,
    installed_rewrite,
    log_and_count,
    take_out,
)
from compile_losses.lazy import Compiled
from compile_losses.options import Settings
from compile_losses.torch_internals import warn_if_untested
from compile_losses.torch_internals.inductor import go_around_inductor


class _Enabled:
    """The result of enable(): the end of a ``with`` block undoes the call."""

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
                return
        disable()


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
    if first is None or first.has_run(gm) or not switches.runs(switches.REWRITE):
        return following(inductor, gm, example_inputs, **options)
    settings = replace(Settings.of(None, None), lazy_logits=first.lazy_logits, inductor=inductor)

    def inner(gm: GraphModule, example_inputs: list[Any]) -> Compiled:
        log_and_count(gm)
        return saved_with_package(following(inductor, gm, example_inputs, **options))

    return rewritten(gm, example_inputs, settings, inner)


def enable(*, lazy_logits: bool | None = None) -> _Enabled:
    """Makes ``torch.compile`` with its default backend rewrite losses, from now on.

    Passes that are in Inductor's slots already keep running, after ours. Functions that were
    compiled before stay as they are. Usable as a context manager; enabling twice is enabling once,
    and the inner of two ``with`` blocks leaves the outer one on.

    Since torch 2.13 each thread has its own configuration of Inductor: call ``enable`` in each
    thread that compiles.

    Args:
        lazy_logits: as the backend's option; by default if COMPILE_LOSSES_LAZY_LOGITS=1 is in the
            environment.

    Raises:
        RuntimeError: a variable in the environment names an unknown loss or pass.
    """
    switches.check_environment()
    warn_if_untested()
    first = install()
    if lazy_logits is not None:
        first.lazy_logits = lazy_logits
    go_around_inductor(_compile)
    return _Enabled()


def disable() -> None:
    """Undoes :func:`enable`, and puts back the passes that were in Inductor's slots before.

    Backwards that are not compiled yet still need our last pass. As long as there are any, that
    pass stays in its slot, where it does nothing to other graphs; call this again later to take it
    out.
    """
    take_out()
