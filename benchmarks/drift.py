"""Whether sums of a head's gradient that are rounded bias training: ``python -m benchmarks.drift``.

The weight's gradient of a linear layer with its loss is a sum over chunks of rows. In bfloat16 each
sum may be rounded. A small language model is trained with a head in bfloat16 whose gradient is

- ``float32``: one product in float32 that is never rounded, the reference;
- ``N chunks``: the sum of N products by our op, rounded N times;
- ``N chunks, float32 sum``: the same with a sum in float32, rounded once at the end.

Everything else is in float32 and the same for all, with the same batches. Of each step the loss and
the entropy of the predictions on other text are written down. The file has for each way and seed
the means over the last third of the steps, and the differences from the reference of the same seed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_losses.linear import linear_cross_entropy
from compile_losses.ops.linear import row_chunks

CONTEXT, HIDDEN, CLASSES, ROWS = 4, 64, 512, 1024
CHUNKS = (1, 2, 4, 8, 32)
REFERENCE = "float32"


@dataclass
class Row:
    """Means over the last third of a run's steps, and what they differ by from the reference."""

    way: str
    seed: int
    loss: float
    entropy: float
    loss_difference: float
    entropy_difference: float


class _Float32Head(torch.autograd.Function):
    """The mean cross entropy of a layer in bfloat16, with the weight's gradient in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        h, w = hidden.bfloat16(), weight.bfloat16()
        logits = (h @ w.t()).float()
        probabilities = logits.softmax(-1)
        probabilities[torch.arange(len(target)), target] -= 1
        ctx.save_for_backward(h, w, (probabilities / len(target)).bfloat16())
        return F.cross_entropy(logits, target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        h, w, of_logits = ctx.saved_tensors
        return grad * (of_logits @ w).float(), grad * (of_logits.float().t() @ h.float()), None


def ours(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), target)


@contextmanager
def forced(chunks: int, *, wide: bool) -> Iterator[None]:
    """So many chunks, whose sum is rounded each time, or in float32."""
    plan, sums = row_chunks.plan, row_chunks.sums_in_float32
    row_chunks.plan = lambda *_, **__: row_chunks.Plan(ROWS // chunks)
    row_chunks.sums_in_float32 = lambda *_: wide
    try:
        yield
    finally:
        row_chunks.plan, row_chunks.sums_in_float32 = plan, sums


class Model(nn.Module):
    """Predicts a token from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, HIDDEN)
        self.body = nn.Sequential(
            nn.Linear(CONTEXT * HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN),
            nn.LayerNorm(HIDDEN),
        )  # fmt: skip
        self.head = nn.Linear(HIDDEN, CLASSES, bias=False)

    def forward(self, context: Tensor) -> Tensor:
        return self.body(self.embedding(context).flatten(1))


@cache
def text_of(seed: int, length: int) -> Tensor:
    """Tokens of which each depends on the one before."""
    generator = torch.Generator().manual_seed(seed)
    following = torch.randint(CLASSES, (CLASSES, 8), generator=generator)
    likely = torch.tensor([8.0, 4, 2, 2, 1, 1, 1, 1])
    drawn = torch.multinomial(likely, length, replacement=True, generator=generator)
    token, tokens = 0, []
    for choice in drawn.tolist():
        token = int(following[token, choice])
        tokens.append(token)
    return torch.tensor(tokens)


def train(seed: int, steps: int, loss_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """The loss and the entropy on other text at each step, [steps, 2]."""
    torch.manual_seed(seed)
    model, found = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    windows = text_of(seed, ROWS * 40).unfold(0, CONTEXT + 1, 1)
    held, windows = windows[:ROWS], windows[ROWS:]
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (ROWS,))]
        loss = loss_of(model(batch[:, :-1]), model.head.weight, batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            log_p = model.head(model(held[:, :-1])).log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1).mean()
            found.append((float(F.nll_loss(log_p, held[:, -1])), float(entropy)))
    return torch.tensor(found)


def ways() -> Iterator[tuple[str, int, bool]]:
    for chunks in CHUNKS:
        yield f"{chunks} chunk{'s' * (chunks > 1)}", chunks, False
    yield f"{CHUNKS[-1]} chunks, float32 sum", CHUNKS[-1], True


def run(seeds: int, steps: int) -> tuple[list[Row], dict[str, Tensor]]:
    """The rows of all ways and seeds; and the differences of the entropy, [seeds, steps]."""
    rows, curves = [], dict[str, list[Tensor]]()
    for seed in range(seeds):
        reference = train(seed, steps, _Float32Head.apply)
        last = slice(-(steps // 3), None)
        loss, entropy = reference[last].mean(0).tolist()
        rows.append(Row(REFERENCE, seed, loss, entropy, 0.0, 0.0))
        for name, chunks, wide in ways():
            print(f"seed {seed}, {name}", file=sys.stderr, flush=True)
            with forced(chunks, wide=wide):
                found = train(seed, steps, ours)
            difference = (found - reference)[last].mean(0).tolist()
            rows.append(Row(name, seed, *found[last].mean(0).tolist(), *difference))
            curves.setdefault(name, []).append((found - reference)[:, 1])
    return rows, {name: torch.stack(each) for name, each in curves.items()}


def plot(curves: dict[str, Tensor], file: Path) -> None:
    """The entropy's difference from float32 sums, its mean over seeds and their spread."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, each in curves.items():
        mean, error = each.mean(0), each.std(0, correction=min(1, len(each) - 1)) / len(each) ** 0.5
        steps = range(1, len(mean) + 1)
        (line,) = axes.plot(steps, mean, label=name)
        axes.fill_between(steps, mean - error, mean + error, alpha=0.15, color=line.get_color())
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel="step", ylabel="entropy - entropy with float32 sums")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks.drift", description=__doc__)
    options.add_argument("--seeds", type=int, default=4)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--output", type=Path, default=Path("benchmarks/results/drift-cpu.csv"))
    given = options.parse_args()
    rows, curves = run(given.seeds, given.steps)
    with given.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    for name in curves:
        own = [row for row in rows if row.way == name]
        for what in ("loss_difference", "entropy_difference"):
            values = [getattr(row, what) for row in own]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            print(f"{name:28} {what:20} {statistics.mean(values):+.5f} +- {error:.5f}")
    plot(curves, given.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
