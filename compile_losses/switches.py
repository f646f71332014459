"""The switches for users: which losses, which passes, everything; and the counters.

If an option of the backend is not given, its environment variable counts, if it has one.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from compile_losses import library
from compile_losses.passes import PASSES, STAGES

T = TypeVar("T")

#: The name for losses that have no op, whose gradients are computed together with them.
ELEMENTWISE = "elementwise"
#: The option that returns lazy logits.
LAZY_LOGITS = "lazy_logits"
#: Its value for logits that are lazy where that is safe and pays.
AUTO = "auto"
#: The option that uses linear cross entropy also if it saves memory and may cost time.
PREFER_MEMORY = "prefer_memory"
#: The option that computes heads that other libraries have fused.
KNOWN_HEADS = "known_heads"
#: The option that makes the numbers of a row independent of the rows beside it.
BATCH_INVARIANT = "batch_invariant"
#: The option that switches the built kernels off.
KERNELS = "kernels"
#: The options that name the losses to rewrite, and those to leave alone.
LOSSES, EXCEPT = "losses", "except"

#: How options are given: to our backend, to ``enable``, or in the environment alone.
BACKEND, ENABLE, ENVIRONMENT = DOORS = ("backend", "enable", "environment")
#: The door of the compilation that runs.
_door: ContextVar[str] = ContextVar("compile_losses_door", default=BACKEND)
_no_pass: ContextVar[bool] = ContextVar("compile_losses_no_pass", default=False)

#: A place in the option ``except``, as reports write it: a file and a line.
_PLACE = re.compile(r"(?P<file>.+):(?P<line>[0-9]+)")
#: The places whose losses the recognition that runs leaves alone.
_left_out: ContextVar[frozenset[str]] = ContextVar("compile_losses_left_out", default=frozenset())

#: The variables that compiled graphs depend on.
VARIABLES = (
    "COMPILE_LOSSES",
    "COMPILE_LOSSES_EXCEPT",
    "COMPILE_LOSSES_KERNELS",
    "COMPILE_LOSSES_KNOWN_HEADS",
    "COMPILE_LOSSES_LAZY_LOGITS",
    "COMPILE_LOSSES_ONLY",
    "COMPILE_LOSSES_PASSES",
    "COMPILE_LOSSES_PREFER_MEMORY",
    "COMPILE_LOSSES_VERIFY",
)

#: The last value of the option that was given; None before.
_batch_invariant: bool | None = None

_counters: defaultdict[str, Counter[str]] = defaultdict(Counter)


def is_set(variable: str, default: str = "0") -> bool:
    return os.environ.get(variable, default).lower() not in ("", "0", "false")


def environment() -> tuple[str | None, ...]:
    """The values of the variables, for the keys of caches; and whether no pass runs."""
    values = (os.environ.get(variable) for variable in VARIABLES)
    return (*values, "no pass" if _no_pass.get() else None)


def is_on() -> bool:
    """Whether the package does anything; with ``COMPILE_LOSSES=0`` it does not."""
    return is_set("COMPILE_LOSSES", "1")


def runs(name: str) -> bool:
    """Whether a pass runs, or any pass of a stage.

    If ``COMPILE_LOSSES_PASSES`` names passes, only these run. The name of a stage stands for all of
    its passes.
    """
    named = _names("COMPILE_LOSSES_PASSES")
    stage = name.partition(".")[0]
    return (
        is_on()
        and not _no_pass.get()
        and (
            named is None
            or stage in named
            or any(each == name or each.startswith(f"{name}.") for each in named)
        )
    )


def lazy_logits(given: bool | str | None = None) -> bool | str:
    """Whether compiled graphs return lazy logits: True, False or ``AUTO``. By default what
    COMPILE_LOSSES_LAZY_LOGITS says: 1, auto, or 0, which is its default."""
    if given is not None:
        return given
    value = os.environ.get("COMPILE_LOSSES_LAZY_LOGITS", "0").lower()
    return AUTO if value == AUTO else is_set("COMPILE_LOSSES_LAZY_LOGITS")


def takes_heads(given: bool | None = None) -> bool:
    """Whether known heads of other libraries are computed by us; by default unless
    COMPILE_LOSSES_KNOWN_HEADS=0 is in the environment."""
    return is_set("COMPILE_LOSSES_KNOWN_HEADS", "1") if given is None else given


def uses_kernels() -> bool:
    """Whether the built kernels are loaded; by default unless COMPILE_LOSSES_KERNELS=0 is in the
    environment."""
    return is_set("COMPILE_LOSSES_KERNELS", "1")


def is_batch_invariant() -> bool:
    """Whether the numbers of a row of a head do not depend on the rows beside it, in all bits; by
    default if COMPILE_LOSSES_BATCH_INVARIANT=1 is in the environment."""
    if _batch_invariant is None:
        return is_set("COMPILE_LOSSES_BATCH_INVARIANT")
    return _batch_invariant


def be_batch_invariant(value: bool) -> None:
    """Sets that for all calls of this process, compiled or not."""
    global _batch_invariant
    _batch_invariant = value


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A variable has a value inside of the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def without_passes() -> AbstractContextManager[None]:
    """What is compiled inside of the block is compiled as torch does it."""
    return holding(_no_pass, True)


def through(door: str) -> AbstractContextManager[None]:
    """Hints that are written inside of the block have the form of this door."""
    return holding(_door, door)


def how_to_set(flag: str, value: bool = True) -> str:
    """How a user who came through the current door switches a flag on, or off.

    The door is known while a graph is compiled. What is told later has to keep the text.
    """
    return {
        BACKEND: f"options={{{flag!r}: {value}}}",
        ENABLE: f"enable({flag}={value})",
        ENVIRONMENT: f"COMPILE_LOSSES_{flag.upper()}={value:d}",
    }[_door.get()]


def leaving_out(places: frozenset[str]) -> AbstractContextManager[None]:
    """Recognition inside of the block leaves the losses of these places alone.

    A place names a line, and the end of the file's path, by whole folders.
    """
    return holding(_left_out, places)


def left_out() -> frozenset[str]:
    """The places whose losses the recognition that runs leaves alone."""
    return _left_out.get()


def place_of(name: str) -> tuple[str, int] | None:
    """The file and the line of a place, as ``"train.py:16"``; None for another name."""
    found = _PLACE.fullmatch(name)
    return None if found is None else (found["file"], int(found["line"]))


def excluded_names() -> list[str]:
    """The losses and places of COMPILE_LOSSES_EXCEPT."""
    return _names("COMPILE_LOSSES_EXCEPT") or []


def places(excluded: Iterable[str] | None = None) -> frozenset[str]:
    """The places among the names that are excluded; by default those of COMPILE_LOSSES_EXCEPT."""
    names = excluded_names() if excluded is None else excluded
    return frozenset(name for name in names if place_of(name) is not None)


def check_environment() -> None:
    """
    Raises:
        RuntimeError: a variable names an unknown pass or loss.
    """
    known = (*STAGES, *(each.name for each in PASSES))
    check_names("COMPILE_LOSSES_PASSES", _names("COMPILE_LOSSES_PASSES") or [], known)
    check_names("COMPILE_LOSSES_ONLY", _names("COMPILE_LOSSES_ONLY") or [], losses())
    check_excluded("COMPILE_LOSSES_EXCEPT", excluded_names())


def losses() -> list[str]:
    """The names that an option may have: the ops, and ``"elementwise"``."""
    return sorted({*library.public_ops(), ELEMENTWISE})


def chosen(
    only: Iterable[str] | None = None, excluded: Iterable[str] | None = None
) -> frozenset[str]:
    """The losses that are rewritten.

    Args:
        only: rewrite only these; by default the losses of ``COMPILE_LOSSES_ONLY``, or all.
        excluded: don't rewrite these; by default the losses of ``COMPILE_LOSSES_EXCEPT``. Its
            places are not looked at.

    Raises:
        RuntimeError: a name that is not in :func:`losses`.
    """
    known = losses()
    wanted = _names("COMPILE_LOSSES_ONLY") if only is None else listed(LOSSES, only)
    others = excluded_names() if excluded is None else listed(EXCEPT, excluded)
    check_names(LOSSES, wanted or [], known)
    check_excluded(EXCEPT, others)
    return frozenset(known if wanted is None else wanted) - frozenset(others)


def listed(option: str, names: Any) -> list[str]:
    """
    Raises:
        RuntimeError: it is no list, tuple or set of strings.
    """
    if not isinstance(names, list | tuple | set | frozenset) or not all(
        isinstance(name, str) for name in names
    ):
        raise RuntimeError(f"{option}: expected a list of names, got {names!r}")
    return list(names)


def _names(variable: str) -> list[str] | None:
    """Names with commas between them; None if the variable has none."""
    return [
        name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()
    ] or None


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """
    Raises:
        RuntimeError: a name that is not known.
    """
    for name in names:
        if name not in known:
            raise RuntimeError(
                f"{what}: expected some of {', '.join(known)}, got {name!r}{guess(name, known)}"
            )


def check_excluded(what: str, names: Iterable[str]) -> None:
    """
    Raises:
        RuntimeError: a name that is no loss and no place, such as "train.py:16".
    """
    check_names(what, [name for name in names if place_of(name) is None], losses())


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def guess(name: object, known: Iterable[str]) -> str:
    """The end of a message about a wrong name: the known one that was meant, if one is near, or
    begins with the name or with its letters as initials."""
    text = str(name).lower().replace("-", "_")
    near = difflib.get_close_matches(text, known, 1)
    if len(text) > 1:
        near += [k for k in known if k.startswith(text) or _initials(k) == text]
    return f". Did you mean {near[0]!r}?" if near else "."


def counters() -> defaultdict[str, Counter[str]]:
    """Counts of losses in this process's graphs, as ``torch._dynamo.utils.counters``.

    ``counters()["rewritten"]["mse_loss"]`` is the number of losses that became this op.
    ``counters()["declined"]`` counts, by name, losses that were seen and left to torch.
    ``counters()["plan"]`` counts the decisions about losses in AOTAutograd's graphs, in the words
    of :func:`compile_losses.explain`. ``counters().clear()`` begins anew.

    The losses of each graph that ``torch.compile`` hands to its backend are counted, also if
    Inductor then takes the compiled graph from a cache. In two cases losses are counted only if
    nothing is taken from a cache: plans, and graphs that reach Inductor in another way than
    through ``torch.compile``, such as AOTInductor's or those of ``torch._inductor.compile``.
    """
    return _counters
