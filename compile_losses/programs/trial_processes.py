"""The processes in which ``bisect`` runs a user's step, each with other switches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compile_losses import switches
from compile_losses.programs.user_step import WITHOUT_CACHES


@dataclass(frozen=True)
class Switches:
    """What a trial leaves out of this package.

    Attributes:
        off: all of it.
        passes: all passes but these; None leaves out none.
        left_out: losses and places, as in the option ``except``.
        flags: options that are set otherwise, with their values.
    """

    off: bool = False
    passes: tuple[str, ...] | None = None
    left_out: tuple[str, ...] = ()
    flags: tuple[tuple[str, bool], ...] = ()

    def variables(self) -> dict[str, str]:
        """The switches that only the environment has."""
        found = {"COMPILE_LOSSES": "0" if self.off else "1"}
        if self.passes is not None:
            found["COMPILE_LOSSES_PASSES"] = ",".join(self.passes)
        return found

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A user's options with the other switches."""
        excluded = [*given.get(switches.EXCEPT, switches.excluded_names()), *self.left_out]
        return {**given, **dict(self.flags), switches.EXCEPT: excluded}

    def __str__(self) -> str:
        if self.off:
            return "COMPILE_LOSSES=0"
        parts = []
        if self.passes is not None:
            parts.append(f"COMPILE_LOSSES_PASSES={','.join(self.passes)}")
        if self.left_out:
            parts.append(f"COMPILE_LOSSES_EXCEPT={','.join(self.left_out)}")
        parts += [f"COMPILE_LOSSES_{name.upper()}={value:d}" for name, value in self.flags]
        return " ".join(parts) or "everything on"


class Processes:
    """Runs trials of a function of a script or module, each in a process of its own.

    Args:
        folder: for results, and for the code that Inductor compiles.
    """

    def __init__(
        self, target: str, folder: Path, mode: str | None, options: Mapping[str, Any], steps: int
    ) -> None:
        self.target = target
        self.folder = folder
        self.mode = mode
        self.options = options
        self.steps = steps

    def __call__(self, what: str, given: Switches) -> dict[str, Any]:
        path = self.folder / "result.pt"
        path.unlink(missing_ok=True)
        request = {
            "target": self.target,
            "what": what,
            "mode": self.mode,
            "options": given.options(self.options),
            "steps": self.steps,
            "result": str(path),
        }
        variables = {
            **os.environ,
            **given.variables(),
            "COMPILE_LOSSES_ENABLE": "0",
            **WITHOUT_CACHES,
            # The code of kernels that stay the same is kept for the next trial.
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),
        }
        command = [sys.executable, "-m", "compile_losses.programs.trial", json.dumps(request)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if path.exists():
            return torch.load(path)
        return {"error": _how_it_ended(done.returncode, done.stderr)}


def _how_it_ended(status: int, stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}{last}"
    return f"exited with {status}{last}"
