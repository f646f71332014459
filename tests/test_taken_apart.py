"""Heads whose logits are put together and taken apart again: each is taken with its loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from compile_losses.report.explanation import explain_call
from tests.corpus.apart import CLASSES, MATCHES, NEAR_MISSES, heads_of
from tests.corpus.heads import head
from tests.graphs import Compiled
from tests.heads import compare
from tests.heads import small_chunks as small_chunks  # a fixture of this file, too

TOLERANCE = {torch.float32: {}, torch.bfloat16: {"rtol": 5e-2, "atol": 5e-2}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MATCHES)
def test_matches(name, dtype):
    sites = compare(MATCHES[name], head(dtype), **TOLERANCE[dtype])
    assert [site.op for site in sites] == ["linear_cross_entropy"] * 2, sites
    assert all("absorbed a linear layer" in site.reason for site in sites)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    """What stock computes, its outputs' memory included."""
    inputs = head()

    def results(function):
        found = function(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        gradients = torch.autograd.grad(found[0] * 3, inputs[:3], allow_unused=True)
        return [*found, *gradients], [each.untyped_storage().nbytes() for each in found]

    found, sizes = results(Compiled(NEAR_MISSES[name], inner_backend="aot_eager"))
    expected, right = results(NEAR_MISSES[name])
    torch.testing.assert_close(found, expected)
    assert sizes == right


@pytest.mark.parametrize("name", ["stacked", "joined", "split"])
def test_symbolic_sizes(name):
    def stacked(h, w, b, t):
        logits = torch.stack(heads_of(h, w, b), 1)
        return loss(logits[:, 0], t) + loss(logits[:, 1], t)

    def joined(h, w, b, t):
        logits = torch.cat(heads_of(h, w, b))
        return loss(logits[: len(h)], t) + loss(logits[len(h) :], t)

    def split(h, w, b, t):
        one, other = torch.cat(heads_of(h, w, b), 1).split(t.shape[1], 1)
        return loss(one, t) + loss(other, t)

    def loss(logits, t):
        return F.cross_entropy(logits.reshape(-1, CLASSES), t.reshape(-1))

    function = {"stacked": stacked, "joined": joined, "split": split}[name]
    h, w, b, t = head()
    compiled = Compiled(function, inner_backend="aot_eager")
    for rows in (2, 5, 4):
        inputs = [h.detach().repeat(rows, 1, 1).requires_grad_(), w, b, t.repeat(rows, 1)]
        for each in (inputs[0], inputs[3]):
            torch._dynamo.mark_dynamic(each, 0)
        found, right = (torch.autograd.grad(f(*inputs), inputs[:3]) for f in (compiled, function))
        torch.testing.assert_close(found, right)
    assert {site.op for site in compiled.sites} == {"linear_cross_entropy"}


def test_why_logits_are_held_that_are_returned():
    """What is put together lies in memory of its own, which is returned."""
    for name in ("returned", "a part returned"):
        (site,) = explain_call(NEAR_MISSES[name], head()).losses
        assert site.op == "cross_entropy"
        assert "several layers" in site.reason


def test_switched_off(monkeypatch):
    monkeypatch.setenv("COMPILE_LOSSES_PASSES", "rewrite.losses,plan")
    sites = compile_losses.explain(MATCHES["stacked second"], *head()).losses
    assert {site.op for site in sites} == {"cross_entropy"}


def test_transformers_musicgen():
    transformers = pytest.importorskip("transformers")
    config = transformers.MusicgenDecoderConfig(
        vocab_size=CLASSES, max_position_embeddings=16, num_hidden_layers=1, ffn_dim=16,
        num_attention_heads=2, hidden_size=16, num_codebooks=3, dropout=0.0, pad_token_id=0,
        bos_token_id=1, layerdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MusicgenForCausalLM(config).eval()  # it breaks graphs in training
    labels = torch.randint(2, CLASSES, (2, 8, 3))

    def step(labels):
        codes = labels.transpose(1, 2).reshape(6, 8)
        return model(input_ids=codes, labels=labels).loss

    sites = explain_call(step, (labels,)).losses
    assert [(site.op, site.status) for site in sites] == [("linear_cross_entropy", "rewritten")] * 3
    expected = torch.autograd.grad(step(labels), model.lm_heads.parameters())
    compiled = torch.compile(step, backend="compile_losses", options={"inner_backend": "aot_eager"})
    torch.testing.assert_close(
        torch.autograd.grad(compiled(labels), model.lm_heads.parameters()), expected
    )
