"""TRL's GRPOTrainer with a loss of one's own: GRPO's with a bonus for entropy.

The model is to write vowels. The loss reads the model's logits, with TRL's functions; the
trainer's own loss comes from TRL's fused head, which leaves nothing to rewrite.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable

import torch
from datasets import Dataset
from text import byte_tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

LENGTH = 16  # tokens of a completion


def policy_loss(
    model: nn.Module, prompts: Tensor, completions: Tensor, mask: Tensor, advantages: Tensor
) -> Tensor:
    tokens = torch.cat([prompts, completions], 1)
    logits = model(tokens).logits[:, prompts.shape[1] - 1 : -1]
    log_probs = selective_log_softmax(logits, completions)
    ratio = torch.exp(log_probs - log_probs.detach())
    gain = ratio * advantages.unsqueeze(1) + 0.01 * entropy_from_logits(logits)
    return -(gain * mask).sum() / mask.sum()


class Trainer(GRPOTrainer):
    def __init__(self, *arguments, loss_function: Callable[..., Tensor], **others) -> None:
        super().__init__(*arguments, **others)
        self.loss_function = loss_function

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        names = ("prompt_ids", "completion_ids", "completion_mask", "advantages")
        return self.loss_function(model, *(inputs[name] for name in names))


def vowels(completions: list[str], **others: object) -> list[float]:
    """The rewards: the share of vowels."""
    return [sum(text.count(vowel) for vowel in "aeiou") / LENGTH for text in completions]


def main(steps: int = 200) -> list[float]:
    """Trains, and returns the mean reward of every step."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    loss_function = policy_loss
    loss_function = torch.compile(loss_function, backend="compile_losses")  # the added line
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            LlamaForCausalLM(config),
            vowels,
            GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=64,
                num_generations=16,
                max_completion_length=LENGTH,
                generation_kwargs={"min_new_tokens": LENGTH},
                max_steps=steps,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                bf16=False,
                gradient_checkpointing=False,  # its hooks on the model change with every step
                logging_steps=1,
                save_strategy="no",
                report_to=[],
            ),
            train_dataset=Dataset.from_dict({"prompt": ["abc", "xyz"] * 2 * steps}),
            processing_class=tokenizer,
            loss_function=loss_function,
        )
        trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(**vars(parser.parse_args()))
