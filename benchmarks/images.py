"""Models of images whose losses have no op: a variational autoencoder, and a detector's classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.elementwise import focal


def _convolutions(width: int, layers: int, activation: type[nn.Module]) -> list[nn.Module]:
    """``layers`` convolutions, an activation after each."""
    return [
        module
        for _ in range(layers)
        for module in (nn.Conv2d(width, width, 3, padding=1), activation())
    ]


class VariationalAutoencoder(nn.Module):
    """Four times fewer places and a Gaussian at each: Kingma and Welling, 2014.

    Args:
        channels: of the image, and of the Gaussians.
        width: of the convolutions.
        layers: of them at each resolution.
    """

    def __init__(self, channels: int, width: int, layers: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, width, 4, 2, 1),
            nn.SiLU(),
            *_convolutions(width, layers, nn.SiLU),
            nn.Conv2d(width, 2 * channels, 3, padding=1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.SiLU(),
            *_convolutions(width, layers, nn.SiLU),
            nn.ConvTranspose2d(width, channels, 4, 2, 1),
        )

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """The negative evidence lower bound of images [batch, channels, side, side].

        Args:
            noise: [batch, channels, side / 2, side / 2], of a normal distribution.
        """
        mean, log_variance = self.encoder(images).float().chunk(2, dim=1)
        latents = mean + torch.exp(0.5 * log_variance) * noise
        found = self.decoder(latents.to(images.dtype)).float()
        reconstruction = (found - images.float()).square().sum((1, 2, 3)).mean()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum((1, 2, 3)).mean()
        return reconstruction + divergence


class Detector(nn.Module):
    """The classes of nine boxes at each place, and their focal loss: RetinaNet, Lin et al., 2017.

    Args:
        channels: of the image.
        width: of the convolutions.
        layers: of the head.
        classes: of each box.
    """

    BOXES = 9

    def __init__(self, channels: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 8, 8)
        self.head = nn.Sequential(
            *_convolutions(width, layers, nn.ReLU),
            nn.Conv2d(width, self.BOXES * classes, 3, padding=1),
        )

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        """The focal loss of images [batch, channels, side, side], a box that has an object.

        Args:
            target: [batch, 9 * classes, side / 8, side / 8], of 0 and 1.
        """
        logits = self.head(self.stem(images)).float()
        target = target.float()
        return focal(logits, target).sum() / target.sum().clamp(min=1)
