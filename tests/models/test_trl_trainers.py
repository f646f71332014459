"""Whole steps of TRL's trainers: their own ``compute_loss`` of a batch of their own.

SFT, DPO, KTO, GRPO and RLOO have log-probabilities from TRL's fused head, an autograd.Function that
is a known head. ORPO and CPO read the model's logits.
"""

from __future__ import annotations

import sys

import pytest
import torch

from tests import ROOT
from tests.models.training import check_step

pytest.importorskip("trl", reason="pip install .[models]")

PROMPTS = ["abc", "xyz", "hello", "what"] * 2


@pytest.fixture
def tokenizer(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    from text import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture
def model(tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def options(tmp_path):
    return {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "use_cpu": True,
    }


def pairs():
    from datasets import Dataset

    answers = {"chosen": [" aeiou", " uo b"] * 4, "rejected": [" xxy", " z z z z"] * 4}
    return Dataset.from_dict({"prompt": PROMPTS, **answers})


def ratings():
    from datasets import Dataset

    answers = {"completion": [" aeiou", " uo b"] * 4, "label": [True, False] * 4}
    return Dataset.from_dict({"prompt": PROMPTS, **answers})


def sft(model, options, tokenizer):
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(max_length=64, **options)
    data = pairs().rename_column("chosen", "completion").select_columns(["prompt", "completion"])
    return SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)


def dpo(model, options, tokenizer):
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(precompute_ref_log_probs=True, **options)
    return DPOTrainer(model, args=arguments, train_dataset=pairs(), processing_class=tokenizer)


def kto(model, options, tokenizer):
    from trl import KTOConfig, KTOTrainer

    arguments = KTOConfig(precompute_ref_log_probs=True, **options)
    return KTOTrainer(model, args=arguments, train_dataset=ratings(), processing_class=tokenizer)


def lengths(completions, **_):
    return [float(len(text.strip())) for text in completions]


def rloo(model, options, tokenizer):
    from trl import RLOOConfig, RLOOTrainer

    trainer = RLOOTrainer(
        model,
        lengths,
        RLOOConfig(num_generations=4, max_completion_length=8, beta=0.0, **options),
        train_dataset=pairs().select_columns("prompt"),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1  # as train() sets it
    return trainer


def grpo(model, options, tokenizer):
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model,
        lengths,
        GRPOConfig(num_generations=4, max_completion_length=8, **options),
        train_dataset=pairs().select_columns("prompt"),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1  # as train() sets it
    return trainer


def orpo(model, options, tokenizer):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    arguments = ORPOConfig(max_length=64, **options)
    return ORPOTrainer(model, arguments, train_dataset=pairs(), processing_class=tokenizer)


def cpo(model, options, tokenizer):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    arguments = CPOConfig(max_length=64, **options)
    return CPOTrainer(model, arguments, train_dataset=pairs(), processing_class=tokenizer)


#: The op that TRL's head becomes.
HEAD = "linear_row_statistics"
#: Each trainer, and the losses that are rewritten in its step.
TRAINERS = {
    sft: [HEAD],
    dpo: [HEAD],
    kto: [HEAD, HEAD],
    grpo: [HEAD],
    rloo: [HEAD],
    orpo: ["cross_entropy", "cross_entropy"],
    cpo: ["cross_entropy", "cross_entropy"],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("build", TRAINERS, ids=lambda build: build.__name__)
def test_step(build, model, options, tokenizer):
    trainer = build(model, options, tokenizer)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))

    def step():
        return trainer.compute_loss(trainer.model, batch)

    report = check_step(trainer.model, step, TRAINERS[build])
    heads = [site for site in report.sites if site.op == HEAD]
    assert all(site.reason == "trl's ChunkedLogProbFunction" for site in heads)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [orpo, cpo], ids=lambda build: build.__name__)
@pytest.mark.parametrize("options_of_ours", [{}, {"prefer_memory": True}], ids=str)
def test_two_sets_of_classes(build, options_of_ours, model, options, tokenizer, chunks):
    """The likelihoods of all answers and the loss of the chosen ones are of one head.

    Both trainers log the means of their logits behind a graph break.
    """
    trainer = build(model, options, tokenizer)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))

    def step():
        return trainer.compute_loss(trainer.model, batch)

    given = {"lazy_logits": True, **options_of_ours}
    compiled = torch.compile(step, backend="compile_losses", options=given)
    check_step(trainer.model, step, ["linear_row_statistics"], compiled=compiled)
