"""The tables in README.md and docs/performance.md, from the CSV files of results.

``python -m benchmarks.pages`` writes them. A table stands between ``<!-- table: NAME -->`` and
``<!-- end of table -->``, where NAME is the name of a function in this module. A test fails if a
page has other figures than the files.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from benchmarks.report import ROOT
from benchmarks.sharded_heads import NETWORK, WAYS, Head

RESULTS = ROOT / "benchmarks" / "results"
_WITH_TABLES = ("performance", "kernels", "heads", "distributed")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _WITH_TABLES))
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

#: Contenders of the reference cases, by their names in the files and in the tables.
_CONTENDERS = {
    "eager": "eager",
    "inductor": "torch.compile",
    "inductor_max_autotune": "max-autotune",
    "quack": "quack",
    "liger": "Liger",
    "ours_compiled": "ours, compiled",
    "ours_eager": "ours, eager op",
    "ours_kernel": "ours, kernels",
}
_MODELS = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "gemma2": "Gemma 2",
    "bert": "BERT",
    "gpt": "GPT",
    "unet": "UNet",
    "vae": "variational autoencoder",
    "detector": "detector with a focal loss",
    "distillation": "distillation of a GPT",
}


def rows_of(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def one(rows: Iterable[dict[str, str]], **values: str) -> dict[str, str]:
    """The row with these values."""
    (found,) = [row for row in rows if all(row[k.rstrip("_")] == v for k, v in values.items())]
    return found


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def short(figure: str) -> str:
    """Three digits of a figure; a dash if there is none."""
    return f"{float(figure):.3g}" if figure else "-"


def pair(row: dict[str, str]) -> str:
    """Milliseconds and MiB."""
    return f"{short(row['ms'])} ms, {float(row['peak_mib']):.0f} MiB"


def taken(*rows: dict[str, str]) -> str:
    """The device, the version of torch and the commits of the figures."""
    commits: dict[str, dict[str, None]] = {}
    for row in rows:
        where = f"{row['device']}, torch {row['torch']}"
        commits.setdefault(where, {})[row["commit"][:7]] = None
    return "; ".join(f"{where}, commit {', '.join(found)}" for where, found in commits.items())


def measured(
    header: Sequence[str], lines: Iterable[Sequence[str]], rows: Iterable[dict[str, str]]
) -> str:
    """A table, and the device, versions and commits of its figures."""
    return f"{markdown(header, lines)}\n{taken(*rows)}.\n"


def front() -> str:
    """A head, a loss of tokens, a model, a regression loss and a distillation loss."""
    linear = rows_of("linear-nvidia-h200.csv")
    shape = {"shape": "8192x4096x128256", "ignored": "0"}
    returned = rows_of("returned-nvidia-h100.csv")
    cases = rows_of("nvidia-h200.csv")
    tokens = rows_of("tokens-nvidia-h100.csv")
    grpo = {"loss": "grpo_float32", "head": "trained"}
    ppo = {"loss": "ppo_entropy", "head": "trained"}
    partly = rows_of("masked-nvidia-h200.csv")
    three_quarters = {
        "shape": "8192x2048x128256",
        **{"loss": "grpo_cross_entropy", "head": "trained", "masked": "0.75"},
    }
    distilled = rows_of("distillation-nvidia-h100.csv")
    mixed = "mixed 8192x2048x128256"
    whole = {"pass_": "fwd_bwd"}
    found = [
        (
            "cross entropy of 128256 classes with its head",
            one(linear, contender="inductor", **shape),
            one(linear, contender="ours_compiled", **shape),
        ),
        (
            "GRPO's loss with the same head, half as wide",
            one(tokens, contender="stock", **grpo),
            one(tokens, contender="ours", **grpo),
        ),
        (
            "GRPO of cross entropies, three quarters of the tokens masked",
            one(partly, way="stock", **three_quarters),
            one(partly, way="ours", **three_quarters),
        ),
        (
            "PPO's loss with a bonus for entropy, none masked",
            one(tokens, contender="stock", **ppo),
            one(tokens, contender="ours", **ppo),
        ),
        (
            "distillation and labels, both heads",
            one(distilled, contender="inductor", shape=mixed),
            one(distilled, contender="ours_compiled", shape=mixed),
        ),
        (
            "Llama of 2 layers, which returns its logits",
            one(returned, contender="inductor", shape="llama 8x1024x2048x128256"),
            one(returned, contender="ours_lazy", shape="llama 8x1024x2048x128256"),
        ),
        (
            "`F.mse_loss` of 2^30 numbers",
            one(cases, case="mse_loss", contender="inductor", **whole),
            one(cases, case="mse_loss", contender="ours_compiled", **whole),
        ),
        (
            "distillation, 8192 rows of 32000 classes",
            one(cases, case="distillation", contender="inductor", **whole),
            one(cases, case="distillation", contender="ours_compiled", **whole),
        ),
    ]
    rows = [(name, pair(stock), pair(ours)) for name, stock, ours in found]
    table = markdown(("forward and backward", "stock `torch.compile`", "ours"), rows)
    sources = taken(*(row for _, *both in found for row in both))
    return f"{table}\nMemory is what is held above inputs. {sources}.\n"


def _cases(
    name: str, contenders: Sequence[str], passes: Collection[str] = ("fwd", "fwd_bwd")
) -> str:
    rows = [row for row in rows_of(name) if row["pass"] in passes]
    found: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in rows:
        key = row["case"], row["shape"], row["dtype"], row["pass"]
        found.setdefault(key, {})[row["contender"]] = row
    lines = []
    for (case, shape, dtype, which), figures in found.items():
        cells = []
        for contender in contenders:
            row = figures.get(contender)
            cells.append("-" if row is None else short(row["ms"]) if row["ms"] else "wrong")
        floor = short(next(iter(figures.values()))["floor_ms"])
        label = "forward" if which == "fwd" else "forward + backward"
        lines.append((f"{case} {shape} {dtype}", label, *cells, floor))
    header = ("case", "pass", *(_CONTENDERS[c] for c in contenders), "floor")
    return measured(header, lines, rows)


def cases_gpu() -> str:
    return _cases("nvidia-h200.csv", tuple(_CONTENDERS))


def cases_h100() -> str:
    names = [name for name in _CONTENDERS if name not in ("eager", "ours_eager", "ours_kernel")]
    return _cases("nvidia-h100.csv", names, ("fwd_bwd",))


def cases_cpu() -> str:
    names = ("eager", "inductor", "inductor_max_autotune", "ours_eager", "ours_compiled")
    return _cases("cpu.csv", names)


def linear() -> str:
    """Milliseconds a step, and MiB above inputs and gradients."""
    rows = [row for row in rows_of("linear-nvidia-h200.csv") if row["ignored"] == "0"]
    contenders = {
        "inductor": "torch.compile",
        "ours_compiled": "ours, compiled",
        "liger": "Liger",
        "cut_cross_entropy": "cut-cross-entropy",
    }
    lines = [
        (shape, *(pair(one(rows, shape=shape, contender=c)) for c in contenders))
        for shape in dict.fromkeys(row["shape"] for row in rows)
    ]
    return measured(("rows x hidden x classes", *contenders.values()), lines, rows)


def linear_h100() -> str:
    rows = rows_of("linear-nvidia-h100.csv")
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        stock, ours = (one(rows, shape=shape, contender=c) for c in ("inductor", "ours_compiled"))
        lines.append((shape, pair(stock), pair(ours), ours["ratio"], ours["range"]))
    header = ("rows x hidden x classes", "torch.compile", "ours, compiled", "ratio", "most turns")
    return measured(header, lines, rows)


#: Losses of tokens, by their names in the files and in the table.
_TOKENS = {
    "mean": "mean cross entropy",
    "z_loss": "mean with a z-loss",
    "masked_mean": "masked mean",
    "grpo_float32": "GRPO, TRL's float32 spelling",
    "grpo_bfloat16": "GRPO, TRL's bfloat16 spelling",
    "grpo_cross_entropy": "GRPO, `cross_entropy`",
    "dpo_float32": "DPO, TRL's float32 spelling",
    "dpo_cross_entropy": "DPO, `cross_entropy`",
    "ppo_entropy": "PPO with an entropy bonus, float32",
    "accuracy": "mean, with logged accuracy and entropy",
    "clamped": "mean, logits clamped",
    "margin": "mean, margin on the target",
    "penalised": "masked mean, squared probabilities penalised",
    "hinge": "hinge over all classes",
}
_HEADS = {"adapted": "frozen, with LoRA"}


def tokens() -> str:
    return _tokens("tokens-nvidia-h100.csv")


def regions() -> str:
    return _tokens("tokens-regions-nvidia-h200.csv")


def without_kernels() -> str:
    return _tokens("tokens-without-kernels-nvidia-h200.csv")


def _tokens(file: str) -> str:
    rows = rows_of(file)
    names = {
        "stock": "stock",
        "ours": "ours",
        "ours_memory": "ours, memory preferred",
        "ours_called": "ours, called",
        "liger": "Liger",
    }
    present = {row["contender"] for row in rows}
    contenders = [name for name in names if name in present]
    lines = []
    for loss, head in dict.fromkeys((row["loss"], row["head"]) for row in rows):
        found = {r["contender"]: r for r in rows if (r["loss"], r["head"]) == (loss, head)}
        cells = [pair(found[name]) if name in found else "-" for name in contenders]
        lines.append((_TOKENS[loss], _HEADS.get(head, head), *cells))
    header = ("loss", "head", *(names[name] for name in contenders))
    return measured(header, lines, rows)


def masked() -> str:
    """Milliseconds of ours and of stock's."""
    rows = rows_of("masked-nvidia-h200.csv")
    shares = list(dict.fromkeys(row["masked"] for row in rows))
    lines = []
    for key in dict.fromkeys((r["shape"], r["loss"], r["head"], r["way"]) for r in rows):
        shape, loss, head, way = key
        if way == "stock":
            continue
        of_cell = [r for r in rows if (r["shape"], r["loss"], r["head"]) == key[:3]]
        ms = {(r["way"], r["masked"]): float(r["ms"]) for r in of_cell}
        cells = [f"{ms[way, share]:.1f}, {ms['stock', share]:.1f}" for share in shares]
        preferred = ", memory preferred" if way == "ours_memory" else ""
        lines.append((shape, _TOKENS[loss] + preferred, head, *cells))
    header = ("shape", "loss", "head", *(f"{float(share):.0%} masked" for share in shares))
    return measured(header, lines, rows)


