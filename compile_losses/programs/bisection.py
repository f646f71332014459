"""``bisect``: which loss and which pass a problem comes from, and the smallest switch that ends it.

Passes and losses are left out by halves, as torch's CompilerBisector does with Inductor's.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from compile_losses import passes, switches
from compile_losses.facts import gather, in_words
from compile_losses.programs.trial import REPORT, SITES, STEP, TIME
from compile_losses.programs.trial_processes import Processes, Switches
from compile_losses.programs.user_step import difference
from compile_losses.sites import number_of

LOSS, CRASH, SLOW = "loss", "crash", "time"
#: How often the step runs in a trial, and how much longer than stock's it may take, by default.
STEPS = {LOSS: 3, CRASH: 2, SLOW: 10}
LONGER = 0.1


#: Runs a trial of a kind with switches, and returns its result.
Run = Callable[[str, Switches], dict[str, Any]]


class RefusedError(Exception):
    """The step can't be tried."""


@dataclass
class Finding:
    """What a bisection found.

    Attributes:
        check: what was looked for.
        problem: how it shows with everything on; empty if it does not.
        ours: whether it goes with this package.
        sites: the losses that it needs, by their places; without a place, by their names.
        in_pass: the pass that it needs.
        switch: the smallest switch that ends it.
        others: further switches that end it.
        trials: what each trial did.
        facts: versions, devices and kernels.
        report: the report of ``explain``.
    """

    check: str
    problem: str = ""
    ours: bool = False
    sites: dict[str, str] = field(default_factory=dict)
    in_pass: str = ""
    switch: str = ""
    others: list[str] = field(default_factory=list)
    trials: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    report: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and numbers, as for ``json.dumps``."""
        return asdict(self)

    @property
    def outcome(self) -> list[str]:
        """The answer, as lines."""
        if not self.problem:
            return [
                "The problem does not show in fresh processes with an empty cache. For a stale "
                "cache or a hang see docs/troubleshooting.md"
            ]
        if not self.ours:
            return [f"Not ours: {self.problem}, also with COMPILE_LOSSES=0"]
        rows = [("problem", self.problem)]
        rows += [("site", f"{name} ({place})") for place, name in self.sites.items()]
        rows += [("pass", self.in_pass), ("switch", self.switch)]
        rows += [("also", other) for other in self.others]
        return [f"{name:<8} {text}" for name, text in rows if text]

    def __str__(self) -> str:
        lines = self.outcome
        if self.ours:
            lines += ["", "For a bug report, with a function of a few lines that shows it:", "```"]
            lines += [f"compile_losses bisect --check {self.check}", *self.outcome]
            lines += ["", *self.trials, "", *self.facts, "", self.report, "```"]
        return "\n".join(lines)


class Bisection:
    """The search for one problem.

    Args:
        check: LOSS, CRASH or SLOW.
        run: runs a trial.
        options: the user's, to the backend.
        tolerance: the least relative difference that is a wrong loss, or the least part by which a
            step is slow; by default the root of the least exact dtype's eps, or LONGER.
        say: is told of each trial.
    """

    def __init__(
        self,
        check: str,
        run: Run,
        options: Mapping[str, Any] | None = None,
        tolerance: float | None = None,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.run = run
        self.options = dict(options or {})
        self.tolerance = tolerance
        self.say = say
        self.found = Finding(check)
        self.on = Switches()
        self._stock: dict[str, Any] = {}
        self._lost: float | None = None
        self._known: dict[Switches, str] = {}

    def find(self) -> Finding:
        """
        Raises:
            RefusedError: the step can't be run or measured, also without this package.
        """
        found = self.found
        there = self._run(SITES, Switches())
        if self.tolerance is None:
            self.tolerance = LONGER if found.check == SLOW else there.get("eps", 1e-7) ** 0.5
        if found.check == LOSS:
            self._stock = self._run(STEP, Switches(off=True))
            if "error" in self._stock:
                raise RefusedError(f"with COMPILE_LOSSES=0 as well: {self._stock['error']}")
            if all(loss is None for loss in self._stock["losses"]):
                raise RefusedError("the step returns no loss to compare")
        found.problem = self.problem(self.on)
        if not found.problem and found.check == CRASH:
            # A fault of a pass leaves a loss to torch, unless options want to see it.
            self.on = Switches(flags=(("strict", True),))
            found.problem = self.problem(self.on)
        if not found.problem:
            return found
        # A time is by stock's, which is compiled beside it.
        if found.check != SLOW and self.shows(off=True):
            return found
        found.ours = True
        found.in_pass = self._pass()
        flag = self._flag()
        left_out = self._left_out(there.get("places", {}))
        self._tell(flag, left_out, there.get("places", {}))
        report = self._run(REPORT, Switches())
        found.report = report.get("report") or f"explain: {report.get('error', '')}"
        found.facts = in_words(gather())
        return found

    def shows(self, **changes: Any) -> bool:
        """Whether the problem is there with these switches."""
        return bool(self.problem(replace(self.on, **changes)))

    def problem(self, given: Switches) -> str:
        """The problem in words; empty if it does not show."""
        if given not in self._known:
            kind = TIME if self.found.check == SLOW else STEP
            self._known[given] = told = self._judged(self._run(kind, given))
            fine = "no error" if self.found.check == CRASH else "as stock"
            self.found.trials.append(f"{given}: {told or fine}")
            self.say(self.found.trials[-1])
        return self._known[given]

    def _run(self, kind: str, given: Switches) -> dict[str, Any]:
        result = self.run(kind, given)
        if "refused" in result:
            raise RefusedError(result["refused"])
        return result

    def _judged(self, result: dict[str, Any]) -> str:
        check, tolerance = self.found.check, self.tolerance or 0.0
        if check == CRASH:
            return result.get("error", "")
        if "error" in result:
            raise RefusedError(f"the step ends with {result['error']}: try --check crash")
        if check == SLOW:
            ratio = result["ratio"]
            # Beside much lost time a little noise is none: half of it has to stay.
            self._lost = (ratio - 1) / 2 if self._lost is None else self._lost
            lasts = f"{ratio:.2f} times as long as stock"
            return lasts if ratio > 1 + max(tolerance, self._lost) else ""
        pairs = zip(self._stock["losses"], result["losses"], strict=True)
        apart = {
            "loss": max(_apart(a, b) for a, b in pairs),
            "gradients": difference(self._stock["tensors"], result["tensors"]) or 0.0,
        }
        told = [f"{name} {d:.1e} apart" for name, d in apart.items() if not d <= tolerance]
        return ", ".join(told)

    def _pass(self) -> str:
        """The first pass without which the problem does not show, of those that run."""
        for i in range(1, len(passes.STAGES)):
            if self.shows(passes=passes.STAGES[:i]):
                return passes.STAGES[i - 1]
        return passes.STAGES[-1]

    def _flag(self) -> tuple[str, bool] | None:
        """An option that is on and without which the problem does not show."""
        for name in (switches.LAZY_LOGITS, switches.PREFER_MEMORY):
            is_on = self.options.get(name, switches.is_set(f"COMPILE_LOSSES_{name.upper()}"))
            if is_on and not self.shows(flags=(*self.on.flags, (name, False))):
                return name, False
        return None

    def _left_out(self, places: Mapping[str, str]) -> tuple[str, ...]:
        """The fewest places or losses without which the problem does not show."""
        for names in ((*places, switches.ELEMENTWISE), tuple(switches.losses())):
            if not self.shows(left_out=names):
                return fewest(names, lambda left_out: self.shows(left_out=left_out))
        return ()

    def _tell(
        self, flag: tuple[str, bool] | None, left_out: Sequence[str], places: Mapping[str, str]
    ) -> None:
        found = self.found
        found.sites = {
            name if name in places else "wherever it is": places.get(name, name)
            for name in left_out
        }
        ends = []
        if left_out:
            names = json.dumps(list(left_out))
            variable = Switches(left_out=tuple(left_out))
            ends.append(f'options={{"except": {names}}}, or {variable}')
        if flag is not None:
            ends.insert(0, f'options={{"{flag[0]}": False}}, or {Switches(flags=(flag,))}')
        before = passes.STAGES[: passes.STAGES.index(found.in_pass)]
        if before:
            ends.append(str(Switches(passes=before)))
        ends.append(str(Switches(off=True)))
        verified = (*self.on.flags, ("verify", True))
        if found.check == LOSS and not self.shows(flags=verified):
            ends.append('options={"verify": True}, which leaves a wrong rewrite to torch')
        found.switch, *found.others = ends


def fewest(
    names: Sequence[str], shows: Callable[[tuple[str, ...]], bool], out: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Names to leave out, so that a problem does not show any more, and none of them in vain.

    Args:
        names: leaving out all of them, and ``out``, is enough; leaving out ``out`` alone is not.
        shows: whether the problem shows if these are left out.
    """
    if len(names) == 1:
        return tuple(names)
    half = len(names) // 2
    first, second = tuple(names[:half]), tuple(names[half:])
    for part in (first, second):
        if not shows((*out, *part)):
            return fewest(part, shows, out)
    found = fewest(first, shows, (*out, *second))
    return (*found, *fewest(second, shows, (*out, *found)))


def _apart(stock: float | None, ours: float | None) -> float:
    if stock is None or ours is None:
        return 0.0 if stock is ours else math.inf
    if stock == ours or (math.isnan(stock) and math.isnan(ours)):
        return 0.0
    return abs(stock - ours) / max(abs(stock), 1e-12)


def bisect(
    target: str,
    check: str,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    steps: int | None = None,
    tolerance: float | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Finding:
    """Finds what a problem of ``script.py:function`` comes from.

    Raises:
        RefusedError: the step can't be run or measured, also without this package.
    """
    if steps is not None and steps < 1:
        raise RefusedError(f"steps: expected at least 1, got {steps}")
    given = dict(options or {})
    with tempfile.TemporaryDirectory(prefix="compile_losses_bisect_") as folder:
        run = Processes(target, Path(folder), mode, given, steps or STEPS[check])
        found = Bisection(check, run, given, tolerance, say).find()
    found.report = f"{number_of(len(found.trials), 'trial')} of {target}\n{found.report}"
    return found
