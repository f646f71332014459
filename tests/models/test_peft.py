"""Heads with adapters of PEFT: LoRA with and without dropout, under torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compile_losses
from tests.constants import set_constants

peft = pytest.importorskip("peft", reason="pip install .[models]")

ROWS, HIDDEN, CLASSES = 64, 16, 200
#: What to compile with; random numbers are eager torch's.
OPTIONS = {"prefer_memory": True, "fallback_random": True}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    set_constants(monkeypatch, least_rows=4, logits_bytes=1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(HIDDEN, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, CLASSES, bias=False)

    def forward(self, x, labels):
        return F.cross_entropy(self.lm_head(self.trunk(x)), labels)


def adapted(dtype, **options):
    """A model whose head has an adapter that does something."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], **options)
    model = peft.inject_adapter_in_model(config, Model()).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def outcome(model, compiled, rows, dtype):
    torch.manual_seed(rows)
    x, labels = torch.randn(rows, HIDDEN, dtype=dtype), torch.arange(rows) * 7 % CLASSES
    model.zero_grad()
    loss = compiled(x, labels)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


ADAPTERS = {
    "plain": {},
    "dropout": {"lora_dropout": 0.2},
    "with a bias": {"lora_bias": True},
    "rank-stabilised": {"use_rslora": True, "lora_dropout": 0.2},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_hold_no_logits(name, dtype, no_code):
    """Dropout is of the hidden states, before the chunks."""
    model = adapted(dtype, **ADAPTERS[name])
    compiled = torch.compile(model, backend="compile_losses", options=OPTIONS)
    close = {} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-3}
    for rows in (ROWS, ROWS + 8, ROWS + 16):  # from the second one on it is a symbol
        expected = outcome(model, model, rows, dtype)
        assert any("lora_A" in name for name in expected)
        torch.testing.assert_close(outcome(model, compiled, rows, dtype), expected, **close)
    inputs = torch.randn(ROWS, HIDDEN, dtype=dtype), torch.arange(ROWS)
    (site,) = compile_losses.explain(compiled, *inputs).losses
    assert any("logits by chunks" in each for each in site.plan)


def test_without_the_option():
    """The reason says what to set."""
    model = adapted(torch.float32, lora_dropout=0.2)
    inputs = torch.randn(ROWS, HIDDEN), torch.arange(ROWS)
    (site,) = compile_losses.explain(model, *inputs).losses
    assert "adds a tensor to the logits" in site.reason
    assert site.reason.endswith("options={'prefer_memory': True} holds none of its logits")


def test_in_evaluation():
    model = adapted(torch.float32, lora_dropout=0.2).eval()
    compiled = torch.compile(model, backend="compile_losses", options=OPTIONS)
    inputs = torch.randn(ROWS, HIDDEN), torch.arange(ROWS)
    with torch.no_grad():
        (site,) = compile_losses.explain(compiled, *inputs).losses
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
    assert any("logits by chunks" in each for each in site.plan)


def test_a_weight_that_is_made_of_the_head():
    """DoRA normalises by the adapted weight's norm, which breaks the graph: its logits are held."""
    model = adapted(torch.float32, use_dora=True)
    compiled = torch.compile(model, backend="compile_losses", options=OPTIONS)
    torch.testing.assert_close(
        outcome(model, compiled, ROWS, torch.float32), outcome(model, model, ROWS, torch.float32)
    )
