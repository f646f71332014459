"""Counts the comparisons that ran, for docs/conformance.md."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

#: Names the folder that every process of a test run writes its counts to.
VARIABLE = "COMPILE_LOSSES_CONFORMANCE"

#: What a loss is compared under; the columns of the tables.
MODES = (
    "eager",
    "gradients",
    "double backward",
    "compiled",
    "torch.func",
    "vmap",
    "forward mode",
    "autocast",
    "grad modes",
    "errors",
    "drawn",
)

#: The options of each loss; the rows of the tables.
REDUCTIONS = ("none", "mean", "sum")
LAYOUTS = ("any strides", "empty")
PAIRS = ("broadcast", "mixed dtypes", "not floating")
OPTIONS = {
    "mse_loss": (*REDUCTIONS, "legacy reduction", "weight", *PAIRS, *LAYOUTS),
    "l1_loss": (*REDUCTIONS, "legacy reduction", "weight", *PAIRS, *LAYOUTS),
    "smooth_l1_loss": (*REDUCTIONS, "legacy reduction", "beta", *PAIRS, *LAYOUTS),
    "huber_loss": (*REDUCTIONS, "delta", "weight", *PAIRS, *LAYOUTS),
    "kl_div": (*REDUCTIONS, "batchmean", "legacy reduction", "log_target", *PAIRS, *LAYOUTS),
    "nll_loss": (
        *REDUCTIONS,
        "legacy reduction",
        "weight",
        "ignore_index",
        "[N, C, ...]",
        *LAYOUTS,
    ),
    "cross_entropy": (
        *REDUCTIONS,
        "legacy reduction",
        "class indices",
        "class probabilities",
        "weight",
        "ignore_index",
        "label_smoothing",
        "[N, C, ...]",
        *LAYOUTS,
    ),
    "binary_cross_entropy_with_logits": (
        *REDUCTIONS,
        "legacy reduction",
        "weight",
        "pos_weight",
        "mixed dtypes",
        "not floating",
        *LAYOUTS,
    ),
}

#: Loss, option, mode and device.
Key = tuple[str, str, str, str]

COUNTS: Counter[Key] = Counter()


def options_of(call: Any) -> set[str]:
    """The options that a call makes use of."""
    tensors, options = call.tensors, call.options
    input, target = tensors["input"], tensors["target"]
    legacy = options.get("size_average") is not None or options.get("reduce") is not None
    used = {"legacy reduction"} if legacy else {options.get("reduction", "mean")}
    used |= {name for name in ("weight", "pos_weight") if tensors.get(name) is not None}
    defaults = {"beta": 1.0, "delta": 1.0, "log_target": False, "label_smoothing": 0.0}
    used |= {name for name, default in defaults.items() if options.get(name, default) != default}
    if "ignore_index" in options:
        used.add("ignore_index")
    if call.loss == "cross_entropy":
        used.add("class probabilities" if target.is_floating_point() else "class indices")
    if call.loss in ("cross_entropy", "nll_loss"):
        if input.dim() > 2:
            used.add("[N, C, ...]")
    else:
        if input.shape != target.shape:
            used.add("broadcast")
        if input.is_floating_point() and target.is_floating_point():
            if input.dtype != target.dtype:
                used.add("mixed dtypes")
        else:
            used.add("not floating")
    if input.numel() == 0:
        used.add("empty")
    if not all(tensor.is_contiguous() for tensor in tensors.values() if tensor is not None):
        used.add("any strides")
    return used & set(OPTIONS[call.loss])


def count(call: Any, mode: str) -> None:
    assert mode in MODES, mode
    device = call.tensors["input"].device.type
    for option in ("all", *options_of(call)):
        COUNTS[call.loss, option, mode, device] += 1


def write() -> None:
    """Leaves this process's counts in the folder, if one is named."""
    folder = os.environ.get(VARIABLE)
    if folder and COUNTS:
        rows = [[*key, value] for key, value in sorted(COUNTS.items())]
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(rows))


def read(folder: Path) -> Counter[Key]:
    """What all processes of a run left there."""
    total: Counter[Key] = Counter()
    for path in folder.glob("*.json"):
        for *key, number in json.loads(path.read_text()):
            total[tuple(key)] += number
    return total