def _by(
    column: str, rows: list[dict[str, str]], contenders: Iterable[str]
) -> Iterator[tuple[str, list[str]]]:
    """Each value of a column, and the figures of some contenders; a dash if one has none."""
    for value in dict.fromkeys(row[column] for row in rows):
        found = {row["contender"]: row for row in rows if row[column] == value}
        yield value, [pair(found[c]) if c in found else "-" for c in contenders]


def returned() -> str:
    rows = rows_of("returned-nvidia-h100.csv")
    contenders = {
        "inductor": "stock, model",
        "inductor_step": "stock, step",
        "ours": "ours, model",
        "ours_step": "ours, step",
        "ours_lazy": "ours, lazy",
        "ours_lazy_read": "ours, lazy and read",
    }
    lines = []
    for shape, cells in _by("shape", rows, contenders):
        name, _, size = shape.partition(" ")
        lines.append((_MODELS[name], size, *cells))
    return measured(("model", "size", *contenders.values()), lines, rows)


def distillation() -> str:
    rows = rows_of("distillation-nvidia-h100.csv")
    contenders = {
        "inductor": "torch.compile",
        "ours_compiled": "ours, compiled",
        "ours_eager": "ours, called",
        "liger": "Liger",
    }
    names = {"divergence": "divergence", "mixed": "half cross entropy of labels"}
    lines = [(names[shape.split()[0]], *cells) for shape, cells in _by("shape", rows, contenders)]
    return measured(("loss", *contenders.values()), lines, rows)


