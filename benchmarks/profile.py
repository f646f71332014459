"""The limits of the kernels, from performance counters that Nsight Compute reads.

``python -m benchmarks profile`` runs each case's kernels once under ``ncu``, and writes a line for
each kernel that took a tenth of the case's time or more. ``ncu`` must be on the PATH and must be
allowed to read counters. It runs a kernel alone, with cold caches. By default it also sets the base
clock; this is switched off. So durations are near those of a benchmark, and not equal.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

import torch

from benchmarks import report
from benchmarks.cases import CASES, PASSES, Pass
from benchmarks.contenders import CONTENDERS
from benchmarks.options import add_options, provenance

METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "xu",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps",
    "launch__registers_per_thread": "registers",
}
UNITS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}
#: Kernels that take a smaller part of a pass are left out.
LEAST_PART = 0.1


@dataclass(frozen=True)
class Row(report.Provenance):
    """A kernel of a pass.

    ``us``: its duration. In percent of the device's maximum: ``dram``, the memory's bandwidth;
    ``issue``, instructions issued; ``xu``, the unit that computes exponentials and conversions;
    ``warps``, resident warps.
    """

    case: str
    which: str  # "pass" in the file
    dtype: str
    shape: str
    kernel: str
    us: str
    dram: str
    issue: str
    xu: str
    warps: str
    registers: str


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("profile", help="what limits the kernels, read by ncu")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--pass", dest="passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)  # which size; run by ncu
    add_options(parser, 0.0)


def run(arguments: argparse.Namespace) -> int:
    if arguments.device != "cuda":
        raise SystemExit("profile: needs --device cuda and a GPU")
    if arguments.once is not None:
        _run_once(arguments.case[0], arguments.passes[0], arguments.once)
        return 0
    if shutil.which("ncu") is None:
        raise SystemExit("profile: ncu (Nsight Compute) is not on the PATH")
    device = torch.device("cuda")
    output = arguments.output or report.default_output(device, "profile")
    shared = provenance(arguments, device)
    rows: list[Row] = []
    for name in arguments.case:
        for index, (shape, dtype) in enumerate(CASES[name].sizes("reference", device)):
            for which in arguments.passes:
                kernels = _profile(name, which, index)
                total = sum(float(kernel["us"]) for kernel in kernels)
                for kernel in kernels:
                    if float(kernel["us"]) < LEAST_PART * total:
                        continue
                    rows.append(
                        Row(
                            case=name,
                            which=which,
                            dtype=str(dtype).removeprefix("torch."),
                            shape="x".join(str(size) for size in shape),
                            **kernel,
                            **shared,
                        )
                    )
                    print(*(getattr(rows[-1], name) for name in report.names_of(Row)), sep="  ")
                report.write(output, Row, rows)
    print(f"wrote {output}")
    return 0


def _run_once(name: str, which: Pass, index: int) -> None:
    """The child process: a warm-up, and the step between the marks that ncu waits for."""
    device = torch.device("cuda")
    case = CASES[name]
    shape, dtype = case.sizes("reference", device)[index]
    torch.manual_seed(0)
    inputs = case.make_inputs(shape, dtype, device)
    step = CONTENDERS["ours_kernel"].build(case, which)
    step(*inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    step(*inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def _profile(name: str, which: Pass, index: int) -> list[dict[str, str]]:
    command = ["ncu", "--csv", "--page", "raw", "--profile-from-start", "off"]
    command += ["--clock-control", "none", "--metrics", ",".join(METRICS)]
    command += [sys.executable, "-m", "benchmarks", "profile", "--device", "cuda"]
    command += ["--case", name, "--pass", which, "--once", str(index)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"profile: ncu failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return parse(done.stdout)


def parse(text: str) -> list[dict[str, str]]:
    """The kernels in ncu's CSV, which follows lines that begin with ``==``."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(table) < 2:
        return []
    header, units, *kernels = table
    unit_of = dict(zip(header, units, strict=True))
    found = []
    for values in kernels:
        by_name = dict(zip(header, values, strict=True))
        figures = {"kernel": _short(by_name["Kernel Name"])}
        for metric, column in METRICS.items():
            value = float(by_name[metric].replace(",", ""))
            scale = UNITS[unit_of[metric]] if column == "us" else 1.0
            figures[column] = f"{value * scale:.4g}"
        found.append(figures)
    return found


def _short(signature: str) -> str:
    """A kernel's name without its namespaces, template arguments and parameters."""
    named = re.search(r"\w*kernel\w*", signature)
    return named.group() if named else signature.split("(")[0].split("<")[0]
