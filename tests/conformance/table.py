"""docs/conformance.md: how many comparisons ran, by loss, option and mode."""

from __future__ import annotations

import csv
import json
import platform
from collections import Counter
from pathlib import Path

import torch

from tests.conformance.ledger import MODES, OPTIONS, Key

FOLDER = Path(__file__).parent / "counts"
PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

HEAD = """# Conformance with torch

`compile_losses.functional` has the losses of `torch.nn.functional`, with the same names and
signatures. `make conformance` generates this page from the comparisons of the tests in
[tests/conformance](../tests/conformance). Each comparison calls torch's function and ours with
the same arguments, and compares results, dtypes, strides and gradients, or the classes of errors.
Numbers are compared with float64 by the rule of [tests/accuracy.py](../tests/accuracy.py). If
terms cancel, torch's error in similar calls counts as well
([compare.py](../tests/conformance/compare.py)).

| column | compared |
| --- | --- |
| eager | the loss, without gradients |
| gradients | the loss and its gradients, for every set of arguments that may require them |
| double backward | second derivatives too |
| compiled | the unmodified call or module, under `torch.compile(backend="compile_losses")` |
| torch.func | `grad`, `grad` of `grad`, `vjp`, `jacrev` |
| vmap | `vmap`, also of `grad`; `is_grads_batched`; vectorised Jacobians and Hessians |
| forward mode | dual tensors, `jvp`, `jacfwd`, `hessian` |
| autocast | dtypes, values and gradients under bfloat16 and float16 |
| grad modes | `no_grad`, `inference_mode`, deterministic, anomaly detection, meta tensors |
| errors | torch raises, and ours raises the same class |
| drawn | shapes, strides, dtypes and options drawn by hypothesis |

A call counts in every row whose option it uses.

## Where torch's own function runs

- On operands that are not dense tensors of float64, float32, bfloat16 or float16, or are on a
  device without kernels (row "not floating"): torch computes or refuses.
- Under a `__torch_function__` of a class or mode, which gets torch's function.
- Within the ops, inside `torch.func`, `vmap` and forward-mode differentiation, for which custom
  ops have no rules (columns torch.func, vmap, forward mode); and for second derivatives.
- For a class target of shape [1] beside a single row of logits, which torch takes but does not
  differentiate.

## Where ours differ

- Ours have gradients in calls that torch computes but fails to differentiate, such as `huber_loss`
  of two dtypes.
- Ours take uint8 class indices with a weight and label smoothing; torch fails to gather by them.
- Torch counts rows and adds up in float16, ours in float32: our means of more than 65,504 rows are
  finite.
- Torch's `cross_entropy`, `l1_loss` and weighted losses save intermediates for the backward pass;
  ours read their arguments again. If an argument is changed in place in between, autograd raises an
  error with ours, and not with torch's. If it is changed through `.data`, which autograd does not
  see, our gradients change silently, and torch's do not. This concerns the input of
  `cross_entropy`, and the input and target of `l1_loss`, of weighted `mse_loss` and of `kl_div`
  with `log_target`. Change a copy, or call `backward` before.
- Infinite class weights with label smoothing or class probabilities, and infinite class
  probabilities, give nan with ours; torch's loss is infinite in some of these cases.
- With label smoothing, if the targets' class weights cancel and add up to 0, our mean is nan, and
  torch's may be infinite. If they add up to less than the smallest normal number of float32, our
  gradient may be infinite, and torch's is nan.
- If a logit is -inf and its target positive, our binary cross entropy that is written out and our
  `multilabel_soft_margin_loss` are nan, as `binary_cross_entropy_with_logits` is; torch's are
  infinite. The gradients are the same.
- With an infinite `grad_output` compiled code multiplies the unit gradient by it. With
  `cross_entropy` that gives an infinity; torch subtracts infinities and gives nan.
- A unit gradient has the dtype of the input, and is rounded before it is multiplied by
  `grad_output`; torch multiplies first. So if a number of it is below the dtype's smallest normal
  number, or above its largest, a `grad_output` far from 1 does not restore it.
- In `kl_div`'s gradient of the target torch multiplies each term by `grad_output`, and ours
  multiply the sum of the terms. With an infinite `grad_output`, or with 0 and a negative target,
  one of them is nan and the other is not.
- If products or sums overflow on the way to a result that does not, either may be infinite or nan.
- `torch.compile` of torch 2.13 by itself drops the `weight` of `F.l1_loss`; the rewritten loss
  uses it.
"""


def keep(counts: Counter[Key]) -> None:
    """Stores the counts of each device that tests ran on."""
    FOLDER.mkdir(exist_ok=True)
    for device in {key[3] for key in counts}:
        name = platform.machine() if device == "cpu" else torch.cuda.get_device_name()
        found: dict[str, dict[str, dict[str, int]]] = {}
        for (loss, option, mode, where), number in sorted(counts.items()):
            if where == device:
                found.setdefault(loss, {}).setdefault(option, {})[mode] = number
        content = {"device": name, "torch": torch.__version__, "counts": found}
        Path(FOLDER, f"{device}.json").write_text(json.dumps(content, indent=1) + "\n")


def section(device: str) -> str:
    path = FOLDER / f"{device}.json"
    if not path.exists():
        return f"## {device}\n\nNot run yet.\n"
    content = json.loads(path.read_text())
    counts = content["counts"]
    total = sum(sum(options["all"].values()) for options in counts.values())
    lines = [
        f"## {device}",
        "",
        f"{total:,} comparisons on {content['device']} with torch {content['torch']}.",
    ]
    for loss, options in OPTIONS.items():
        lines += [
            "",
            f"### {loss}",
            "",
            "| option | " + " | ".join(MODES) + " |",
            "| --- |" + " ---: |" * len(MODES),
        ]
        for option in ("all", *options):
            numbers = counts.get(loss, {}).get(option, {})
            cells = (f"{numbers[mode]:,}" if mode in numbers else "-" for mode in MODES)
            lines.append(f"| {option} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def versions() -> str:
    """The runs of the suite that build_tools.test_wheel recorded."""
    with (FOLDER / "versions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [
        "## Versions of torch",
        "",
        "The tests ran on a CPU against one installed wheel, by `make test TORCH=...`. With the",
        "pinned version they ran in a checkout, by `make test`. The failed tests expected what is",
        "different with that torch or machine, passed when they ran again, or compared texts of",
        "sources that were not up to date.",
        "",
        "| torch | Python | tests | passed | skipped | failed | commit |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        counts = (f"{int(row[name]):,}" for name in ("passed", "skipped", "failed"))
        told = (row["torch"], row["python"], f"`{row['tests']}`", *counts, row["commit"])
        lines.append("| " + " | ".join(told) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    return "\n".join([HEAD, versions(), section("cpu"), section("cuda")])
