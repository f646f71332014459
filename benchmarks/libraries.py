"""What is taken of other libraries' code, and why not the rest: ``python -m benchmarks.libraries``.

Each program is a step of a library that is installed, with a small trunk and a head of real size.
``explain`` runs it once, and says of each loss what became of it. Nothing is timed.
"""

from __future__ import annotations

import csv
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import report
from compile_losses.lower.regions import BY_CHUNKS
from compile_losses.report.explanation import explain_call
from compile_losses.sites import Site

OUTPUT = report.ROOT / "benchmarks" / "results" / "libraries.csv"
#: So many that half of the logits are a chunk.
TOKENS, HIDDEN, CLASSES = 2048, 64, 49152
#: Of embeddings.
PAIRS = 8192
#: Special ones among the classes, in the place of those of a released model.
_WORDS = {"vocab_size": CLASSES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FIELDS = ("kind", "library", "program", "losses", "outcome", "reason", "torch", "commit")
#: Outcomes, the best first.
WITH_HEAD, ALONE, LEFT, UNSEEN = "with its head", "loss alone", "left", "unseen"


@dataclass(frozen=True)
class Program:
    """A step of a library.

    Attributes:
        kind: what it is a step of.
        make: makes the function to explain, and what it is called with.
        options: of the backend.
    """

    kind: str
    library: str
    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([self.name, *(f"{name}={value}" for name, value in self.options.items())])


def of_transformers(name: str, **config: Any) -> Callable[[], Any]:
    """A model of transformers, which makes its loss itself."""

    def make() -> Any:
        library = importlib.import_module("transformers")
        model_class = getattr(library, name)
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**_WORDS, **config))
        ids = torch.randint(4, CLASSES, (2, TOKENS // 2))

        def step(ids: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            return loss

        return step, (ids,)

    return make


Loss = Callable[[Tensor, Tensor], Tensor]


def of_head(make_loss: Callable[[], Loss]) -> Callable[[], Any]:
    """A function of a library that is given logits and labels."""

    def make() -> Any:
        loss = make_loss()
        torch.manual_seed(0)
        head, hidden = nn.Linear(HIDDEN, CLASSES, bias=False), torch.randn(2, TOKENS // 2, HIDDEN)
        labels = torch.randint(CLASSES, (2, TOKENS // 2))
        return lambda hidden, labels: loss(head(hidden), labels), (hidden, labels)

    return make


def label_smoother() -> Loss:
    smoother = importlib.import_module("transformers.trainer_pt_utils").LabelSmoother(0.1)
    return lambda logits, labels: smoother({"logits": logits}, labels, shift_labels=True)


def policy_gradient() -> Loss:
    utils = importlib.import_module("trl.trainer.utils")
    return lambda logits, labels: -utils.selective_log_softmax(logits, labels).mean()


def policy_gradient_with_entropy() -> Loss:
    utils = importlib.import_module("trl.trainer.utils")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        entropy = utils.entropy_from_logits(logits).mean()
        found: Tensor = -utils.selective_log_softmax(logits, labels).mean() - 0.01 * entropy
        return found

    return loss


def named(module: str, name: str, soft: bool = False, **options: Any) -> Callable[[], Any]:
    """A criterion of rows of logits.

    Args:
        soft: whether it is given a probability of each class in the place of labels.
    """

    def make_loss() -> Loss:
        criterion = getattr(importlib.import_module(module), name)(**options)

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            logits, labels = logits.flatten(0, 1), labels.flatten()
            if soft:
                labels = F.one_hot(labels, CLASSES).float() * 0.9 + 0.1 / CLASSES
            found: Tensor = criterion(logits, labels)
            return found

        return loss

    return of_head(make_loss)


def of_images(module: str, name: str, kind: str, **options: Any) -> Callable[[], Any]:
    """A criterion of the classes of each pixel, behind a convolution.

    Args:
        kind: "one_hot", "labels" or "binary" targets.
    """

    def make() -> Any:
        criterion = getattr(importlib.import_module(module), name)(**options)
        torch.manual_seed(0)
        layer = nn.Conv2d(8, 1 if kind == "binary" else 21, 1)
        images = torch.randn(2, 8, 256, 256)
        labels = torch.randint(21, (2, 256, 256))
        if kind == "one_hot":
            labels = F.one_hot(labels, 21).movedim(-1, 1).float()
        elif kind == "binary":
            labels = (labels[:, None] > 10).float()
        return lambda images, labels: criterion(layer(images), labels), (images, labels)

    return make


def of_embeddings(module: str, name: str, *numbers: float) -> Callable[[], Any]:
    """A criterion of two batches of embeddings.

    Args:
        numbers: learned ones, such as a scale, that it is given with embeddings of length 1.
    """

    def make() -> Any:
        criterion = getattr(importlib.import_module(module), name)()
        torch.manual_seed(0)
        layer = nn.Linear(HIDDEN, HIDDEN)
        learned = [torch.tensor(number, requires_grad=True) for number in numbers]

        def step(one: Tensor, other: Tensor) -> Tensor:
            rows = [layer(one), layer(other)]
            if learned:
                rows = [F.normalize(each, dim=-1) for each in rows]
            found: Tensor = criterion(*rows, *learned)
            return found

        return step, tuple(torch.randn(2, PAIRS, HIDDEN))

    return make


def perplexity() -> Loss:
    metric = importlib.import_module("torchmetrics.functional.text").perplexity

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = metric(logits, labels)
            return found

    return loss


def adapted(dropout: float) -> Callable[[], Any]:
    """A head with LoRA, by PEFT."""

    def make() -> Any:
        peft = importlib.import_module("peft")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES, bias=False))
        config = peft.LoraConfig(r=8, target_modules=["1"], lora_dropout=dropout)
        model = peft.inject_adapter_in_model(config, model)
        hidden, labels = torch.randn(TOKENS, HIDDEN), torch.randint(CLASSES, (TOKENS,))
        return lambda hidden, labels: F.cross_entropy(model(hidden), labels), (hidden, labels)

    return make


def musicgen(*, drops: bool) -> Callable[[], Any]:
    """Four heads, whose logits are stacked, in training.

    Args:
        drops: whether the decoder may drop layers, which breaks the graph.
    """

    def make() -> Any:
        library = importlib.import_module("transformers")
        torch.manual_seed(0)
        config = library.MusicgenDecoderConfig(
            vocab_size=CLASSES, hidden_size=HIDDEN, ffn_dim=HIDDEN, num_hidden_layers=1,
            num_attention_heads=2, num_codebooks=4, max_position_embeddings=TOKENS, pad_token_id=0,
        )  # fmt: skip
        model = library.MusicgenForCausalLM(config)
        model.model.decoder.training = drops
        ids = torch.randint(1, CLASSES - 1, (4, TOKENS))
        labels = ids.T[None].contiguous()

        def step(ids: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=labels).loss
            return loss

        return step, (ids, labels)

    return make


_DECODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": TOKENS,
}
_GPT2 = {"n_embd": HIDDEN, "n_layer": 1, "n_head": 2, "n_positions": TOKENS}
_ENCODER = {k: _DECODER[k] for k in list(_DECODER)[:4]} | {"max_position_embeddings": TOKENS}
_BART = {
    "d_model": HIDDEN,
    "max_position_embeddings": TOKENS,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": HIDDEN for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
}
_T5 = {
    "decoder_start_token_id": 0,
    "d_model": HIDDEN,
    "d_ff": HIDDEN,
    "d_kv": 32,
    "num_layers": 1,
    "num_heads": 2,
}
_CAUSAL, _MASKED, _PAIRS = "causal language models", "masked language models", "encoder-decoders"
_TRAINERS, _METRICS = "losses of trainers", "metrics"
_ADAPTERS, _HEADS = "adapters", "several heads"
_CLASSIFIERS, _PIXELS, _PAIRED = "classifiers", "segmentation", "losses of all pairs"
PROGRAMS = (
    *(
        Program(_CAUSAL, "transformers", name, of_transformers(f"{name}ForCausalLM", **_DECODER))
        for name in ("Llama", "Mistral", "Qwen3", "Gemma2", "Phi3", "Olmo2", "Cohere", "Granite")
    ),
    *(
        Program(
            _CAUSAL, "transformers", "GPT2", of_transformers("GPT2LMHeadModel", **_GPT2), options
        )
        for options in ({}, {"lazy_logits": True})
    ),
    Program(
        _CAUSAL, "transformers", "OPT",
        of_transformers("OPTForCausalLM", ffn_dim=HIDDEN, word_embed_proj_dim=HIDDEN, **_ENCODER),
    ),
    *(
        Program(_MASKED, "transformers", name, of_transformers(f"{name}ForMaskedLM", **_ENCODER))
        for name in ("Bert", "Roberta", "Electra")
    ),
    Program(
        _PAIRS, "transformers", "T5", of_transformers("T5ForConditionalGeneration", **_T5)
    ),
    Program(
        _PAIRS, "transformers", "Bart", of_transformers("BartForConditionalGeneration", **_BART)
    ),
    Program(_TRAINERS, "transformers", "LabelSmoother", of_head(label_smoother)),
    Program(_TRAINERS, "trl", "selective_log_softmax", of_head(policy_gradient)),
    Program(_TRAINERS, "trl", "entropy_from_logits", of_head(policy_gradient_with_entropy)),
    Program(_ADAPTERS, "peft", "LoRA on the head", adapted(0.0)),
    Program(_ADAPTERS, "peft", "LoRA on the head", adapted(0.0), {"prefer_memory": True}),
    Program(_ADAPTERS, "peft", "LoRA with dropout", adapted(0.1), {"prefer_memory": True}),
    Program(_HEADS, "transformers", "MusicGen in training", musicgen(drops=True)),
    Program(_HEADS, "transformers", "MusicGen without LayerDrop", musicgen(drops=False)),
    *(
        Program(_CLASSIFIERS, "timm", name, named("timm.loss", name, soft, **options))
        for name, soft, options in (
            ("LabelSmoothingCrossEntropy", False, {"smoothing": 0.1}),
            ("SoftTargetCrossEntropy", True, {}),
            ("BinaryCrossEntropy", True, {}),
            ("AsymmetricLossMultiLabel", True, {}),
        )
    ),
    *(
        Program(
            _PIXELS, library, f"{library}'s {name}{', softmax' if how.get('use_softmax') else ''}",
            of_images(f"{library}.losses", name, kind, **how),
        )
        for library, name, kind, how in (
            ("monai", "DiceLoss", "one_hot", {"softmax": True}),
            ("monai", "DiceCELoss", "one_hot", {"softmax": True}),
            ("monai", "FocalLoss", "one_hot", {}),
            ("monai", "FocalLoss", "one_hot", {"use_softmax": True}),
            ("monai", "TverskyLoss", "one_hot", {"softmax": True}),
            ("kornia", "FocalLoss", "labels", {"alpha": 0.5, "reduction": "mean"}),
            ("kornia", "DiceLoss", "labels", {}),
            (
                "kornia", "BinaryFocalLossWithLogits", "binary",
                {"alpha": 0.5, "reduction": "mean"},
            ),
        )
    ),
    *(
        Program(
            _PAIRED, "open_clip", name, of_embeddings("open_clip.loss", name, *numbers), options
        )
        for name, numbers in (("ClipLoss", (10.0,)), ("SigLipLoss", (10.0, -10.0)))
        for options in ({}, {"prefer_memory": True})
    ),
    *(
        Program(_PAIRED, "lightly", name, of_embeddings("lightly.loss", name), options)
        for name, options in (
            ("NTXentLoss", {}),
            ("NTXentLoss", {"prefer_memory": True}),
            ("BarlowTwinsLoss", {}),
            ("VICRegLoss", {}),
        )
    ),
    Program(_METRICS, "torchmetrics", "perplexity", of_head(perplexity)),
    Program(
        _METRICS, "torchmetrics", "perplexity", of_head(perplexity), {"lazy_logits": True}
    ),
)  # fmt: skip


def outcome_of(sites: list[Site]) -> tuple[str, str]:
    """The worst of a step's losses, and why it is no better."""
    found = [(LEFT if s.status == "declined" else _how(s), s.reason) for s in sites]
    if not found:
        return UNSEEN, ""
    worst = max(found, key=lambda each: (WITH_HEAD, ALONE, LEFT).index(each[0]))
    return worst if worst[0] != WITH_HEAD else (WITH_HEAD, "")


def _how(site: Site) -> str:
    is_whole = site.op.startswith("linear_") or any(BY_CHUNKS in each for each in site.plan)
    return WITH_HEAD if is_whole else ALONE


def outcomes() -> Iterator[dict[str, str]]:
    """A row for each program whose library is installed."""
    for program in PROGRAMS:
        with suppress(ImportError):
            importlib.import_module(program.library)
            function, inputs = program.make()
            sites = explain_call(function, inputs, options=program.options).losses
            outcome, reason = outcome_of(sites)
            values = (
                *(program.kind, program.library, str(program), ", ".join(s.op for s in sites)),
                *(outcome, reason, torch.__version__, report.current_commit()),
            )
            yield dict(zip(FIELDS, values, strict=True))


def main() -> None:
    warnings.simplefilter("ignore")
    with OUTPUT.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for row in outcomes():
            print(f"{row['kind']}: {row['program']}: {row['outcome']}  {row['reason']}")
            writer.writerow(row)
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    main()
