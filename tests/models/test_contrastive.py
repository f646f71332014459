"""Contrastive models of transformers, whose losses read the products of all pairs both ways."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lower.two_softmaxes import ONE_READ
from tests.constants import set_constants
from tests.graphs import Compiled

transformers = pytest.importorskip("transformers", reason="pip install .[models]")

PAIRS, WIDTH, LENGTH, SIDE, CLASSES = 24, 16, 6, 8, 50
SMALL = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TEXT = {**SMALL, "vocab_size": CLASSES, "max_position_embeddings": LENGTH}
VISION = {**SMALL, "image_size": SIDE, "patch_size": SIDE // 2}
CLIP = {"text_config": TEXT, "vision_config": VISION, "projection_dim": WIDTH}


def clip():
    return transformers.CLIPModel(transformers.CLIPConfig(**CLIP))


def chinese_clip():
    return transformers.ChineseCLIPModel(transformers.ChineseCLIPConfig(**CLIP))


def vision_text():
    text = transformers.BertConfig(**TEXT)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        transformers.ViTConfig(**VISION), text, projection_dim=WIDTH
    )
    return transformers.VisionTextDualEncoderModel(config)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [clip, chinese_clip, vision_text])
def test_models(make, no_code, monkeypatch):
    """The loss and gradients; the model also returns the products, as they are and turned."""
    set_constants(monkeypatch, two_softmaxes_bytes=0)
    torch.manual_seed(0)
    model = make().double().eval()
    batch = {
        "input_ids": torch.randint(3, CLASSES, (PAIRS, LENGTH)),
        "pixel_values": torch.randn(PAIRS, 3, SIDE, SIDE, dtype=torch.float64),
        "attention_mask": torch.ones(PAIRS, LENGTH, dtype=torch.int64),
        "return_loss": True,
    }
    compiled = Compiled(lambda: model(**batch))
    found = []
    for step in (compiled, lambda: model(**batch)):
        model.zero_grad()
        output = step()
        output.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([output.loss, output.logits_per_image, output.logits_per_text, *gradients])
    torch.testing.assert_close(*found)
    assert sum(ONE_READ in choice for choice in compiled.choices) == 2