def elementwise() -> str:
    return _elementwise("elementwise-nvidia-h100.csv")


def elementwise_cpu() -> str:
    return _elementwise("elementwise-cpu.csv")


def _elementwise(file: str) -> str:
    """Geometric means over the losses of each dtype and size."""
    rows = rows_of(file)
    lines = []
    for shape, dtype in sorted(
        {(row["shape"], row["dtype"]) for row in rows},
        key=lambda pair: (math.prod(map(int, pair[0].split("x"))), pair[1] != "float32"),
    ):
        group = [row for row in rows if (row["shape"], row["dtype"]) == (shape, dtype)]
        ratios = [float(row["ratio"]) for row in group]
        of_floor = statistics.geometric_mean(float(row["of_floor"]) for row in group)
        mean, slowest = statistics.geometric_mean(ratios), max(ratios)
        lines.append((shape, dtype, f"{mean:.2f}", f"{slowest:.2f}", f"{of_floor:.2f}"))
    header = ("size", "dtype", "ours / stock", "the slowest", "ours / floor")
    return measured(header, lines, rows)


def behind() -> str:
    """Geometric means over the losses of each layer and dtype."""
    rows = rows_of("behind-nvidia-h200.csv")
    lines = []
    for shape, dtype in dict.fromkeys((row["shape"], row["dtype"]) for row in rows):
        group = [row for row in rows if (row["shape"], row["dtype"]) == (shape, dtype)]
        ratios = [float(row["ratio"]) for row in group]
        memory = [float(row["ours_peak_mib"]) / float(row["stock_peak_mib"]) for row in group]
        size, _, layer = shape.partition(" ")
        figures = statistics.geometric_mean(ratios), min(ratios), max(ratios), max(memory)
        lines.append((layer.replace("_", " "), size, dtype, *(f"{each:.2f}" for each in figures)))
    header = ("layer", "size", "dtype", "ours / stock", "the fastest", "the slowest")
    return measured((*header, "memory, at most"), lines, rows)


