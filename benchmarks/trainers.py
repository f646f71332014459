"""Training steps of other libraries' trainers on several ranks, with stock and with this package.

``python -m benchmarks trainers`` starts the ranks of each way by itself, a process for each GPU. It
kills all of them if they are not through in time; what is known by then is kept, and the next way
runs. The ways of torchtitan (``benchmarks/titan.py``) are ``fsdp2``, ``tensor_parallel`` with its
loss parallelism, ``context_parallel``, and two schedules of ``pipeline_...``; those of a Llama of
transformers (``benchmarks/data_parallel.py``) ``ddp``, ``ddp_static_graph``, ``ddp_no_sync``, which
accumulates gradients, and accelerate's ``accelerate_fsdp2``. Contenders:

stock      torchtitan's compilation of its blocks and its loss, by torch's Inductor; of a model of
           transformers as a whole
ours       the same with ``backend="compile_losses"``, and with lazy logits where the model returns
           them
ours_head  the head and the loss in one graph of this backend, see docs/distributed.md
ours_sharded  with FSDP2: the head's weight is sharded by classes and never gathered
chunked    torchtitan's loss in chunks, each with its part of the head

``ms`` is a step of the slowest rank, and ``ratio`` the median of its ratios to stock's in the same
turn. ``peak_mib`` is above ``state_mib``, that of weights and the optimizer's state, both of the
largest rank. ``curve_difference`` is the largest of the first steps' losses, relative to stock's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.contenders import version_of
from benchmarks.options import add_options, provenance
from benchmarks.trainer_ranks import TRAINERS, objections_of

#: The module that each rank runs.
RANK = "benchmarks.trainer_ranks"
#: How long the others have to hear of a rank that failed.
PATIENCE_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Row(report.Clocked):
    """A contender's figures; empty with a reason if it failed."""

    trainer: str
    way: str
    size: str = ""
    dtype: str = ""
    ranks: str
    contender: str
    ms: str = ""
    ratio: str = ""
    range: str = ""
    tokens_per_s: str = ""
    state_mib: str = ""
    peak_mib: str = ""
    ops: str = ""
    curve_steps: str = ""
    first_loss: str = ""
    last_loss: str = ""
    curve_difference: str = ""
    reason: str = ""
    library: str = ""
    contender_version: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return self.device, self.trainer, self.way, self.size, self.ranks, self.contender

    def __str__(self) -> str:
        return (
            f"{self.way:<17}{self.contender:<11}{self.ms:>8}{self.ratio:>7}{self.tokens_per_s:>8}"
            f"{self.state_mib:>8}{self.peak_mib:>8}{self.first_loss:>9}{self.last_loss:>9}"
            f"{self.curve_difference:>9}  {self.ops} {self.reason}"
        )


HEADER = (
    f"{'way':<17}{'':<11}{'ms':>8}{'ratio':>7}{'tok/s':>8}{'state':>8}{'MiB':>8}{'first':>9}"
    f"{'last':>9}{'curves':>9}  ops"
)


