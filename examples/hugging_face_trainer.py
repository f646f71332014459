"""A small Llama, trained by transformers' Trainer."""

from __future__ import annotations

import argparse
import tempfile

import torch
from text import VOCABULARY, batches
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import compile_losses

# Large logits that the model returns are computed only if somebody reads them.
compile_losses.enable(lazy_logits=True)  # the added line


def main(steps: int = 200) -> list[float]:
    """Trains, and returns the logged losses."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    windows = torch.cat(batches(steps, batch=16, length=128))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=16,
            max_steps=steps,
            learning_rate=2e-3,
            torch_compile=True,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
        )
        data = [{"input_ids": window, "labels": window} for window in windows]
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(**vars(parser.parse_args()))
