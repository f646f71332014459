"""TRL's trainers, trained for some steps with and without this package: the same logs and weights.

The head of each trainer is TRL's own, which is a known head. Only what is not marked slow runs in
``make test``.
"""

from __future__ import annotations

import copy

import pytest
import torch

import compile_losses
from compile_losses import switches
from tests.models.test_trl_trainers import dpo, grpo, kto, options, rloo, sft, tokenizer
from tests.models.training import TOLERANCE, gradients

__all__ = ["options", "tokenizer"]  # fixtures
NAME = "trl's ChunkedLogProbFunction"
TRAINERS = [sft, dpo, kto, grpo, rloo]
#: What is logged of time, and of nothing that is computed.
UNTOLD = ("runtime", "per_second", "step_time", "flos", "profiling")


def model_of(kind, tokenizer):
    import transformers

    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    own = {
        "Llama": {},
        "Gemma2": {"final_logit_softcapping": 0.5, "head_dim": 8},
        "Granite": {"logits_scaling": 8.0},
        "Cohere": {"logit_scale": 0.0625},
    }[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, **own)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", TRAINERS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_eager_step(kind, build, options, tokenizer):
    trainer = build(model_of(kind, tokenizer), options, tokenizer)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))

    def step():
        return trainer.compute_loss(trainer.model, batch)

    loss, expected = gradients(trainer.model, step)
    switches.counters().clear()
    with compile_losses.enable():
        ours, found = gradients(trainer.model, step)
    assert switches.counters()["known heads"][NAME] >= 1
    torch.testing.assert_close(ours, loss, rtol=TOLERANCE, atol=TOLERANCE)
    size = sum(gradient.square().sum() for gradient in expected.values()).sqrt()
    difference = sum((found[name] - expected[name]).square().sum() for name in expected).sqrt()
    assert found.keys() == expected.keys()
    assert size > 0 or build in (grpo, rloo)  # where all answers may be as good
    assert difference <= TOLERANCE * size


def trained(build, model, options, tokenizer, *, ours, peft=None):
    """The numbers that are logged at each step, and the weights after the last."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    switches.counters().clear()
    model = copy.deepcopy(model)
    if peft is not None:
        model = peft(model)
    given = {**options, "max_steps": 10, "logging_steps": 1, "save_strategy": "no"}
    given |= {"disable_tqdm": True, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    if ours:
        with compile_losses.enable():
            trainer = build(model, given, tokenizer)
            trainer.train()
        counted = switches.counters()
        met = counted["known heads"][NAME] + counted["rewritten"]["linear_row_statistics"]
        assert met >= 1, counted
    else:
        trainer = build(model, given, tokenizer)
        trainer.train()
    logs = [
        {k: v for k, v in entry.items() if isinstance(v, float) and not any(u in k for u in UNTOLD)}
        for entry in trainer.state.log_history
    ]
    return logs, {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def check(build, model, options, tokenizer, **more):
    logs, weights = trained(build, model, options, tokenizer, ours=False, **more)
    own_logs, own_weights = trained(build, model, options, tokenizer, ours=True, **more)
    assert len(own_logs) == len(logs) >= 10
    for step, (found, expected) in enumerate(zip(own_logs, logs, strict=True)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if step == 0 and "accuracies" in name:
                continue  # policy and reference are equal, and rounding errors are compared
            # Ten steps of Adam make more of a rounding error than one.
            assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-4), (step, name)
    for name, weight in weights.items():
        torch.testing.assert_close(own_weights[name], weight, rtol=1e-3, atol=1e-4)


VARIANTS = {
    "eager": {},
    "compiled": {"torch_compile": True},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("build", TRAINERS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("variant", VARIANTS)
def test_training(variant, build, options, tokenizer):
    given = {**options, **VARIANTS[variant]}
    if build in (grpo, rloo) and variant == "accumulation":
        given |= {"per_device_train_batch_size": 4}
    check(build, model_of("Llama", tokenizer), given, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("build", TRAINERS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("kind", ["Gemma2", "Granite", "Cohere"])
def test_models(kind, build, options, tokenizer):
    check(build, model_of(kind, tokenizer), options, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("build", TRAINERS, ids=lambda build: build.__name__)
def test_lora(build, compiled, options, tokenizer):
    peft = pytest.importorskip("peft", reason="pip install peft")

    def adapted(model):
        torch.manual_seed(0)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, settings)

    given = {**options, "torch_compile": compiled}
    check(build, model_of("Llama", tokenizer), given, tokenizer, peft=adapted)


@pytest.mark.slow
@pytest.mark.parametrize("build", [sft, dpo], ids=lambda build: build.__name__)
def test_bfloat16(build, options, tokenizer):
    """As far from training in float32 as with TRL's own head."""
    model = model_of("Llama", tokenizer)
    exact, _ = trained(build, model, options, tokenizer, ours=False)

    def error(**given):
        logs, _ = trained(build, model, {**options, "bf16": True}, tokenizer, **given)
        pairs = [(a["loss"], b["loss"]) for a, b in zip(logs, exact, strict=True) if "loss" in a]
        return sum((a - b) ** 2 for a, b in pairs) ** 0.5

    theirs = error(ours=False)
    assert error(ours=True) <= max(2 * theirs, 1e-4)