@dataclass
class Processes:
    """The ranks of one way. Each is the leader of a group, which has the processes it starts."""

    ranks: Sequence[subprocess.Popen[bytes]]
    logs: Sequence[Path]
    waited_s: float = field(default=0.0)

    @classmethod
    def start(cls, command: Sequence[str], ranks: int, folder: Path) -> Processes:
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        logs = [folder / f"log.{rank}" for rank in range(ranks)]
        started = []
        for rank, path in enumerate(logs):
            with path.open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [*command, f"--rank={rank}"],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        return cls(started, logs)

    def wait(self, limit_s: float, objections: Sequence[Path]) -> str:
        """Why there is no result: a rank ended or failed alone, or time is up; empty if there is
        one. No rank is left running.

        Args:
            limit_s: the seconds that they have.
            objections: where each rank says what failed on it until the others have heard.
        """
        since = time.monotonic()
        try:
            return self._reason(limit_s, objections)
        finally:
            for rank in self.ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
            self.waited_s = time.monotonic() - since

    def _reason(self, limit_s: float, objections: Sequence[Path]) -> str:
        since, heard = time.monotonic(), math.inf
        while True:
            ends = [rank.poll() for rank in self.ranks]
            failed = [i for i, end in enumerate(ends) if end not in (None, 0)]
            if failed:
                return self._of(failed[0])
            if None not in ends:
                return ""
            now = time.monotonic()
            heard = min(heard, now) if any(path.exists() for path in objections) else math.inf
            if now - heard > PATIENCE_S:
                return "a rank failed alone"
            if now - since > limit_s:
                return f"stopped after {limit_s:.0f} s"
            time.sleep(0.1)

    def _of(self, rank: int) -> str:
        lines = [line.strip() for line in self.text(rank).splitlines()]
        said = [line for line in lines if "Error" in line] or lines or [""]
        return f"rank {rank} ended with {self.ranks[rank].poll()}: {said[-1][:300]}"

    def text(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace")


def measure(
    arguments: argparse.Namespace, trainer: str, way: str, limit_s: float
) -> tuple[list[dict[str, str]], Processes]:
    """The figures of a way's contenders, each with its reason if it has none."""
    module = TRAINERS[trainer]
    names = arguments.contender or module.WAYS[way].contenders
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", RANK, f"--trainer={trainer}", f"--way={way}"]
        command += [f"--device={arguments.device}", f"--store={folder}/store"]
        command += [f"--figures={figures}", f"--size={json.dumps(arguments.size)}"]
        command += [f"--ranks={arguments.ranks}", f"--curve={arguments.curve}"]
        command += [f"--timeout={limit_s}", f"--budget={arguments.budget}", "--contender", *names]
        processes = Processes.start(command, arguments.ranks, Path(folder))
        objections = [objections_of(figures, rank) for rank in range(arguments.ranks)]
        reason = processes.wait(limit_s, objections)
        alone = {
            name: f"rank {rank}: {text}"
            for rank, path in enumerate(objections)
            if path.exists()
            for name, text in json.loads(path.read_text()).items()
        }
        found = {"doing": "starting", "figures": {}, "size": ""}
        if figures.exists():
            found = json.loads(figures.read_text())
        if reason and arguments.log:
            with arguments.log.open("a") as log:
                for rank in range(arguments.ranks):
                    tail = "\n".join(processes.text(rank).splitlines()[-60:])
                    log.write(f"== {trainer} {way}, rank {rank}: {reason}\n{tail}\n")
    rows = []
    for name in names:
        own = {"contender": name, "size": found["size"], "dtype": module.WAYS[way].dtype}
        own |= found["figures"].get(name, {})
        if reason and not own.get("reason") and not own.get("ms"):
            doing = found["doing"] and f", {found['doing']}"
            own["reason"] = alone.get(name, f"failed: {reason}{doing}")
        rows.append(own)
    return rows, processes


def run(arguments: argparse.Namespace) -> int:
    """Runs the ways in the order given; 1 if this package fails in one."""
    # Whoever ends this command ends its ranks.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    device = torch.device(arguments.device)
    output: Path = arguments.output or report.default_output(device, "trainers")
    rows = report.kept(output, Row, append=arguments.append)
    common = {**provenance(arguments, device), "ranks": str(arguments.ranks)}
    begun, broken = time.monotonic(), False
    print(f"{common['device']}, torch {common['torch']}, commit {common['commit']}\n{HEADER}")
    for name in arguments.way:
        trainer, way = name.split("-")
        left = arguments.within - (time.monotonic() - begun)
        if left < arguments.least:
            print(f"{way:<17}not run: {left:.0f} s are left", flush=True)
            continue
        found, processes = measure(arguments, trainer, way, min(arguments.timeout, left))
        library = TRAINERS[trainer].LIBRARY
        library = f"{library} {version_of(library)}"
        for figures in found:
            row = Row(trainer=trainer, way=way, library=library, **common, **figures)
            print(row, flush=True)
            if row.reason.startswith("not run"):
                continue
            rows[row.key] = row
            broken |= row.contender.startswith("ours") and bool(row.reason)
        print(f"{way:<17}in {processes.waited_s:.0f} s", flush=True)
        report.write(output, Row, rows.values())  # if this command does not live to its end
    report.write(output, Row, rows.values())
    print(f"wrote {output}")
    return int(broken)


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    parser = commands.add_parser(
        "trainers",
        help="training steps of other libraries' trainers on several ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ways = [f"{trainer}-{way}" for trainer, module in TRAINERS.items() for way in module.WAYS]
    parser.add_argument("--way", nargs="+", choices=ways, default=ways, help="default: all")
    parser.add_argument("--contender", nargs="+", help="default: those of each way")
    ranks = torch.cuda.device_count() or 2
    parser.add_argument("--ranks", type=int, default=ranks, help="(a rank for each GPU, or 2)")
    parser.add_argument("--curve", type=int, default=20, help="steps whose losses are kept (20)")
    parser.add_argument(
        "--size", type=json.loads, default={}, help="fields of a size that differ, in JSON"
    )
    parser.add_argument("--timeout", type=float, default=100.0, help="seconds of a way (100)")
    parser.add_argument("--within", type=float, default=1e9, help="seconds of all ways")
    parser.add_argument(
        "--least", type=float, default=25.0, help="seconds that a way is worth starting in (25)"
    )
    parser.add_argument("--log", type=Path, help="a file for the last words of ranks that failed")
    add_options(parser, 2.0, append=True)