_CONTRASTIVE = {
    "infonce": "InfoNCE",
    "ntxent": "NT-Xent",
    "siglip": "SigLIP",
    "clip": "CLIP, an embedding scaled",
    "clip_scaled": "CLIP, the products scaled",
    "clip_twice": "CLIP, two products",
}
_COMPILED = {"stock": "torch.compile", "ours": "ours", "ours_memory": "ours, `prefer_memory`"}


def contrastive() -> str:
    rows = rows_of("contrastive-nvidia-h200.csv")
    kinds = dict.fromkeys((row["loss"], row["dtype"]) for row in rows)
    lines = [
        (_CONTRASTIVE[loss], shape, dtype, *cells)
        for loss, dtype in sorted(kinds, key=lambda kind: [*_CONTRASTIVE].index(kind[0]))
        for shape, cells in _by(
            "shape",
            [row for row in rows if (row["loss"], row["dtype"]) == (loss, dtype)],
            _COMPILED,
        )
    ]
    return measured(("loss", "pairs x width", "dtype", *_COMPILED.values()), lines, rows)


def criteria() -> str:
    """What stock leaves of each loss, alone and behind a layer: its time over the bound."""
    rows = rows_of("criteria-nvidia-h200.csv")
    lines = []
    for loss in dict.fromkeys(row["loss"] for row in rows):
        own = [row for row in rows if row["loss"] == loss]
        cells = [
            next((f"{row['stock_ms']} ({_of_floor(row):.2f})" for row in own
                  if row["dtype"] == dtype and ("behind" in row["shape"]) == behind), "-")
            for behind in (False, True) for dtype in ("float32", "bfloat16")
        ]  # fmt: skip
        ratios = [float(row["ratio"]) for row in own]
        lines.append((loss, own[0]["shape"], *cells, f"{min(ratios):.2f} to {max(ratios):.2f}"))
    header = ("loss", "size", "alone, float32", "alone, bfloat16")
    return measured(
        (*header, "behind a layer, float32", "behind a layer, bfloat16", "ours / stock"),
        lines,
        rows,
    )


def _of_floor(row: dict[str, str]) -> float:
    return float(row["stock_ms"]) / float(row["floor_ms"])


def steps() -> str:
    return _steps("steps-nvidia-h200.csv")


