"""Faults planted by hand, each of which ``make quick`` finds: ``python -m tests.planted``.

Each fault is planted in a copy of the tree, and the tests run there that ``make quick`` chooses for
the changed module. A fault that no test finds is a hole in the net.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT


@dataclass(frozen=True)
class Fault:
    """A change of one place.

    Attributes:
        module: below ``compile_losses``.
        old, new: the text there, which occurs once, and what takes its place.
    """

    module: str
    old: str
    new: str


FAULTS = [
    Fault(
        "recognize/heads/logits.py",
        "self.factor, self.height = self.factor / 2, 0.5",
        "self.factor, self.height = self.factor / 2, 1.0",
    ),
    Fault(
        "recognize/heads/head.py", "if of_weight == hidden + classes:", "if of_weight == classes:"
    ),
    Fault(
        "recognize/heads/row_moves.py",
        "return moves[::-1] if factors == of_other else None",
        "return moves if factors == of_other else None",
    ),
    Fault(
        "recognize/heads/row_classes.py",
        "alike = alike and NOTHING_IGNORED in ignored and max(ignored) < 0",
        "alike = alike and NOTHING_IGNORED in ignored",
    ),
    Fault(
        "recognize/graph/memory.py",
        "            if writer < first:",
        "            if first < writer:",
    ),
    Fault(
        "recognize/spellings/polynomial.py",
        "        return (exp(rest) if rest else number(1.0)) * math.exp(shift)",
        "        return (exp(rest) if rest else number(1.0)) * shift",
    ),
    Fault(
        "recognize/spellings/softmax_algebra.py",
        "return left + (right - left) * weight",
        "return left + right * weight",
    ),
    Fault(
        "recognize/spellings/normal_form.py",
        "constant = constant * numerator / denominator",
        "constant = constant * denominator / numerator",
    ),
    Fault(
        "recognize/heads/plain_logits.py",
        "if classes < constants.statistics_classes:",
        "if classes > constants.statistics_classes:",
    ),
    Fault(
        "recognize/guards.py",
        "        if needed == value.requires_grad:",
        "        if needed or value.requires_grad:",
    ),
    Fault("recognize/match.py", "replace_uses(self.root, node)", "replace_uses(node, self.root)"),
    Fault(
        "lower/row_gradients.py",
        "    if len(tangents) != 1 or not is_one_number(tangents[0]):",
        "    if not tangents or not is_one_number(tangents[0]):",
    ),
    Fault(
        "lower/held_logits.py",
        "emit(backward, aten.permute.default, (of_logits, [1, 0]))",
        "emit(backward, aten.permute.default, (of_logits, [0, 1]))",
    ),
    Fault(
        "lower/in_place.py",
        "replace(node, emit(node, fused.scale_saved.default, args",
        "replace(node, emit(node, fused.scale.default, args",
    ),
    Fault(
        "lower/dead_buffers.py",
        "        if user not in readers and not earlier(user):",
        "        if user not in readers and earlier(user):",
    ),
    Fault(
        "lower/plan.py",
        "saves = kernel.moved <= _MARGIN * stock.moved and",
        "saves = kernel.moved >= _MARGIN * stock.moved and",
    ),
    Fault(
        "lower/linear_losses.py",
        "    if held and plain and not graph.request.prefer_memory:",
        "    if held and plain:",
    ),
    Fault(
        "lower/cost.py",
        "numel *= 1 if isinstance(stride, int) and stride == 0 else hint_of(size)",
        "numel *= hint_of(size)",
    ),
    Fault(
        "op_traits.py",
        "return None if dim == cut else dim - is_gone",
        "return None if dim == cut else dim",
    ),
    Fault(
        "lower/known_factors.py",
        "constant = factor.constant / right if divides else factor.constant * right",
        "constant = factor.constant * right",
    ),
    Fault("lower/equal_losses.py", "storage_of(kept)} <= returned", "storage_of(kept)} < returned"),
    Fault(
        "lower/mutated_inputs.py",
        "if copy not in graph.backward]",
        "if copy in graph.backward]",
    ),
    Fault(
        "lower/statistics.py",
        "cost = Cost((1 + 2 * trained) * logits,",
        "cost = Cost((1 + trained) * logits,",
    ),
    Fault(
        "lower/elementwise/find.py",
        "return len(dependent) == 1 and args.count(dependent[0]) == 1",
        "return len(dependent) == 1",
    ),
    Fault(
        "lower/elementwise/refuse.py",
        "    if written > sum(read.values()):",
        "    if written > 9 * sum(read.values()):",
    ),
    Fault(
        "lower/elementwise/rows.py",
        "        row.append(dim)\n        length *= size",
        "        row.append(dim)\n        length += size",
    ),
    Fault(
        "lower/elementwise/move.py",
        "        replace_uses(gradient, scaled)\n",
        "        replace_uses(gradient, saved)\n",
    ),
    Fault(
        "lower/gradient_in_forward.py",
        "        scaling = factor.tangent\n",
        "        pass\n",
    ),
    Fault(
        "recognize/spellings/absorb.py",
        "set(node.users) <= {match.root, *match.interior}",
        "match.root in node.users",
    ),
    Fault(
        "recognize/spellings/difference.py",
        "for a, e in zip(actual, expected, strict=True)",
        "for a, e in zip(actual[:1], expected[:1], strict=True)",
    ),
    Fault(
        "recognize/spellings/divergence.py",
        "x, z, beta = z, x, parts[0][2]",
        "x, z = z, x",
    ),
    Fault(
        "recognize/heads/known_heads.py",
        "isinstance(node.target, OpOverload | OpOverloadPacket)",
        "isinstance(node.target, OpOverload)",
    ),
    Fault(
        "recognize/spellings/masked_terms.py", "return abs(factor) >= 1", "return abs(factor) > 0"
    ),
    Fault(
        "recognize/spellings/logistic.py",
        "return below + (ONE if packet is aten.ge else ZERO) * slope",
        "return below + (ZERO if packet is aten.ge else ONE) * slope",
    ),
    Fault(
        "recognize/spellings/piecewise.py",
        "sign = 1.0 if keys == self.pair else -1.0",
        "sign = 1.0",
    ),
    Fault(
        "recognize/spellings/probabilities.py",
        "        if scale is None or (pick[1], pick[3]) != (key, dim):",
        "        if scale is None or pick[1] != key:",
    ),
    Fault(
        "recognize/graph/rounding.py",
        'return [scale * error if error < float("inf") else 0.0 for error in errors]',
        "return [scale * error for error in errors]",
    ),
    Fault(
        "recognize/steps.py",
        "            if self._changes:\n                raise _AgainError",
        "            if not self._changes:\n                raise _AgainError",
    ),
    Fault(
        "recognize/spellings/table.py",
        "    if size_average is not None or reduce is not None:\n        if value",
        "    if size_average is not None:\n        if value",
    ),
    Fault(
        "recognize/graph/unrolled.py",
        "if piece is None or not computed_alike(piece.start, place):",
        "if piece is None:",
    ),
    Fault("lazy/path.py", "if path._is_touched or (", "if ("),
    Fault("lazy/rows.py", "    if chunk >= len(input):", "    if chunk < len(input):"),
    Fault(
        "lazy/source.py",
        "            if before != now:\n",
        "            if before != now and before is None:\n",
    ),
    Fault(
        "known_heads/liger.py",
        "loss = loss / (target != ignore_index).sum().clamp(min=1)",
        "loss = loss / target.numel()",
    ),
    Fault("known_heads/rows.py", "factor = scale / temperature", "factor = scale * temperature"),
    Fault(
        "ops/row_picks.py",
        "own - nll * (picks == target.unsqueeze(1))",
        "own + nll * (picks == target.unsqueeze(1))",
    ),
    Fault("ops/row_loss.py", "if needs_input or needs_target:", "if needs_input:"),
    Fault(
        "ops/linear/row_losses.py",
        "self.factor, self.z_factor = one / self.total_weight, one / self.count",
        "self.factor = self.z_factor = one / self.total_weight",
    ),
    Fault(
        "ops/linear/class_blocks.py",
        "gradients.bias_sum[classes] += logits.sum(0)",
        "gradients.bias_sum[classes] = logits.sum(0) * 2",
    ),
    Fault(
        "distributed/layout.py",
        "tuple(Partial() if i in mesh_dims else Replicate() for i in range(mesh.ndim))",
        "tuple(Replicate() for i in range(mesh.ndim))",
    ),
    Fault("lower/regions/rules.py", "    if others != sorted(others):", "    if not others:"),
    Fault(
        "lower/regions/steps.py",
        "    return len(one) == len(other) and all(map(same, one, other))",
        "    return len(one) == len(other)",
    ),
    Fault("ops/linear/weight_sum.py", "starts = self.total is None", "starts = True"),
    Fault(
        "ops/linear/region_program.py",
        'and kwargs.get("keepdim") is True',
        "and True",
    ),
]


def plant(fault: Fault, tree: Path) -> None:
    path = tree / "compile_losses" / fault.module
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(
            f"{fault.module}: expected once, found {text.count(fault.old)} times: {fault.old}"
        )
    path.write_text(text.replace(fault.old, fault.new))


def found(fault: Fault, tree: Path) -> tuple[bool, str]:
    """Whether a test failed, and the first that did.

    Raises:
        RuntimeError: the tests did not run.
    """
    path = tree / "compile_losses" / fault.module
    before = path.read_text()
    plant(fault, tree)
    try:
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.quick",
                "-x",
                "-n",
                "0",
                "--tb=no",
                "-p",
                "no:cacheprovider",
            ],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(before)
    first = next((x for x in run.stdout.splitlines() if x.startswith("FAILED")), "")
    if not first and run.returncode:
        raise RuntimeError(f"no test ran: {run.stdout[-1000:]} {run.stderr[-1000:]}")
    return bool(first), first


def copy_of_the_tree(folder: Path) -> Path:
    """A checkout of the tree as it is, in which nothing else has changed."""
    tree = folder / "tree"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    built = [str(f.relative_to(ROOT)) for f in (ROOT / "compile_losses").glob("*.so")]
    built += ["compile_losses/kernels.json"]
    for name in [*files, *built]:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    as_one = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q", "-b", "main"], ["add", "-A"], [*as_one, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tree, check=True)
    return tree


def main(arguments: list[str]) -> int:
    """All faults, or those of the modules whose names have one of the arguments in them."""
    chosen = [f for f in FAULTS if not arguments or any(a in f.module for a in arguments)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder))
        for fault in chosen:
            start = time.time()
            is_found, first = found(fault, tree)
            missed += not is_found
            word = "found" if is_found else "MISSED"
            print(f"{word} {fault.module} in {time.time() - start:.0f} s: {first}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
