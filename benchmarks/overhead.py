"""Eager calls of the losses: the overhead of a call.

``python -m benchmarks overhead`` times ``torch.nn.functional``'s losses, the ops and
``compile_losses.functional`` in turns, on 8 elements, where all time is overhead, and on 2^20.
A sample is a run of calls and ends when the device has finished. A figure is the median of the
samples, and a ratio is the median of the quotients of neighbouring samples.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import compile_losses.functional
from benchmarks import report
from benchmarks.cases import PASSES, Pass
from benchmarks.clock import Call, ratio_of
from benchmarks.options import add_options, provenance

SIZES = (8, 1 << 20)
CLASSES = {8: 4, 1 << 20: 1024}  # for losses that have classes
LOSSES = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "cross_entropy",
    "nll_loss",
    "softmax_kl_div",
    "softmax_js_div",
)
SAMPLE_S, WARM_UP = 2e-3, 3


@dataclass(frozen=True)
class Row(report.Provenance):
    """Microseconds a call. Ratios are to torch. functional is empty if it has no such loss."""

    loss: str
    which: str  # "pass" in the file
    elements: int
    torch_us: str
    fused_us: str
    functional_us: str
    fused_ratio: str
    functional_ratio: str


def make_inputs(loss: str, elements: int, device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    shape = (elements // CLASSES[elements], CLASSES[elements])
    input, target = (torch.randn(shape, device=device) for _ in range(2))
    if loss in ("cross_entropy", "nll_loss"):
        target = target.argmax(-1)
    if loss in ("nll_loss", "kl_div"):
        input = input.log_softmax(-1)
    if loss == "kl_div":
        target = target.softmax(-1)
    if loss == "binary_cross_entropy_with_logits":
        target = target.sigmoid()
    return input, target


def softmax_kl_div(input: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(input, -1), F.softmax(target, -1), reduction="batchmean")


def softmax_js_div(input: Tensor, target: Tensor) -> Tensor:
    log_p, log_q = F.log_softmax(input, -1), F.log_softmax(target, -1)
    mixture = torch.logaddexp(log_p, log_q) - math.log(2)
    one, other = (
        F.kl_div(mixture, log, reduction="batchmean", log_target=True) for log in (log_p, log_q)
    )
    return (one + other) / 2


#: The losses that are no single function in torch.
WRITTEN = {"softmax_kl_div": softmax_kl_div, "softmax_js_div": softmax_js_div}


def functions_of(loss: str) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Torch's, the op and, if there is one, ``compile_losses.functional``'s."""
    functions = [getattr(F, loss, WRITTEN.get(loss)), getattr(torch.ops.fused, loss)]
    if loss in compile_losses.functional.__all__:
        functions.append(getattr(compile_losses.functional, loss))
    return functions


def step_of(
    function: Callable[[Tensor, Tensor], Tensor], which: Pass, input: Tensor, target: Tensor
) -> Call:
    leaf = input.clone().requires_grad_(which == "fwd_bwd")

    def forward() -> Tensor:
        return function(leaf, target)

    def forward_and_backward() -> Tensor | None:
        leaf.grad = None
        function(leaf, target).backward()
        return leaf.grad

    return forward if which == "fwd" else forward_and_backward


def sample(step: Call, calls: int, device: torch.device) -> float:
    """Microseconds a call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6


def time_in_turns(steps: list[Call], device: torch.device, budget_s: float) -> list[list[float]]:
    """Microseconds of each step, a list of samples for each, for ``budget_s`` seconds a step."""
    for step in steps:
        sample(step, WARM_UP, device)
    slowest = max(sample(step, WARM_UP, device) for step in steps)
    calls = max(1, round(SAMPLE_S * 1e6 / slowest))
    rounds = max(7, round(budget_s * 1e6 / (calls * slowest)))
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, samples in zip(steps, times, strict=True):
            samples.append(sample(step, calls, device))
    return times


def measure(
    loss: str, which: Pass, elements: int, device: torch.device, budget_s: float
) -> dict[str, str]:
    input, target = make_inputs(loss, elements, device)
    steps = [step_of(function, which, input, target) for function in functions_of(loss)]
    expected, *others = (step() for step in steps)
    for actual in others:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    times = time_in_turns(steps, device, budget_s)
    names = ("torch", "fused", "functional")
    figures = {
        f"{name}_us": f"{statistics.median(samples):.5g}"
        for name, samples in zip(names, times, strict=False)
    }
    for name, samples in zip(names[1:], times[1:], strict=False):
        figures[f"{name}_ratio"] = f"{ratio_of(times[0], samples):.3f}"
    return figures


def run(arguments: argparse.Namespace) -> int:
    """Runs the requested measurements."""
    warnings.filterwarnings("ignore", message="reduction", category=UserWarning)  # kl_div's mean
    device = torch.device(arguments.device)
    output: Path = arguments.output or report.default_output(device, "overhead")
    common = provenance(arguments, device)
    rows = []
    print(
        "{device}, torch {torch}, commit {commit}; microseconds, ratios to torch".format(**common)
    )
    print(f"{'':<54}{'torch':>11}{'fused':>11}{'ratio':>7}{'functional':>12}{'ratio':>7}")
    for elements in SIZES:
        for loss in arguments.loss:
            for which in PASSES:
                figures = {"functional_us": "", "functional_ratio": ""}
                figures |= measure(loss, which, elements, device, arguments.budget)
                row = Row(loss, which, elements, **figures, **common)
                rows.append(row)
                print(
                    f"{f'{elements:>8} {loss} {which}':<54}{row.torch_us:>11}{row.fused_us:>11}"
                    f"{row.fused_ratio:>7}{row.functional_us:>12}{row.functional_ratio:>7}",
                    flush=True,
                )
    report.write(output, Row, rows)
    print(f"wrote {output}")
    return 0


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    summary = "eager calls on 8 elements and on a million, against torch's"
    parser = commands.add_parser("overhead", help=summary, description=__doc__)
    parser.add_argument("--loss", nargs="+", choices=LOSSES, default=LOSSES, help="default: all")
    add_options(parser, 0.25, output="CSV file (results/overhead-DEVICE.csv)")
