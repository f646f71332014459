"""A small UNet of diffusers that learns to remove noise, its loss weighted by Min-SNR."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import compute_snr
from torch import Tensor

SIZE = 16


def discs(count: int, generator: torch.Generator) -> Tensor:
    """Images of a disc, its place and colour at random: [count, 3, SIZE, SIZE], from -1 to 1."""
    places = torch.rand(count, 2, 1, 1, generator=generator) * 2 - 1
    colours = torch.rand(count, 3, 1, 1, generator=generator)
    axis = torch.linspace(-1, 1, SIZE)
    distances = (axis[:, None] - places[:, :1]).square() + (axis - places[:, 1:]).square()
    return torch.where(distances < 0.4, colours, -1.0)


def denoising_loss(prediction: Tensor, noise: Tensor, weights: Tensor) -> Tensor:
    """As diffusers' training scripts have it (Hang et al., Efficient Diffusion Training via Min-SNR
    Weighting Strategy, 2023)."""
    loss = F.mse_loss(prediction.float(), noise.float(), reduction="none")
    loss = loss.mean(dim=list(range(1, len(loss.shape)))) * weights
    return loss.mean()


def main(steps: int = 200) -> list[float]:
    """Trains, and returns the loss of every step."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    unet = UNet2DModel(
        sample_size=SIZE,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    ).to(device)
    scheduler = DDPMScheduler(num_train_timesteps=100)
    loss_function = denoising_loss
    loss_function = torch.compile(loss_function, backend="compile_losses")  # the added line
    optimizer = torch.optim.AdamW(unet.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        images = discs(16, generator)
        noise = torch.randn(images.shape, generator=generator)
        times = torch.randint(100, (len(images),), generator=generator)
        noisy = scheduler.add_noise(images, noise, times).to(device)
        snr = compute_snr(scheduler, times)
        weights = snr.clamp(max=5.0) / snr
        prediction = unet(noisy, times.to(device)).sample
        loss = loss_function(prediction, noise.to(device), weights.to(device))
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
