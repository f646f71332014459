"""A new elementwise loss takes a functor, an op file, a row in the table and a spec, nothing else.

The test adds one to a copy of the checkout. The suites that go through the specs then test it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from compile_losses.library import PACKAGE
from tests import ROOT

pytest.importorskip("ninja")

NAME = "soft_margin_loss"

FUNCTOR = """\
// log(1 + exp(-scale input target)); with a scale of 1 as torch.nn.functional.soft_margin_loss.
#pragma once

#include "../elementwise.h"

namespace fused::soft_margin_loss {

template <typename acc_t>
struct SoftMarginLoss {
  acc_t scale;

  FUSED_HOST_DEVICE explicit SoftMarginLoss(const double* parameters)
      : scale(static_cast<acc_t>(parameters[0])) {}

  FUSED_HOST_DEVICE acc_t value(acc_t input, acc_t target) const {
    const acc_t margin = scale * input * target;
    return (margin < acc_t(0) ? -margin : acc_t(0)) +
           math::log1p_unit(math::exp(-math::absolute(margin)));
  }
  // By which the product of input and target counts.
  FUSED_HOST_DEVICE acc_t slope(acc_t input, acc_t target) const {
    const acc_t margin = scale * input * target;
    const acc_t decay = math::exp(-math::absolute(margin));
    return -scale * (margin < acc_t(0) ? acc_t(1) : decay) / (acc_t(1) + decay);
  }
  FUSED_HOST_DEVICE acc_t grad_input(acc_t input, acc_t target) const {
    return slope(input, target) * target;
  }
  FUSED_HOST_DEVICE acc_t grad_target(acc_t input, acc_t target) const {
    return slope(input, target) * input;
  }
};

struct Op : OpOf<SoftMarginLoss> {
  using Parameters = Types<double>;  // scale
};

}  // namespace fused::soft_margin_loss
"""

OP = '''\
"""Soft margin loss, log(1 + exp(-scale input target))."""

import torch.nn.functional as F
from torch import Tensor

from compile_losses.ops.checks import reduction_name
from compile_losses.ops.elementwise import Parameter, declare


def reference(input: Tensor, target: Tensor, reduction: int, scale: float) -> Tensor:
    losses = -F.logsigmoid(scale * input * target)
    name = reduction_name(reduction)
    return losses if name == "none" else losses.mean() if name == "mean" else losses.sum()


declare(
    "soft_margin_loss",
    reference,
    [Parameter("float", "scale", "1.0", keyword_only=True)],
    numbers_promote=False,
)
'''

#: What stands before the row in the table, and the row.
BEFORE = "TABLE = [\n"
ROW = """\
    Loss(
        "soft_margin_loss",
        "soft_margin_loss",
        lambda a: ((a["input"], a["target"], reduction_of(a)), {}),
    ),
"""

SPEC = '''\
"""Soft margin loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.specs.inputs import pair
from tests.specs.spec import Spec, Spelling, elementwise_samples, normal


def torch_loss(input, target, reduction=1, *, scale=1.0):
    margin = scale * input * target
    losses = (-margin).clamp(min=0) + torch.log1p(torch.exp(-margin.abs()))
    return (losses, losses.mean(), losses.sum())[reduction]


