"""The demo's small models: plain PyTorch, as anyone would write it. They know nothing of this
package. The language models are in ``language_models.py``."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

BYTES = 256
MASK = 256
IGNORED = -1


class Forecaster(nn.Module):
    """Continues a signal from its past; the mean squared error is written out by hand."""

    def __init__(self, past: int, future: int, hidden: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(past, hidden), nn.Tanh(), nn.Linear(hidden, future))

    def forward(self, past: Tensor, targets: Tensor) -> Tensor:
        predictions = self.layers(past)
        return torch.mean((predictions - targets) ** 2)


class Autoencoder(nn.Module):
    """Squeezes histograms of bytes through a few hidden units; ``nn.MSELoss``."""

    def __init__(self, bins: int = BYTES, hidden: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Linear(bins, hidden)
        self.decoder = nn.Linear(hidden, bins)
        self.loss = nn.MSELoss()

    def forward(self, histograms: Tensor) -> Tensor:
        reconstructed = self.decoder(torch.tanh(self.encoder(histograms)))
        return self.loss(reconstructed, histograms)


class NextByte(nn.Module):
    """Predicts how the byte after a byte is distributed; the KL divergence to the real one."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.head = nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        predictions = torch.softmax(self.head(self.embedding(tokens)), dim=-1)
        return F.kl_div(torch.log(predictions), targets, reduction="batchmean")


class MaskedBytes(nn.Module):
    """Restores masked bytes from their neighbours; cross entropy that ignores all other places."""

    def __init__(self, width: int = 64, reach: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES + 1, width)
        self.mix = nn.Conv1d(width, width, 2 * reach + 1, padding=reach)
        self.head = nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        logits = self.head(torch.tanh(self.mix(x)).transpose(1, 2))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class RobustRegression(nn.Module):
    """Fits many noisy readings at once, outliers among them; smooth L1."""

    def __init__(self, inputs: int, outputs: int, hidden: int = 64, beta: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
        )
        self.beta = beta

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.smooth_l1_loss(self.layers(inputs), targets, beta=self.beta)


class Factorisation(nn.Module):
    """A matrix as the product of two thin ones; the mean squared error of all its entries."""

    def __init__(self, rows: int, cols: int, rank: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(rows, rank))
        self.right = nn.Parameter(torch.randn(rank, cols) / rank**0.5)

    def forward(self, entries: Tensor) -> Tensor:
        return F.mse_loss(self.left @ self.right, entries)


class Recommender(Factorisation):
    """Who likes what, as the logits of a matrix of zeros and ones (Johnson, Logistic Matrix
    Factorization for Implicit Feedback Data, 2014)."""

    def forward(self, entries: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.left @ self.right, entries)
