"""Language models as transformers has them, unmodified: a step that returns only the loss."""

from __future__ import annotations

import pytest
import torch

import compile_losses
from tests.accuracy import assert_accurate
from tests.constants import set_constants
from tests.models.test_transformers import GROUPED, bart, language_model, t5
from tests.models.training import check_step, gradients, reported

MODELS = {
    "Llama": language_model("Llama", **GROUPED),
    "Llama with tied embeddings": language_model("Llama", **GROUPED, tie_word_embeddings=True),
    "Gemma 2": language_model("Gemma2", **GROUPED),
    "Qwen 3": language_model("Qwen3", **GROUPED),
    "Granite": language_model("Granite", num_key_value_heads=2, logits_scaling=8.0),
    "BERT": language_model("BertForMaskedLM"),
    # These change something in place before the head.
    "BART": bart,
    "T5": t5,
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    set_constants(monkeypatch, least_rows=8, logits_bytes=1)


def training_step(model, batch, **options):
    return lambda: model(**batch, **options).loss


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, dtype):
    model, batch = MODELS[name]()
    model = model.eval().to(dtype)  # no dropout
    exact_model = MODELS[name]()[0].eval().double()
    exact_model.load_state_dict(model.state_dict())
    step = training_step(model, batch)
    eager = gradients(model, step)
    options = {"inner_backend": "aot_eager"}
    compiled = torch.compile(step, backend="compile_losses", options=options)
    with reported() as report:
        ours = gradients(model, compiled)
    (site,) = report.losses
    assert (site.op, site.status) == ("linear_cross_entropy", "rewritten"), site
    assert ("soft-cap" in site.reason) == (name == "Gemma 2")
    assert ("factor" in site.reason) == (name == "Granite")
    assert ("an addend for each class" in site.reason) == (name == "BART")
    assert site.file == __file__
    exact = gradients(exact_model, training_step(exact_model, batch))
    assert_accurate(ours[0], eager[0], exact[0], "loss")
    for key, gradient in ours[1].items():
        assert_accurate(gradient, eager[1][key], exact[1][key], key)


def test_num_items_in_batch():
    model, batch = MODELS["Llama"]()
    step = training_step(model, batch, num_items_in_batch=torch.tensor(13))
    check_step(model, step, ["linear_cross_entropy"], explained=True)


def test_returned_logits_are_left():
    """Whoever compiles the model itself gets its logits, unless lazy ones were asked for."""
    model, batch = MODELS["Llama"]()
    (site,) = compile_losses.explain(model, **batch).losses
    assert (site.op, site.status) == ("cross_entropy", "rewritten")
    assert "its logits are returned: options={'lazy_logits': True} would save" in site.reason


@pytest.mark.slow
def test_training_curve():
    """200 steps of Llama on four batches, compiled by Inductor, follow those without it."""
    curves = []
    for compiled in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, *_ = MODELS["Llama"]()
        batches = [MODELS["Llama"]()[1] for _ in range(4)]

        def step(batch, model=model):
            return model(**batch).loss

        if compiled:
            step = torch.compile(step, backend="compile_losses")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        curve = []
        for i in range(200):
            optimizer.zero_grad()
            loss = step(batches[i % 4])
            loss.backward()
            optimizer.step()
            curve.append(loss.detach())
        curves.append(torch.stack(curve))
    assert curves[0][-1] < curves[0][0] - 1
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-3, atol=1e-3)
