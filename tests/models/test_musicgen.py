"""MusicGen, whose logits are a stack of those of several heads, and are returned."""

from __future__ import annotations

import pytest
import torch

import compile_losses
from tests.constants import set_constants

transformers = pytest.importorskip("transformers", reason="pip install .[models]")

CODEBOOKS, LENGTH, CLASSES = 4, 16, 128


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    set_constants(monkeypatch, least_rows=4, logits_bytes=1)


def make_step():
    config = transformers.MusicgenDecoderConfig(
        vocab_size=CLASSES, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2,
        num_codebooks=CODEBOOKS, max_position_embeddings=64, dropout=0.0, pad_token_id=CLASSES - 1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MusicgenForCausalLM(config)
    ids = torch.randint(CLASSES - 2, (2 * CODEBOOKS, LENGTH))
    labels = torch.randint(CLASSES - 2, (2, LENGTH, CODEBOOKS))
    return model, (lambda: model(input_ids=ids, labels=labels).loss)


def test_each_loss_takes_its_head(no_code):
    """Without LayerDrop, which draws numbers in training, the step is one graph."""
    model, step = make_step()
    model.eval()
    sites = compile_losses.explain(step).losses
    assert [site.op for site in sites] == ["linear_cross_entropy"] * CODEBOOKS
    torch.testing.assert_close(torch.compile(step, backend="compile_losses")(), step())


def test_in_training():
    """The graph with the heads returns the stack: the reason says so, once."""
    _, step = make_step()
    report = compile_losses.explain(step)
    assert [site.op for site in report.losses] == ["cross_entropy"] * CODEBOOKS
    (reason,) = {site.reason for site in report.losses}
    assert reason.count("puts the logits of several layers together, and this graph returns") == 1
    assert any("random.uniform" in each for each in report.graph_breaks)
