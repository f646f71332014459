"""Language models as transformers has them, unmodified: a step that returns only the loss."""

from __future__ import annotations

import pytest
import torch

import compile_losses
from compile_losses.ops.linear import chunk_size
from tests.accuracy import assert_accurate

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 16}


def make(kind, **options):
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    name = f"{kind}ForMaskedLM" if kind == "Bert" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(config)


MODELS = {
    "Llama": lambda: make("Llama", **HEADS),
    "Llama with tied embeddings": lambda: make("Llama", **HEADS, tie_word_embeddings=True),
    "Gemma 2": lambda: make("Gemma2", **HEADS),
    "Qwen 3": lambda: make("Qwen3", **HEADS),
    "Granite": lambda: make("Granite", num_key_value_heads=2, logits_scaling=8.0),
    "BERT": lambda: make("Bert"),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunk_size, "LEAST_ROWS", 8)
    monkeypatch.setattr(chunk_size, "LOGITS_BYTES", 1)


def batch():
    ids = torch.randint(300, (2, 17))
    labels = ids.clone()
    labels[:, :4] = -100
    return ids, labels


def training_step(model, **options):
    return lambda ids, labels: model(input_ids=ids, labels=labels, **options).loss


def results(model, step, inputs):
    model.zero_grad()
    loss = step(*inputs)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, dtype):
    torch.manual_seed(0)
    model = MODELS[name]().eval()  # no dropout
    state = model.state_dict()
    inputs = batch()
    exact_model = MODELS[name]().eval().double()
    exact_model.load_state_dict({k: v.to(dtype) for k, v in state.items()})
    model = model.to(dtype)
    step = training_step(model)
    (site,) = compile_losses.explain(step, *inputs).sites
    assert (site.op, site.status) == ("linear_cross_entropy", "rewritten"), site
    assert ("soft-cap" in site.reason) == (name == "Gemma 2")
    assert ("factor" in site.reason) == (name == "Granite")
    assert site.file == __file__
    eager = results(model, step, inputs)
    options = {"inner_backend": "aot_eager"}
    compiled = torch.compile(step, backend="compile_losses", options=options)
    ours = results(model, compiled, inputs)
    exact = results(exact_model, training_step(exact_model), inputs)
    assert_accurate(ours[0], eager[0], exact[0], "loss")
    for key, gradient in ours[1].items():
        assert_accurate(gradient, eager[1][key], exact[1][key], key)


def test_num_items_in_batch():
    model = MODELS["Llama"]()
    step = training_step(model, num_items_in_batch=torch.tensor(13))
    inputs = batch()
    (site,) = compile_losses.explain(step, *inputs).sites
    assert site.op == "linear_cross_entropy"
    options = {"inner_backend": "aot_eager"}
    compiled = torch.compile(step, backend="compile_losses", options=options)
    torch.testing.assert_close(results(model, compiled, inputs), results(model, step, inputs))


def test_returned_logits_are_left():
    """Whoever compiles the model itself gets its logits; the loss alone is fused."""
    model = MODELS["Llama"]()
    ids, labels = batch()
    (site,) = compile_losses.explain(model, input_ids=ids, labels=labels).sites
    assert (site.op, site.status) == ("cross_entropy", "rewritten")
    assert "the logits have other users" in site.reason


@pytest.mark.slow
def test_training_curve():
    """200 steps of Llama on four batches, compiled by Inductor, follow those without it."""
    curves = []
    for compiled in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        batches = [batch() for _ in range(4)]
        model = MODELS["Llama"]()
        step = training_step(model)
        if compiled:
            step = torch.compile(step, backend="compile_losses")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        curve = []
        for i in range(200):
            optimizer.zero_grad()
            loss = step(*batches[i % 4])
            loss.backward()
            optimizer.step()
            curve.append(loss.detach())
        curves.append(torch.stack(curve))
    assert curves[0][-1] < curves[0][0] - 1
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-3, atol=1e-3)
