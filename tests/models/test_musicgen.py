"""MusicGen, whose logits are a stack of those of several heads, and are returned."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import compile_losses
from tests.constants import set_constants

transformers = pytest.importorskip("transformers", reason="pip install .[models]")

CODEBOOKS, LENGTH, CLASSES = 4, 16, 128


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    set_constants(monkeypatch, least_rows=4, logits_bytes=1)


def make_step(dtype=torch.float32):
    config = transformers.MusicgenDecoderConfig(
        vocab_size=CLASSES, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2,
        num_codebooks=CODEBOOKS, max_position_embeddings=64, dropout=0.0, pad_token_id=CLASSES - 1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MusicgenForCausalLM(config).to(dtype)

    def step(ids, labels):
        return model(input_ids=ids, labels=labels).loss

    return model, step


def batch(length=LENGTH):
    generator = torch.Generator().manual_seed(length)
    draw = partial(torch.randint, CLASSES - 2, generator=generator)
    return draw((2 * CODEBOOKS, length)), draw((2, length, CODEBOOKS))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_loss_takes_its_head(no_code, dtype):
    """In training without LayerDrop, which the decoder's own flag says, the step is one graph."""
    model, step = make_step(dtype)
    model.model.decoder.training = False
    compiled = torch.compile(step, backend="compile_losses", fullgraph=True)
    sites = compile_losses.explain(step, *batch()).losses
    assert [site.op for site in sites] == ["linear_cross_entropy"] * CODEBOOKS
    close = {} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-3}
    for length in (LENGTH, LENGTH - 3, LENGTH + 4):
        found, expected = (
            [loss.detach(), *torch.autograd.grad(loss, list(model.lm_heads.parameters()))]
            for loss in (compiled(*batch(length)), step(*batch(length)))
        )
        torch.testing.assert_close(found, expected, **close)


def test_in_training():
    """The graph with the heads returns the stack: the reason says so, once."""
    _, step = make_step()
    report = compile_losses.explain(step, *batch())
    assert [site.op for site in report.losses] == ["cross_entropy"] * CODEBOOKS
    (reason,) = {site.reason for site in report.losses}
    assert reason.count("puts the logits of several layers together, and this graph returns") == 1
    assert "in a step of one graph" in reason
    assert any("random.uniform" in each for each in report.graph_breaks)
