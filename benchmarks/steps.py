"""Whole training steps of unmodified models: forward, loss, backward and optimizer.

``python -m benchmarks steps`` trains each model (``benchmarks/models.py``) with stock torch.compile
and with this package, from the same weights and on the same batches, and compares the loss curves.
``noise`` is the difference between two runs of stock, one with the samples of every batch in
reverse order, so that sums are rounded differently. Then the steps are timed in turns, and the peak
memory of a step is measured above model, optimizer and batch. ``ops`` are the losses that
``compile_losses.explain`` reports.

``--dtype autocast`` keeps weights in float32 and computes in bfloat16. Liger's contender is its
fused linear cross entropy in Llama, with nothing else patched, under stock torch.compile.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Generator, Tensor

from benchmarks import report
from benchmarks.clock import Call, Clock, make_clock, peak_mib, ratio_of, time_in_turns
from benchmarks.contenders import UnavailableError, reason_of, version_of
from benchmarks.models import TASKS, Batch, Setup, Size, Task
from benchmarks.options import add_options, provenance

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "autocast": torch.float32}
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Row(report.Clocked):
    """A contender's figures; empty if it failed. ``ratio`` is its time over stock's.

    ``curve_difference`` is the largest of all steps, relative to stock's loss.
    """

    model: str
    size: str
    dtype: str
    contender: str
    ms: str
    ratio: str
    peak_mib: str
    ops: str
    curve_steps: str
    first_loss: str
    last_loss: str
    curve_difference: str
    noise: str
    reason: str
    library: str
    contender_version: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.device, self.model, self.size, self.dtype, self.contender


def _ours(setup: Setup) -> Callable[..., Tensor]:
    from compile_losses.backend import compile_losses

    return torch.compile(setup.loss, backend=compile_losses)


def _liger(setup: Setup) -> Callable[..., Tensor]:
    if type(setup.model).__name__ != "LlamaForCausalLM" or not torch.cuda.is_available():
        raise UnavailableError("it is compared on Llama, on a CUDA device")
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    others = dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy"), False)
    apply_liger_kernel_to_llama(**others, fused_linear_cross_entropy=True, model=setup.model)
    return torch.compile(setup.loss)


BUILDERS: dict[str, tuple[Callable[[Setup], Callable[..., Tensor]], str]] = {
    "stock": (lambda setup: torch.compile(setup.loss), "torch"),
    "ours": (_ours, "compile_losses"),
    "liger": (_liger, "liger-kernel"),
    "eager": (lambda setup: setup.loss, "torch"),
}


class Run:
    """A contender with a model of its own; all models start from the same weights."""

    def __init__(self, task: Task, size: Size, dtype: str, name: str, device: torch.device) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.setup = task.make(size, DTYPES[dtype])
        self.device, self.autocast = device, dtype == "autocast"
        self.initial = {k: v.clone() for k, v in self.setup.model.state_dict().items()}
        self.loss = BUILDERS[name][0](self.setup)
        self.start()

    def start(self) -> None:
        """Back to the first weights and the first batch."""
        self.setup.model.load_state_dict(self.initial)
        parameters = self.setup.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, fused=True)
        self.generator = Generator(self.device).manual_seed(1)

    def precision(self) -> contextlib.AbstractContextManager[object]:
        if self.autocast:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def batch(self) -> Batch:
        return self.setup.batch(self.generator)

    def step(self, batch: Batch) -> Tensor:
        with self.precision():
            loss = self.loss(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def next_call(self) -> Call:
        return partial(self.step, self.batch())

    def curve(self, steps: int, *, reverse: bool = False) -> Tensor:
        """The losses of the first steps: float64 [steps]."""
        self.start()
        losses = []
        for _ in range(steps):
            batch = self.batch()
            losses.append(self.step(tuple(t.flip(0) for t in batch) if reverse else batch))
        return torch.stack(losses).double().cpu()


def difference(curve: Tensor, stock: Tensor) -> str:
    return f"{((curve - stock) / stock).abs().max():.2g}"


def losses_found(run: Run, op: str) -> tuple[str, str]:
    """The ops and their plans, and the faults found in them."""
    import compile_losses

    with run.precision():
        sites = compile_losses.explain(run.setup.loss, *run.batch()).losses
    plans = [
        ", ".join(s.plan) if s.status == "rewritten" else f"declined, {s.reason}" for s in sites
    ]
    found = "; ".join(f"{s.op}: {plan}" for s, plan in zip(sites, plans, strict=True))
    expected = not op or [(s.op, s.status) for s in sites] == [(op, "rewritten")]
    return found, "" if expected else f"not the expected {op}"


def measure(
    name: str,
    size: Size,
    dtype: str,
    contenders: Iterable[str],
    clock: Clock,
    budget_s: float,
    steps: int | None = None,
) -> list[dict[str, str]]:
    """The figures of the contenders, in their order."""
    torch._dynamo.reset()
    task = TASKS[name]
    steps = steps or task.curve
    rows: dict[str, dict[str, str]] = {}
    runs: dict[str, Run] = {}
    curves: dict[str, Tensor] = {}
    noise = ""
    for contender in contenders:
        rows[contender] = row = {}
        try:
            run = Run(task, size, dtype, contender, clock.device)
            if contender == "ours":
                row["ops"], row["reason"] = losses_found(run, task.op)
            curves[contender] = run.curve(steps)
            if contender == "stock":
                noise = difference(run.curve(steps, reverse=True), curves[contender])
            runs[contender] = run
        except Exception as error:  # whatever it is, the others are still measured
            row["reason"] = reason_of(error)
    times: dict[str, list[float]] = {}
    if runs:
        measured = time_in_turns([run.next_call for run in runs.values()], clock, budget_s)
        times = dict(zip(runs, measured, strict=True))
    for index, (contender, run) in enumerate(runs.items()):
        curve = curves[contender]
        row = rows[contender]
        row["ms"] = f"{statistics.median(times[contender]):.4g}"
        row["peak_mib"] = f"{peak_mib(run.next_call, clock):.1f}"
        row |= clock.conditions(index)
        row["curve_steps"], row["noise"] = str(steps), noise
        row["first_loss"], row["last_loss"] = f"{curve[0]:.6g}", f"{curve[-1]:.6g}"
        if contender != "stock" and "stock" in runs:
            row["ratio"] = f"{ratio_of(times['stock'], times[contender]):.3f}"
            row["curve_difference"] = difference(curve, curves["stock"])
    common = {"model": name, "size": str(size), "dtype": dtype}
    common["library"] = f"{task.library} {version_of(task.library)}"
    versions = {contender: version_of(BUILDERS[contender][1]) for contender in rows}
    return [
        {**common, **row, "contender": contender, "contender_version": versions[contender]}
        for contender, row in rows.items()
    ]


def line(row: Row) -> str:
    return (
        f"{row.model:<15}{row.dtype:<10}{row.contender:<7}{row.ms:>8}{row.ratio:>7}"
        f"{row.peak_mib:>10}{row.first_loss:>9.7}{row.last_loss:>9.7}{row.curve_difference:>9}"
        f"{row.noise:>9}  {row.ops} {row.reason}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the measurements; 1 if this package fails or does not fuse a loss as expected."""
    device = torch.device(arguments.device)
    clock = make_clock(device)
    output: Path = arguments.output or report.default_output(device, "steps")
    rows = report.kept(output, Row, append=arguments.append)
    common = provenance(arguments, device)
    broken = False
    print(f"{common['device']}, torch {common['torch']}, commit {common['commit']}")
    print(f"{'model':<15}{'dtype':<10}{'':<7}{'ms':>8}{'ratio':>7}{'MiB':>10}{'first':>9}{'last':>9}"
          f"{'curves':>9}{'noise':>9}  ops")  # fmt: skip
    for name, dtype in itertools.product(arguments.model, arguments.dtype):
        size = getattr(TASKS[name], arguments.size)
        for figures in measure(
            name, size, dtype, arguments.contender, clock, arguments.budget, arguments.curve
        ):
            row = Row(**{**dict.fromkeys(report.columns_of(Row), ""), **figures, **common})
            print(line(row), flush=True)
            if row.reason.startswith("not run"):
                continue
            rows[row.key] = row
            broken |= row.contender == "ours" and bool(row.reason)
        report.write(output, Row, rows.values())
        gc.collect()
    print(f"wrote {output}")
    return int(broken)


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    summary = "training steps of whole models, with peak memory and loss curves"
    parser = commands.add_parser(
        "steps",
        help=summary,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choose = partial(parser.add_argument, nargs="+")
    choose("--model", choices=TASKS, default=list(TASKS), help="default: all")
    default = ["stock", "ours", "liger"]
    choose("--contender", choices=BUILDERS, default=default, help="default: all but eager")
    choose("--dtype", choices=DTYPES, default=["bfloat16"], help="default: bfloat16")
    parser.add_argument("--size", choices=("reference", "small"), default="reference")
    parser.add_argument("--curve", type=int, help="steps of the curves (200 or 50, by the model)")
    add_options(parser, 1.0, append=True)
