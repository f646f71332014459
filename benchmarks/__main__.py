"""``python -m benchmarks``: checks and times the fused losses against torch and other libraries.

``--size growth`` measures small to large sizes, for the plots of bandwidth against size and row
width. ``python -m benchmarks plot FILE.csv`` draws an earlier run again. Other commands measure:
``compile-matrix`` compiled steps against stock torch.compile, ``elementwise`` losses that have no
op, ``behind`` those behind a layer, ``criteria`` those of segmentation and the like, ``linear`` a
linear layer with its cross entropy, ``tokens`` losses of tokens over such a layer, ``one_weight``
several heads of one weight, ``distillation`` from one such layer into another, ``contrastive``
losses of pairs, ``returned`` models that return their logits, ``steps`` whole training steps of
models, ``trainers`` those of other libraries' trainers on several ranks, ``attention`` those of a
Llama whose attention is called in other ways, ``overhead`` eager calls against torch, and
``profile`` the limits of the kernels.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import torch

from benchmarks import (
    attention,
    behind,
    contrastive,
    criteria,
    distillation,
    elementwise,
    linear,
    matrix,
    one_weight,
    overhead,
    plots,
    profile,
    report,
    returned,
    steps,
    tokens,
    trainers,
)
from benchmarks.cases import CASES, PASSES, Size
from benchmarks.clock import make_clock, measure_bandwidth
from benchmarks.contenders import CONTENDERS
from benchmarks.measure import make_problem, measure
from benchmarks.options import add_options
from benchmarks.progress import progress


def _shape(text: str) -> tuple[int, int]:
    rows, cols = text.split("x")
    return int(rows), int(cols)


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, allow_abbrev=False
    )
    main.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    main.add_argument(
        "--contender", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="default: all"
    )
    main.add_argument("--pass", dest="passes", nargs="+", choices=PASSES, default=list(PASSES))
    main.add_argument("--size", choices=("reference", "small", "growth"), default="reference")
    main.add_argument("--shape", type=_shape, nargs="+", help="ROWSxCOLS, instead of --size")
    main.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of --shape"
    )
    add_options(
        main,
        0.25,
        append=True,
        output="CSV file (benchmarks/results/DEVICE.csv, growth-DEVICE.csv)",
    )
    main.add_argument("--no-plots", dest="plots", action="store_false")
    commands = main.add_subparsers(
        dest="command",
        metavar="{plot,compile-matrix,elementwise,behind,criteria,linear,tokens,one_weight,"
        "distillation,contrastive,returned,steps,trainers,attention,overhead,profile}",
    )
    matrix.add_command(commands)
    elementwise.add_command(commands)
    behind.add_command(commands)
    criteria.add_command(commands)
    contrastive.add_command(commands)
    linear.add_command(commands)
    steps.add_command(commands)
    trainers.add_command(commands)
    attention.add_command(commands)
    tokens.add_command(commands)
    one_weight.add_command(commands)
    returned.add_command(commands)
    distillation.add_command(commands)
    overhead.add_command(commands)
    profile.add_command(commands)
    plot = commands.add_parser("plot", help="draw the PNG files of a CSV file")
    plot.add_argument("file", type=Path)
    return main


def run(arguments: argparse.Namespace) -> int:
    """Runs the requested measurements; 1 if an op of this package is wrong or fails."""
    device = torch.device(arguments.device)
    kind = "growth" if arguments.size == "growth" and not arguments.shape else ""
    output = arguments.output or report.default_output(device, kind)
    commit = arguments.commit or report.current_commit()
    name = report.device_name(device)
    rows = report.kept(output, report.Row, append=arguments.append)
    work = [(CASES[case], size) for case in arguments.case for size in _sizes(arguments, case)]
    contenders = [CONTENDERS[contender] for contender in arguments.contender]
    broken = False
    with progress(len(work) * len(arguments.passes)) as bar:
        bar.describe("measuring the memory's bandwidth")
        clock = make_clock(device)
        bandwidth = measure_bandwidth(clock)
        bar.print(
            f"{name}, torch {torch.__version__}, commit {commit}\n"
            f"memory: read {bandwidth.read:.4g} TB/s (floor of fwd: bytes read over it), "
            f"copy {bandwidth.copy:.4g} TB/s (floor of fwd_bwd: bytes read and written over it)"
        )
        for case, size in work:
            bar.describe(f"{case.name}: float64 reference")
            problem = make_problem(case, size, clock)
            for which in arguments.passes:
                results = measure(problem, which, contenders, clock, arguments.budget, bar.describe)
                made = [
                    report.make_row(problem, which, result, bandwidth, name, commit)
                    for result in results
                ]
                bar.print(report.table(problem, which, made, results))
                # A contender that does not run here has no line; a wrong one has an empty line.
                tried = [r for r, m in zip(made, results, strict=True) if not m.not_run]
                rows |= {row.key: row for row in tried}
                broken |= any(m.broken for m in results if m.contender.name.startswith("ours"))
                report.write(output, report.Row, rows.values())
                bar.advance()
            del problem
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"wrote {output}")
    if arguments.plots:
        plots.draw(output)
    return int(broken)


def _sizes(arguments: argparse.Namespace, case: str) -> tuple[Size, ...]:
    if arguments.shape:
        dtype = getattr(torch, arguments.dtype)
        return tuple((shape, dtype) for shape in arguments.shape)
    return CASES[case].sizes(arguments.size, torch.device(arguments.device))


def main() -> int:
    arguments = parser().parse_args()
    if arguments.command == "plot":
        plots.draw(arguments.file)
        return 0
    if arguments.command == "compile-matrix":
        return matrix.run(arguments)
    if arguments.command == "elementwise":
        return elementwise.run(arguments)
    if arguments.command == "criteria":
        return criteria.run(arguments)
    if arguments.command == "linear":
        return linear.run(arguments)
    if arguments.command == "tokens":
        return tokens.run(arguments)
    if arguments.command == "behind":
        return behind.run(arguments)
    if arguments.command == "contrastive":
        return contrastive.run(arguments)
    if arguments.command == "one_weight":
        return one_weight.run(arguments)
    if arguments.command == "distillation":
        return distillation.run(arguments)
    if arguments.command == "returned":
        return returned.run(arguments)
    if arguments.command == "steps":
        return steps.run(arguments)
    if arguments.command == "trainers":
        return trainers.run(arguments)
    if arguments.command == "attention":
        return attention.run(arguments)
    if arguments.command == "overhead":
        return overhead.run(arguments)
    if arguments.command == "profile":
        return profile.run(arguments)
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
