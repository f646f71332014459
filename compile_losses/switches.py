"""The switches for users: which losses, which passes, everything; and the counters.

If an option of the backend is not given, its environment variable counts, if it has one.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable

from compile_losses import library

#: The name for losses that have no op, whose gradients are computed together with them.
ELEMENTWISE = "elementwise"
#: The passes, in their order: one on Dynamo's graph, and two on AOTAutograd's graphs.
REWRITE, PLAN, IN_PLACE = PASSES = ("rewrite", "plan", "in_place")

#: The option of the backend and of ``enable`` that returns lazy logits.
LAZY_LOGITS = "lazy_logits"

#: The variables that compiled graphs depend on.
VARIABLES = (
    "COMPILE_LOSSES",
    "COMPILE_LOSSES_EXCEPT",
    "COMPILE_LOSSES_LAZY_LOGITS",
    "COMPILE_LOSSES_ONLY",
    "COMPILE_LOSSES_PASSES",
    "COMPILE_LOSSES_PREFER_MEMORY",
    "COMPILE_LOSSES_VERIFY",
)

_counters: defaultdict[str, Counter[str]] = defaultdict(Counter)


def is_set(variable: str, default: str = "0") -> bool:
    return os.environ.get(variable, default).lower() not in ("", "0", "false")


def environment() -> tuple[str | None, ...]:
    """The values of the variables, for the keys of caches."""
    return tuple(os.environ.get(variable) for variable in VARIABLES)


def is_on() -> bool:
    """Whether the package does anything; with ``COMPILE_LOSSES=0`` it does not."""
    return is_set("COMPILE_LOSSES", "1")


def runs(name: str) -> bool:
    """Whether a pass runs: if ``COMPILE_LOSSES_PASSES`` names passes, only these run."""
    named = _names("COMPILE_LOSSES_PASSES")
    return is_on() and (named is None or name in named)


def returns_lazy_logits(given: bool | None = None) -> bool:
    """Whether compiled graphs return lazy logits; by default if COMPILE_LOSSES_LAZY_LOGITS=1 is in
    the environment."""
    return is_set("COMPILE_LOSSES_LAZY_LOGITS") if given is None else given


def check_environment() -> None:
    """
    Raises:
        RuntimeError: a variable names an unknown pass or loss.
    """
    _check("COMPILE_LOSSES_PASSES", _names("COMPILE_LOSSES_PASSES") or [], PASSES)
    chosen()


def losses() -> list[str]:
    """The names that an option may have: the ops, and ``"elementwise"``."""
    return sorted({*library.public_ops(), ELEMENTWISE})


def chosen(
    only: Iterable[str] | None = None, excluded: Iterable[str] | None = None
) -> frozenset[str]:
    """The losses that are rewritten.

    Args:
        only: rewrite only these; by default the losses of ``COMPILE_LOSSES_ONLY``, or all.
        excluded: don't rewrite these; by default the losses of ``COMPILE_LOSSES_EXCEPT``.

    Raises:
        RuntimeError: a name that is not in :func:`losses`.
    """
    known = losses()
    wanted = _names("COMPILE_LOSSES_ONLY") if only is None else _listed("losses", only)
    others = _names("COMPILE_LOSSES_EXCEPT") if excluded is None else _listed("except", excluded)
    _check("losses", wanted or [], known)
    _check("except", others or [], known)
    return frozenset(known if wanted is None else wanted) - frozenset(others or [])


def _listed(option: str, names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        raise RuntimeError(f"{option}: expected a list of names, got {names!r}")
    return list(names)


def _names(variable: str) -> list[str] | None:
    """Names with commas between them; None if the variable has none."""
    return [
        name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()
    ] or None


def _check(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise RuntimeError(f"{what}: expected some of {', '.join(known)}, got {name!r}")


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