SPEC = Spec(
    name="soft_margin_loss",
    torch_loss=torch_loss,
    samples=elementwise_samples(normal, normal, [{"scale": scale} for scale in (0.3, 2.0)]),
    operands=lambda *shape, dtype=torch.float64: (
        torch.randn(shape, dtype=dtype),
        torch.randn(shape, dtype=dtype),
    ),
    matches=[
        Spelling("F.soft_margin_loss", F.soft_margin_loss, pair),
        Spelling("sum", lambda a, b: F.soft_margin_loss(a, b, reduction="sum"), pair),
        Spelling("none", lambda a, b: F.soft_margin_loss(a, b, reduction="none"), pair),
        Spelling("nn.SoftMarginLoss", lambda a, b: nn.SoftMarginLoss()(a, b), pair),
        Spelling("aten", lambda a, b: torch.ops.aten.soft_margin_loss(a, b, 2), pair),
    ],
    near_misses=[
        Spelling("squared hinge", lambda a, b: (F.relu(1 - a * b) ** 2).mean(), pair),
    ],
)
'''

#: The four places.
ADDED = {
    f"csrc/losses/elementwise/{NAME}.h",
    f"compile_losses/ops/{NAME}.py",
    "compile_losses/recognize/table.py",
    f"tests/specs/{NAME}.py",
}

#: Builds one library in a copy. The checkout's objects are linked if all of them are as they would
#: be compiled here. ninja knows that by its logs, which name them by their paths, and by the times
#: of what they were made of. Otherwise all are compiled, which takes a third of the time without
#: optimizations.
BUILD = """
import shutil, subprocess, sys
from pathlib import Path
from build_tools.libraries import ROOT, cpu_libraries
from build_tools.ninja_file import BuildFile, program

name, loss, built = sys.argv[1], sys.argv[2], Path(sys.argv[3])
(library,) = [each for each in cpu_libraries() if each.name.endswith(name)]
folder = ROOT / "build" / "kernels"
folder.mkdir(parents=True)
for log in built.glob(".ninja_[dl]*"):
    shutil.copy2(log, folder)


class Linking(BuildFile):
    def object_of(self, library, unit):
        own = super().object_of(library, unit)
        return own if unit.loss == loss else built / own.relative_to(folder)


def written(kind):
    file = kind(folder, {library.name: ROOT / "compile_losses" / f"{name}.so"})
    file.add(library)
    file.write()
    dry = [program(), "-C", ROOT, "-f", file.path, "-n"]
    done = subprocess.run(dry, stdout=subprocess.PIPE, text=True, check=True)
    return file, done.stdout.count("compile_losses: ")


commands = 0
if (built / name).exists():
    file, commands = written(Linking)
if commands != 3:  # two sources, and the linker
    for command in library.compilers.values():
        command.append("-O0")
    file, commands = written(BuildFile)
file.run([library], verbose=False)
"""

#: The tests that have to run, of the suites below.
TESTS = {
    "test_accuracy",
    "test_sizes",
    "test_repeatable",
    "test_unreduced_layout_is_torchs",
    "test_opcheck",
    "test_opcheck_leaves",
    "test_with_grad",
    "test_gradcheck",
    "test_match",
    "test_near_miss",
    "test_loss",
    "test_public_schema_follows_torch",
    "test_wrong_arguments_of_every_op",
}
SUITES = ("test_ops", "test_ops_gradients", "test_recognize", "test_layout")
SUITES += ("conformance/test_hostile",)


def copy_of_checkout(folder: Path) -> None:
    """What the build and the suites read, with the times of the files, but no library."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "kernels.json")
    for source in (PACKAGE, *(ROOT / name for name in ("build_tools", "csrc", "tests"))):
        shutil.copytree(source, folder / source.name, ignore=ignored)
    shutil.copy2(ROOT / "pyproject.toml", folder)


def add_loss(folder: Path) -> None:
    (folder / f"csrc/losses/elementwise/{NAME}.h").write_text(FUNCTOR)
    (folder / f"compile_losses/ops/{NAME}.py").write_text(OP)
    (folder / f"tests/specs/{NAME}.py").write_text(SPEC)
    table = folder / "compile_losses/recognize/table.py"
    text = table.read_text()
    assert text.count(BEFORE) == 1
    table.write_text(text.replace(BEFORE, BEFORE + ROW))


def contents(folder: Path) -> dict[str, str]:
    """A hash of each file that is no output."""
    made = {"__pycache__", ".hypothesis", "build"}
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".so" and not made & {*path.parts}
    }


def run(folder: Path, *command: str) -> str:
    """What a process of Python in the copy prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment = {"MAX_JOBS": "2", **environment, "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_four_places(tmp_path):
    folder = tmp_path / "checkout"
    copy_of_checkout(folder)
    before = contents(folder)
    add_loss(folder)

    run(folder, "-c", BUILD, "_cpu_default", NAME, str(ROOT / "build" / "kernels"))
    outcome = tmp_path / "outcome.xml"
    suites = [f"tests/{suite}.py" for suite in SUITES]
    # Millions of numbers, twenty times, are much for a library without optimizations.
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    options += ["-k", f"{NAME} and not 20_times"]
    run(folder, "-m", "pytest", *suites, *options, f"--junitxml={outcome}")

    cases = xml.etree.ElementTree.parse(outcome).iter("testcase")
    passed = [case.get("name", "") for case in cases if not len(case)]
    assert {name.partition("[")[0] for name in passed} >= TESTS
    assert all(NAME in name for name in passed)
    after = contents(folder)
    assert {path for path in after if after[path] != before.get(path)} == ADDED
    assert after.keys() >= before.keys()
