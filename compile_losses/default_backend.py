"""``enable`` and ``disable``: plain ``torch.compile(model)`` rewrites losses, or no longer."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any

from torch.fx import GraphModule

from compile_losses import switches
from compile_losses.backend import rewritten
from compile_losses.inductor_passes import (
    install,
    installed_rewrite,
    log_and_count,
    take_out,
)
from compile_losses.lazy import Compiled
from compile_losses.options import Settings
from compile_losses.torch_internals import warn_if_untested
from compile_losses.torch_internals.inductor import compile_with_inductor, go_around_inductor


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
        first = installed_rewrite()
        if first is not None:
            first.calls -= 1
            if first.calls > 0:
                return
        disable()


def _compile_lazily(
    inductor: Any, gm: GraphModule, example_inputs: list[Any], **options: Any
) -> Compiled:
    """What ``torch.compile`` calls with enable(lazy_logits=True), in the place of Inductor."""
    first = installed_rewrite()
    is_on = switches.runs(switches.REWRITE)
    if first is None or not is_on or not switches.returns_lazy_logits(first.lazy_logits):
        return compile_with_inductor(inductor, gm, example_inputs, **options)
    settings = replace(Settings.of(None, None), lazy_logits=True, inductor=inductor)

    def inner(gm: GraphModule, example_inputs: list[Any]) -> Compiled:
        log_and_count(gm)
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
    first = install()
    if lazy_logits is not None:
        first.lazy_logits = lazy_logits
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
    take_out()
