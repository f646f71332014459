"""TRL's SFTTrainer with a loss of one's own: cross entropy with a z-loss, of the model's logits."""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.nn.functional as F
from datasets import Dataset
from text import batches, byte_tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer


def z_loss(outputs, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    targets = labels[:, 1:].flatten()
    count = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    log_normalisers = logits.logsumexp(-1).masked_fill(targets == -100, 0.0)
    total = F.cross_entropy(logits, targets, reduction="sum")
    return (total + 1e-4 * log_normalisers.square().sum()) / count


def main(steps: int = 200) -> list[float]:
    """Trains, and returns the loss of every step."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
    )
    windows = torch.cat(batches(steps, batch=16, length=128))
    loss_function = z_loss
    loss_function = torch.compile(loss_function, backend="compile_losses")  # the added line
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            LlamaForCausalLM(config),
            SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=16,
                max_steps=steps,
                max_length=128,
                learning_rate=2e-3,
                bf16=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
            ),
            train_dataset=Dataset.from_dict({"input_ids": windows.tolist()}),
            processing_class=tokenizer,
            compute_loss_func=loss_function,
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(**vars(parser.parse_args()))
