"""Language models as transformers has them, compiled themselves: they return logits and loss."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

import compile_losses
from compile_losses.lazy import LazyLogits
from compile_losses.lazy.memory import Memory
from compile_losses.torch_internals.tensors import FakeTensor
from tests.constants import set_constants
from tests.graphs import interpreted
from tests.models.test_linear_cross_entropy import MODELS
from tests.models.test_transformers import SIZES, VOCABULARY, gpt2, tokens

transformers = pytest.importorskip("transformers", reason="pip install .[models]")

#: The head of BART adds a tensor to its logits, which stays with them.
LAZY = {name: model for name, model in MODELS.items() if name != "BART"}
OPTIONS = {"lazy_logits": True, "inner_backend": "aot_eager"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    torch._dynamo.reset()
    set_constants(monkeypatch, least_rows=8, logits_bytes=1)


@pytest.fixture
def reads(monkeypatch):
    """The logits that are computed, but for those that tracing asks the shape of."""
    found = []
    read = Memory.read

    def noted(memory):
        result = read(memory)
        if not isinstance(result, FakeTensor):
            found.append(result.shape)
        return result

    monkeypatch.setattr(Memory, "read", noted)
    return found


def trained(function, model, batch):
    model.zero_grad()
    out = function(**batch)
    loss = out if isinstance(out, torch.Tensor) else out.loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out, loss.detach(), gradients


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LAZY)
def test_models(name, reads):
    model, batch = LAZY[name]()
    model = model.eval()
    expected, loss, gradients = trained(model, model, batch)
    compiled = torch.compile(model, backend="compile_losses", options=OPTIONS)
    for _ in range(2):
        found, ours, mine = trained(compiled, model, batch)
        assert isinstance(found.logits, LazyLogits)
        assert not reads
        torch.testing.assert_close((ours, mine), (loss, gradients), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.logits.detach() + 0, expected.logits.detach())
    assert isinstance(found, type(expected))
    assert compiled.eval()(**batch)["logits"].shape == expected["logits"].shape


# Models in whose graphs there is a break between the head and the loss, or before both.

_TEXT = {**SIZES, "num_key_value_heads": 2}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_IMAGE, _FIRST = VOCABULARY - 1, 3


def pictured(patches=4, **others):
    """Tokens with an image among them, which has no labels."""
    ids = tokens().clamp(max=_IMAGE - 5)
    ids[:, _FIRST : _FIRST + patches] = _IMAGE
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == _IMAGE, -100),
        "attention_mask": torch.ones_like(ids),
        **others,
    }


def llava():
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=_IMAGE,
        image_seq_length=4,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    return model, pictured(pixel_values=torch.randn(2, 3, 16, 16))


def paligemma():
    vision = transformers.SiglipVisionConfig(**_VISION, vision_use_head=False)
    config = transformers.PaliGemmaConfig(
        vision_config=vision.to_dict(),
        text_config=transformers.GemmaConfig(**_TEXT, head_dim=8).to_dict(),
        image_token_index=_IMAGE,
        projection_dim=32,
        hidden_size=32,
    )
    batch = pictured(pixel_values=torch.randn(2, 3, 16, 16))
    batch["token_type_ids"] = torch.ones_like(batch["input_ids"])
    return transformers.PaliGemmaForConditionalGeneration(config), batch


def qwen_vl():
    sections = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": sections},
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [0],
        },
        image_token_id=_IMAGE,
        video_token_id=_IMAGE - 1,
        vision_start_token_id=_IMAGE - 2,
        vision_end_token_id=_IMAGE - 3,
    )
    batch = pictured(
        pixel_values=torch.randn(2 * 16, 3 * 2 * 4 * 4),
        image_grid_thw=torch.tensor([[1, 4, 4], [1, 4, 4]]),
    )
    batch["input_ids"][:, _FIRST - 1] = _IMAGE - 2
    batch["mm_token_type_ids"] = (batch["input_ids"] == _IMAGE).int()
    return transformers.Qwen2_5_VLForConditionalGeneration(config), batch


BROKEN = {"GPT-2": gpt2, "LLaVA": llava, "PaliGemma": paligemma, "Qwen2.5-VL": qwen_vl}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BROKEN)
def test_steps_with_graph_breaks(name, reads):
    torch.manual_seed(0)
    model, batch = BROKEN[name]()
    model = model.eval()

    def step(**batch):
        return model(**batch).loss

    _, loss, gradients = trained(step, model, batch)
    compiled = torch.compile(step, backend="compile_losses", options=OPTIONS)
    compile_losses.counters().clear()
    _, ours, mine = trained(compiled, model, batch)
    assert compile_losses.counters()["rewritten"] == {"linear_cross_entropy": 1}
    assert not reads
    mine = {name: mine[name] for name in gradients}  # compiled, unused parameters get zeros
    torch.testing.assert_close((ours, mine), (loss, gradients), rtol=1e-4, atol=1e-6)


# transformers' Trainer


def dataset(batch):
    rows = len(batch["input_ids"])
    return [{key: value[i % rows] for key, value in batch.items()} for i in range(8)]


def metrics(prediction):
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": right.mean(), "size": np.abs(prediction.predictions).sum()}


def logged(model, batch, folder, **options):
    """What a Trainer logs of some steps and an evaluation after each epoch."""
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=True,
        **options,
    )
    rows = dataset(batch)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=metrics
    )
    trainer.train()
    timed = ("runtime", "second")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in timed)}
        for entry in trainer.state.log_history
    ]


TRAINED = [
    ("Llama", {}, "the trainer"),
    ("Llama", {}, "the user"),
    ("BERT", {"bf16": True}, "the trainer"),
    *(
        pytest.param(name, options, "the trainer", marks=pytest.mark.slow)
        for name, options in (
            ("Llama", {"bf16": True}),
            ("BERT", {}),
            ("Qwen 3", {}),
            ("Gemma 2", {}),
            ("Llama", {"gradient_checkpointing": True}),
        )
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "options", "compiles"), TRAINED)
def test_trainer(name, options, compiles, tmp_path, monkeypatch, reads):
    """The same losses and metrics, and no logits in a training step."""
    found = []
    for lazy in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batch = LAZY[name]()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        enabled = compile_losses.enable(lazy_logits=True) if lazy else nullcontext()
        with interpreted(monkeypatch), enabled:
            if compiles == "the trainer":
                found.append(logged(model, batch, tmp_path, torch_compile=True, **options))
            else:
                found.append(logged(torch.compile(model), batch, tmp_path, **options))
    assert not reads
    assert [entry.keys() for entry in found[1]] == [entry.keys() for entry in found[0]]
    tolerance = 1e-2 if options.get("bf16") else 1e-4
    for ours, stock in zip(*found[::-1], strict=True):
        assert ours == pytest.approx(stock, rel=tolerance)


def test_metrics_of_a_training_step(reads):
    """Accuracy and entropy as trainers log them beside the loss: rows at a time, no logits."""
    model, batch = LAZY["Llama"]()
    compiled = torch.compile(model, backend="compile_losses", options=OPTIONS)

    def logged(out):
        logits, labels = out.logits.detach(), batch["labels"]
        right = (logits[..., :-1, :].argmax(-1) == labels[..., 1:])[labels[..., 1:] != -100]
        flat = logits.reshape(-1, logits.shape[-1])
        entropies = []
        for rows in flat.split(4):
            log_probs = rows.log_softmax(-1)
            entropies.append(-(log_probs.exp() * log_probs).sum(-1))
        return right.float().mean(), torch.cat(entropies).mean()

    torch.testing.assert_close(logged(compiled(**batch)), logged(model(**batch)))
    assert not reads
