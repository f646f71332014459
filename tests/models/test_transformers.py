"""Models of Hugging Face transformers, built from configurations, with random weights."""

from __future__ import annotations

import pytest
import torch

import compile_losses
from tests.models.training import check_step

pytestmark = pytest.mark.usefixtures("kernels_for_small_losses")

transformers = pytest.importorskip("transformers", reason="pip install .[models]")

VOCABULARY = 256
#: One layer: the losses know nothing of how many there are, and each takes long to compile.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def tokens(batch=2, length=12):
    return torch.randint(4, VOCABULARY, (batch, length))


def images():
    return torch.randn(2, 3, 32, 32)


def language_model(kind, **options):
    """A causal or masked language model; the first tokens of each sequence have no target."""

    def make():
        config = getattr(transformers, f"{kind.removesuffix('ForMaskedLM')}Config")
        model_class = kind if kind.endswith("LM") else f"{kind}ForCausalLM"
        input_ids = tokens()
        labels = input_ids.clone()
        labels[:, :3] = -100
        model = getattr(transformers, model_class)(config(**SIZES, **options))
        return model, {"input_ids": input_ids, "labels": labels}

    return make


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=1,
        n_head=4,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLMLoss",
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens(), "labels": tokens()}


def bert(task, targets, **options):
    def make():
        config = transformers.BertConfig(**SIZES, **options)
        model = getattr(transformers, f"BertFor{task}")(config)
        return model, {"input_ids": tokens(), **targets()}

    return make


def t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": tokens(), "labels": tokens()}


def bart():
    """Its labels are shifted in place before the model, and its head has a bias of its own."""
    config = transformers.BartConfig(
        **ENCODER_DECODER,
        max_position_embeddings=64,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    model = transformers.BartForConditionalGeneration(config)
    return model, {"input_ids": tokens(), "labels": tokens()}


def whisper():
    config = transformers.WhisperConfig(
        **ENCODER_DECODER,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": torch.randn(2, 16, 64), "labels": tokens()}


def vit():
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=5))
    return model, {"pixel_values": images(), "labels": torch.randint(5, (2,))}


def segformer():
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        num_labels=5,
        drop_path_rate=0.0,
        semantic_loss_ignore_index=255,
    )
    labels = torch.randint(5, (2, 32, 32))
    labels[:, :4] = 255
    model = transformers.SegformerForSemanticSegmentation(config)
    return model, {"pixel_values": images(), "labels": labels}


GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
CLASSES = {"labels": lambda: torch.randint(3, (2,))}
MODELS = {
    "Llama": (language_model("Llama", num_key_value_heads=2), ["cross_entropy"]),
    "Qwen3": (language_model("Qwen3", **GROUPED), ["cross_entropy"]),
    "Gemma 2": (language_model("Gemma2", **GROUPED), ["cross_entropy"]),
    "Mixtral": (
        language_model(
            "Mixtral", num_key_value_heads=2, num_local_experts=4, output_router_logits=True
        ),
        ["cross_entropy"],
    ),
    "GPT-2": (gpt2, ["cross_entropy"]),
    "BERT masked language model": (language_model("BertForMaskedLM"), ["cross_entropy"]),
    "BERT classification": (
        bert("SequenceClassification", lambda: {"labels": torch.randint(3, (2,))}, num_labels=3),
        ["cross_entropy"],
    ),
    "BERT regression": (
        bert("SequenceClassification", lambda: {"labels": torch.randn(2)}, num_labels=1),
        ["mse_loss"],
    ),
    "BERT several labels": (
        bert(
            "SequenceClassification",
            lambda: {"labels": torch.rand(2, 3).round()},
            num_labels=3,
            problem_type="multi_label_classification",
        ),
        ["binary_cross_entropy_with_logits"],
    ),
    "BERT question answering": (
        bert(
            "QuestionAnswering",
            lambda: {
                "start_positions": torch.tensor([1, 5]),
                "end_positions": torch.tensor([3, 7]),
            },
        ),
        ["cross_entropy", "cross_entropy"],
    ),
    "BERT tagging": (
        bert("TokenClassification", lambda: {"labels": torch.randint(5, (2, 12))}, num_labels=5),
        ["cross_entropy"],
    ),
    "T5": (t5, ["cross_entropy"]),
    "ViT": (vit, ["cross_entropy"]),
    "Segformer": (segformer, ["cross_entropy"]),
    "Whisper": (whisper, ["cross_entropy"]),
}


def build(name):
    model, batch = MODELS[name][0]()
    model.train()
    for module in model.modules():  # dropout off, whatever a configuration calls it
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model, batch


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_training_step(name):
    """The compiled function returns the loss alone."""
    model, batch = build(name)
    check_step(model, lambda: model(**batch).loss, MODELS[name][1])


@pytest.mark.parametrize("items", [20, torch.tensor(20)], ids=["number", "tensor"])
def test_num_items_in_batch(items):
    """What transformers' Trainer passes when it accumulates gradients."""
    model, batch = build("Llama")
    check_step(
        model,
        lambda: model(**batch, num_items_in_batch=items).loss,
        ["cross_entropy"],
        explained=True,
    )


def test_model_alone():
    """The model is compiled, not the step: its logits are results."""
    model, batch = build("Llama")
    compiled = torch.compile(model, backend="compile_losses")
    check_step(
        model,
        lambda: model(**batch).loss,
        ["cross_entropy"],
        compiled=lambda: compiled(**batch).loss,
    )
    logits = compiled(**batch).logits  # of the same graphs
    torch.testing.assert_close(logits, model(**batch).logits)


def test_where():
    """explain names the line that a user can change."""
    model, batch = build("ViT")

    def step():
        return model(**batch).loss

    (site,) = compile_losses.explain(step).losses
    assert site.file == __file__
    assert site.line == step.__code__.co_firstlineno + 1
    # Without a line of the user's: the model's, not that of transformers' loss functions.
    (site,) = compile_losses.explain(model, **batch).losses
    assert site.file.endswith("modeling_vit.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "ViT"])
def test_inductor(name):
    model, batch = build(name)
    check_step(model, lambda: model(**batch).loss, MODELS[name][1], code=True)
