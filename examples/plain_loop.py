"""A language model that computes its own loss, trained in a plain loop."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from text import VOCABULARY, batches
from torch import Tensor, nn


class LanguageModel(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, length: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        h = self.tokens(inputs) + self.positions.weight[:length]
        logits = self.head(self.blocks(h, mask=mask, is_causal=True))
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def main(steps: int = 200) -> list[float]:
    """Trains, and returns the loss of every step."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LanguageModel().to(device)
    model = torch.compile(model, backend="compile_losses")  # the added line
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for tokens in batches(steps, batch=16, length=129):
        loss = model(tokens.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) % 20 == 1:
            print(f"step {len(losses):4}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(**vars(parser.parse_args()))
