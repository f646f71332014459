"""The model of plain_loop.py as a LightningModule."""

from __future__ import annotations

import argparse

import lightning
import torch
from plain_loop import LanguageModel
from text import batches
from torch import Tensor


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel()
        self.losses: list[Tensor] = []

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        return self.model(tokens)

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: Tensor, index: int) -> None:
        self.losses.append(outputs["loss"].detach())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(steps: int = 200) -> list[float]:
    """Trains, and returns the loss of every step."""
    torch.manual_seed(0)
    module = Module()
    compiled = torch.compile(module, backend="compile_losses")  # the added line
    trainer = lightning.Trainer(
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(compiled, torch.utils.data.DataLoader(batches(steps, 16, 129), batch_size=None))
    losses = [loss.item() for loss in module.losses]
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(**vars(parser.parse_args()))
