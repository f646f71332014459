"""The common options of the benchmarks, and the common columns of their files."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks import report

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_options(
    parser: argparse.ArgumentParser,
    budget_s: float,
    *,
    append: bool = False,
    output: str = "CSV file",
) -> None:
    """``--device``, ``--budget``, ``--output``, ``--commit`` and ``--append``."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
    )
    parser.add_argument(
        "--budget", type=float, default=budget_s, help=f"seconds a contender ({budget_s:g})"
    )
    parser.add_argument("--output", type=Path, help=output)
    if append:
        parser.add_argument(
            "--append",
            action="store_true",
            help="keep what the file holds and was not measured again",
        )
    parser.add_argument("--commit", help="the commit to record, where there is no git checkout")


def provenance(arguments: argparse.Namespace, device: torch.device) -> dict[str, str]:
    """The columns that are the same in all rows of a run."""
    return {
        "device": report.device_name(device),
        "torch": torch.__version__,
        "commit": arguments.commit or report.current_commit(),
    }
