"""Where calls of known heads are met: in graphs that are traced for us, and in eager code.

The function of a library is an ``autograd.Function``, of which ``apply`` is replaced. Dynamo traces
the ``apply`` of such a class by its ``forward`` and ``backward`` alone, and tells the class by its
metaclass. So the class gets another metaclass, and Dynamo traces our ``apply`` like any function:
the ops in it are ops of the graph, which autograd and all passes see.

Our ``apply`` asks at each call whether it is wanted (:func:`is_wanted`): while a graph is traced,
by the options of the backend that will compile it; else if ``enable()`` is on. If not, and for any
argument that the row refuses, the library's own function computes the call.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from compile_losses import switches
from compile_losses.guard import Failure, attempt
from compile_losses.known_heads import HEADS
from compile_losses.known_heads.head import KnownHead
from compile_losses.sites import line_in
from compile_losses.torch_internals.dynamo import (
    FunctionMeta,
    constant_in_graphs,
    traced_for,
    traced_lines,
)
from compile_losses.traced import settings_here

#: From a head to why no call of it is met in this process: its release, or its arguments.
left: dict[str, str] = {}
#: Calls that a row refused while graphs were traced that nobody has reported yet: the head, the
#: reason, and the file and line of the call.
refused: list[tuple[str, str, tuple[str, int]]] = []

_by_name = {str(head): head for head in HEADS}
#: What ``enable()`` has on for eager calls.
_eager: frozenset[str] = frozenset()


class Replaced(FunctionMeta):
    """The metaclass of an ``autograd.Function`` whose ``apply`` is ours.

    A class that is derived from such a function later is torch's again.
    """

    def __init__(self, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> None:
        super().__init__(name, bases, members)
        _give_back(self)


def _give_back(derived: Any) -> None:
    """Makes a class derived from a known head one that computes what it says itself."""
    if "apply" not in vars(derived):
        # The descriptor binds to the class that it is read of. Since torch 2.14 it is C++'s.
        derived.apply = vars(torch.autograd.Function)["apply"]
    derived.__class__ = FunctionMeta


def watch() -> None:
    """Puts our functions in the place of the known heads, of modules that are imported and of those
    that will be."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in {head.module for head in HEADS}:
        module = sys.modules.get(name)
        if module is not None:
            meet(module)


def in_eager_code(losses: frozenset[str]) -> None:
    """Has calls that are not compiled met, if their op is among these losses; none of them if there
    is none."""
    global _eager
    _eager = frozenset(name for name, head in _by_name.items() if head.loss in losses)
    if _eager:
        watch()


def meet(module: ModuleType) -> None:
    """Puts our functions in the place of a module's known heads, as far as rows were tested."""
    for head in HEADS:
        if head.module == module.__name__:
            found = attempt(lambda: _meet(module, head))  # noqa: B023
            reason = found.reason if isinstance(found, Failure) else found
            if reason is not None:
                left[str(head)] = reason


def _meet(module: ModuleType, head: KnownHead) -> str | None:
    """The reason why a head is left alone."""
    theirs: Any = getattr(module, head.name, None)
    if isinstance(theirs, Replaced):
        return None
    kind = type(theirs)
    if kind is not FunctionMeta:
        return "there is no such autograd.Function"
    try:
        version = importlib.metadata.version(head.package)
    except importlib.metadata.PackageNotFoundError:
        return "its release is not known"
    if not head.is_tested(version):
        tested = ", ".join(head.versions)
        return f"release {version} was not tested; {tested} were"
    forward, backward = theirs.forward, theirs.backward
    if any(each.__module__ != head.module for each in (forward, backward)):
        return "somebody has replaced its forward or its backward"
    reason = head.differs(forward)
    if reason is None:
        for derived in theirs.__subclasses__():
            _give_back(derived)
        # Torch's way of the same function, also if its forward is replaced later.
        original: Any = FunctionMeta(theirs.__name__, (theirs,), {"__module__": theirs.__module__})
        _give_back(original)

        @constant_in_graphs
        def is_theirs() -> bool:
            return theirs.forward is forward and theirs.backward is backward

        theirs.apply = staticmethod(standing_in(head, original, is_theirs))
        theirs.__class__ = Replaced
    return reason


def standing_in(
    head: KnownHead, original: Any, is_theirs: Callable[[], bool]
) -> Callable[..., Any]:
    """The function that is called in the place of a head's.

    Args:
        original: the library's function.
        is_theirs: whether it still is what the library made it.
    """
    name, compute = str(head), head.compute

    def apply(*args: Any, **kwargs: Any) -> Any:
        if not is_theirs() or not is_wanted(name):
            return original.apply(*args, **kwargs)
        found = compute(*args, **kwargs)
        if isinstance(found, str):
            note_refused(name, found)
            return original.apply(*args, **kwargs)
        note_met(name)
        return found

    return apply


@constant_in_graphs
def is_wanted(name: str) -> bool:
    """Whether calls of a head are computed by us here."""
    if not switches.is_on():
        return False
    if traced_for() is None:
        return name in _eager
    settings = settings_here()
    return settings is not None and settings.takes_heads and _by_name[name].loss in settings.losses


@constant_in_graphs
def note_refused(name: str, reason: str) -> None:
    if traced_for() is None:
        switches.counters()["known heads refused"][f"{name}: {reason}"] += 1
        return
    # Dynamo may trace a call again, as from a frame of its own after a graph break.
    refused[:] = [each for each in refused if each[:2] != (name, reason)]
    refused.append((name, reason, line_in(traced_lines())))


@constant_in_graphs
def note_met(name: str) -> None:
    if traced_for() is None:
        switches.counters()["known heads"][name] += 1


def take_refused() -> list[tuple[str, str, tuple[str, int]]]:
    """The calls that were refused since this was asked before."""
    found = refused.copy()
    refused.clear()
    return found


class _Finder(MetaPathFinder):
    """Meets the modules of known heads when they are imported."""

    def __init__(self) -> None:
        self.modules = {head.module for head in HEADS}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        self.modules.discard(name)  # whoever finds it must not come back here
        spec = importlib.util.find_spec(name)
        execute = getattr(spec and spec.loader, "exec_module", None)
        if spec is None or execute is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            vars(spec.loader).pop("exec_module", None)
            execute(module)
            meet(module)

        try:
            spec.loader.exec_module = exec_module  # type: ignore[method-assign, union-attr]
        except AttributeError:
            left.update({str(h): "its loader is not Python's" for h in HEADS if h.module == name})
        return spec
