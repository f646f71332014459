"""``run --compare``: a program by stock torch.compile and with this package, in turns."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compile_losses.comparison import Comparison
from compile_losses.options import Settings
from compile_losses.programs.user_step import WITHOUT_CACHES, Side, difference
from compile_losses.programs.watched_program import END, MEMORY, STEP
from compile_losses.report import Report

#: Steps that are not measured: they compile, for the first sizes and then for any.
WARM_UP = 3


class ProgramError(Exception):
    """A program that can't be compared: it ended, or made no step."""


def compare_program(
    program: Sequence[str], steps: int, options: Mapping[str, Any] | None = None
) -> Comparison:
    """Runs a program twice at the same time, and lets the two make their steps in turns.

    Both processes are killed after the last step: the program does not get to its end.

    Args:
        program: ``[script, *arguments]`` or ``["-m", module, *arguments]``.
        steps: the steps to measure. A step ends with one of the program's first optimizer.

    Returns:
        A :class:`~compile_losses.comparison.Comparison`: loss and gradients of the first step.

    Raises:
        ProgramError: the program ended before, or compiles nothing.
        InvalidOptionError: as for ``enable``.
    """
    if steps < 1:
        raise ProgramError(f"steps: expected at least 1, got {steps}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ProgramError("a program of several ranks can't be compared: start it without")
    given = dict(options or {})
    Settings.variables(given)
    with tempfile.TemporaryDirectory(prefix="compile_losses_compare_") as name:
        folder = Path(name)
        sides = {
            "stock": _Program(program, folder / "stock", given, {"COMPILE_LOSSES": "0"}),
            "ours": _Program(program, folder / "ours", given, {"COMPILE_LOSSES": "1"}),
        }
        try:
            for side in sides.values():
                for _ in range(WARM_UP):
                    side.step()
            order = random.Random(0)
            for _ in range(steps):
                for each in order.sample(list(sides), len(sides)):
                    sides[each].measure()
            for side in sides.values():
                side.measure_memory()
            for side in sides.values():
                side.step(END)
        finally:
            for side in sides.values():
                side.close()
        stock, ours = sides["stock"], sides["ours"]
        apart = difference(stock.gradients, ours.gradients)
        return Comparison(stock.side, ours.side, apart, ours.report)


class _Program:
    """A program that makes a step when it is told to. It starts at the first one."""

    def __init__(
        self,
        program: Sequence[str],
        path: Path,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        self.program = program
        self.path = path
        self.options = options
        self.environment = environment
        self.side = Side()
        self.process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        words, self._words = os.pipe()
        self._told, told = os.pipe()
        self._lines = os.fdopen(self._told)
        request = {
            "words": words,
            "told": told,
            "path": str(self.path),
            "options": self.options,
        }
        variables = {
            **os.environ,
            **self.environment,
            **WITHOUT_CACHES,
            "KINETO_LOG_LEVEL": "99",
        }
        module = ["-m", "compile_losses.programs.watched_program", json.dumps(request)]
        with self.path.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *module, *self.program],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(words, told),
            )
        os.close(words)
        os.close(told)

    def step(self, word: str = STEP) -> dict[str, Any]:
        """Makes another step, and returns what is told of it."""
        first = self.process is None
        if first:
            self._start()
        else:
            self._say(word)
        line = self._lines.readline()
        if not line:
            raise ProgramError(self._why_it_ended())
        step = json.loads(line)
        if first:
            self.side.loss = step.get("loss")
        return step

    def measure(self) -> None:
        self.side.times.append(self.step()["time"])

    def measure_memory(self) -> None:
        self.side.peak_memory = self.step(MEMORY)["memory"]

    def close(self) -> None:
        """Ends the program at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            os.close(self._words)
            self._lines.close()

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return torch.load(self.path)

    @property
    def report(self) -> Report:
        return torch.load(f"{self.path}.report", weights_only=False)

    def _say(self, word: str) -> None:
        try:
            os.write(self._words, f"{word}\n".encode())
        except BrokenPipeError:
            raise ProgramError(self._why_it_ended()) from None

    def _why_it_ended(self) -> str:
        assert self.process is not None
        status = self.process.wait()
        lines = self.path.with_suffix(".log").read_text(errors="replace").splitlines()
        end = "\n".join(["", *lines[-20:]]) if status else ""
        return (
            f"{self.path.name}: the program ended with {status} before it had made "
            f"enough steps of an optimizer (--compare N and {WARM_UP + 1} more){end}"
        )