def steps_h100() -> str:
    return _steps("steps-nvidia-h100.csv")


def _steps(file: str) -> str:
    rows = rows_of(file)
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        stock, ours = (one(rows, model=model, contender=c) for c in ("stock", "ours"))
        size, _, layers = ours["size"].partition(", ")
        name = f"{_MODELS[model]}, {layers}"
        curve = f"{float(ours['curve_difference']):.2g}", f"{float(ours['noise']):.2g}"
        lines.append((name, size, pair(stock), pair(ours), *curve, ours["curve_steps"]))
    header = ("model", "size", "stock", "ours", "curves differ by", "noise", "steps")
    return measured(header, lines, rows)


def trainers(file: str = "trainers-nvidia-h200.csv") -> str:
    """Steps of trainers on several ranks: time over stock's, tokens and memory of a rank."""
    rows = [row for row in rows_of(file) if row["ms"]]
    header = [
        "",
        "contender",
        "of stock's time",
        "tokens/s a GPU",
        "MiB a rank",
        "losses differ by",
    ]
    lines = []
    for row in rows:
        held = f"{float(row['state_mib']) + float(row['peak_mib']):.0f}"
        above = f"{held}, {row['peak_mib']} above weights and optimizer"
        ratio = row["ratio"] or "1"
        figures = [ratio, row["tokens_per_s"], above, row["curve_difference"]]
        lines.append([row["way"], f"`{row['contender']}`", *figures])
    return measured(header, lines, rows)


def sharded_heads(file: str = "sharded-heads-nvidia-h200.csv") -> str:
    """A sharded head's step in milliseconds, measured, and on more ranks on paper."""
    rows = rows_of(file)
    header = ["tokens a rank", "ranks", *(name for name, _ in WAYS.values()), "MiB gathered"]
    lines = []
    for head in Head.of(rows):
        cells = [f"{head.ms[contender]:.3g}" for contender in WAYS]
        lines.append(
            [f"{head.rows}", f"{head.ranks}, measured", *cells, _gathered(head, head.ranks)]
        )
        for ranks in (8, 64, 1024):
            bandwidth, where = (None, "") if ranks == 8 else (NETWORK, ", network")
            cells = [f"{head.estimate_ms(way, ranks, bandwidth):.3g}" for way in WAYS]
            name = f"{ranks}, on paper{where}"
            lines.append([f"{head.rows}", name, *cells, _gathered(head, ranks)])
    return measured(header, lines, rows)


def _gathered(head: Head, ranks: int) -> str:
    figures = (head.gathered_mib(way, ranks) for way in ("ours_gathered", "ours_of_rows"))
    return ", ".join(f"{figure:.0f}" for figure in figures)


def libraries() -> str:
    """Steps of other libraries, by kind: how many are taken, and why not the others."""
    rows = rows_of("libraries.csv")
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        whole = [row["program"] for row in own if row["outcome"] == "with its head"]
        others = [f"{row['program']}: {_why(row)}" for row in own if row["program"] not in whole]
        lines.append((kind, ", ".join(whole), "; ".join(others)))
    versions = ", ".join(dict.fromkeys(f"torch {row['torch']}" for row in rows))
    commits = ", ".join(dict.fromkeys(row["commit"][:7] for row in rows))
    table = markdown(("kind", "with the head", "otherwise"), lines)
    return f"{table}\n{versions}, commit {commits}.\n"


def _why(row: dict[str, str]) -> str:
    """What became of a step, and why; without the paths of the machine."""
    reason = re.sub(r"\S*/([\w.]+:\d+)", r"\1", row["reason"])
    return f"{row['outcome']}, {reason}" if reason else row["outcome"]


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        front,
        cases_gpu,
        cases_h100,
        cases_cpu,
        linear,
        linear_h100,
        tokens,
        regions,
        without_kernels,
        masked,
        returned,
        distillation,
        elementwise,
        elementwise_cpu,
        behind,
        contrastive,
        criteria,
        steps,
        steps_h100,
        trainers,
        sharded_heads,
        libraries,
    )
}


def filled(text: str) -> str:
    """A page with its tables as the files have them."""
    return _TABLE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
