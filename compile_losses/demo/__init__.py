"""The demo: unmodified models trained side by side by stock torch.compile and by this package.

``python -m compile_losses demo`` trains models whose loss is large (``problems.py``), to show what
the package is for: language models of 16384 words, one that returns its logits, a policy and a
student of another among them. It also trains a small GPT and one small model for each of the five
losses (``data.py``), to show that they train as they do without it. It shows what was rewritten,
compares the loss curves, step times and peak memory, says why where nothing is gained, and writes a
figure. The last line has what was gained.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from compile_losses import library
from compile_losses.demo import console, data, gains, plots, problems
from compile_losses.demo.train import (
    EARLY,
    EARLY_BOUND,
    GRADIENT_BOUND,
    LATE_BOUND,
    OURS,
    STOCK,
    Result,
    in_two,
    side_by_side,
)
from compile_losses.programs.measuring import synchronize
from compile_losses.report import Report
from compile_losses.report.explanation import explain_call
from compile_losses.terminal import say

NOTES = """\
curve diff  largest relative difference of the two loss curves; both sides add the same float32
            numbers, in another order. Bound {early_bound:.0e} in the first {early} steps; later,
            when training itself has amplified the rounding, {late_bound:.0e}.
grad diff   the same for all gradients of the first step together; bound {gradient_bound:.0e}
ms          median time of a step: forward, backward, AdamW
speed-up    how many times as fast ours is, the median over steps in turn
MB          what the tensors of one step hold at most, beyond weights and optimiser state, from
            the records of torch's allocator

Compilation and first steps: stock {stock:.0f} s, then ours {ours:.0f} s, which reuses the
kernels that both have in common.
"""
LACKS = """\
Where less than 5% is gained: what explain estimates that the loss moves and holds, and what it says
of it. Where that is little, the loss is a small part of its step.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and runs; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m compile_losses demo",
        description="Trains unmodified models with stock torch.compile and with compile_losses.",
    )
    parser.add_argument(
        "--steps", type=int, default=60, help="of the small GPT; other small models take a third"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two of the large problems alone, less large: half a minute",
    )
    parser.add_argument("--output", type=Path, default=Path("demo_results.png"), help="the figure")
    parser.add_argument("--device", help="cpu or cuda; by default a GPU if there is one")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, got {arguments.steps}")
    if not arguments.output.resolve().parent.is_dir():
        parser.error(f"--output: there is no folder {arguments.output.resolve().parent}")
    try:
        device = torch.device(arguments.device) if arguments.device else default_device()
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        parser.error(f"--device {arguments.device}: {error}")
    large = problems.problems(arguments.quick)
    small = [] if arguments.quick else data.cases(arguments.steps)
    return run(large, small, arguments.output, device)


def run(
    large: Sequence[data.Case], small: Sequence[data.Case], output: Path, device: torch.device
) -> int:
    """Trains all models; returns 1 if a loss was not rewritten or the curves disagree, else 0."""
    # The profiler that measures a CPU's peak memory logs its starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    start = time.monotonic()
    cases = [*large, *small]
    say(f"torch {torch.__version__} on {describe(device)}")

    say("\n1. What compile_losses finds in the models\n")
    reports = [explain(case, device) for case in cases]
    failures = [text for pair in zip(cases, reports, strict=True) for text in left(*pair)]

    say(f"2. Training: backend={STOCK!r} (stock) against backend={OURS!r} (ours), in turn")
    say("   The losses shown are stock | ours.\n")
    warm_up(device)
    results = []
    for case in cases:
        with console.progress(case.name, case.steps) as tick:
            results.append(side_by_side(case, device, tick))
    failures += [f"{r.case.name}: {r.disagreement}" for r in results if r.disagreement]
    print_results(results)
    if lacks := list(filter(None, map(gains.without_gain, results, reports))):
        say(LACKS)
        say("".join(f"- {text}\n" for text in lacks))
    write_figure(results, len(large), device, output)
    say(f"Finished in {time.monotonic() - start:.0f} s.")
    for text in failures:
        say(f"FAILED: {text}")
    say(gains.closing_line(results[: len(large)]))
    return 1 if failures else 0


def default_device() -> torch.device:
    """The accelerator, if there is one and this package has kernels for it; else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    kernels = library.kernels.get(accelerator.type, "none were built")
    if isinstance(kernels, str):
        say(f"Not on {accelerator.type}, for want of kernels: {kernels}")
        return torch.device("cpu")
    return accelerator


def describe(device: torch.device) -> str:
    if device.type == "cpu":
        return f"the CPU ({torch.get_num_threads()} threads)"
    return f"{device} ({torch.get_device_module(device).get_device_name(device)})"


def explain(case: data.Case, device: torch.device) -> Report:
    """Prints what the pass does with the case's model."""
    model = case.make().to(device)
    batch = tuple(tensor.to(device) for tensor in next(case.batches(1)))
    function = in_two(model, case.criterion) if case.criterion else model
    report = explain_call(function, batch, options=case.options)
    say(f"{case.name}: {case.loss}\n{report}\n")
    return report


def left(case: data.Case, report: Report) -> list[str]:
    """What was not rewritten."""
    if not report.losses:
        return [f"{case.name}: no loss was found"]
    return [
        f"{case.name}: {site.op} at {site.file}:{site.line} is {site.status}: {site.reason}"
        for site in report.sites
        if site.status != "rewritten"
    ]


def warm_up(device: torch.device) -> None:
    """Compiles something small, so that neither side pays for starting the compiler."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + 1

    torch.compile(function, backend=STOCK)(torch.ones(64, device=device))
    synchronize(device)


def print_results(results: Sequence[Result]) -> None:
    say(f"\n3. Results\n\n{console.results_table(results)}\n")
    say(
        NOTES.format(
            early=EARLY,
            early_bound=EARLY_BOUND,
            late_bound=LATE_BOUND,
            gradient_bound=GRADIENT_BOUND,
            stock=sum(result.stock.first_step for result in results),
            ours=sum(result.ours.first_step for result in results),
        )
    )


def write_figure(results: Sequence[Result], large: int, device: torch.device, output: Path) -> None:
    try:
        plots.write(results, large, describe(device), output)
    except ImportError as error:
        say(f"No figure: {error}. `pip install matplotlib` brings it.")
        return
    say(f"Figure: {output.resolve()}")
