"""Training steps of diffusers' models, with random weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.models.training import check_step

diffusers = pytest.importorskip("diffusers", reason="pip install .[models]")


def unet():
    return diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16,),
        norm_num_groups=8,
        down_block_types=("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",),
        attention_head_dim=8,
    )


def noisy_images():
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=100)
    images, noise = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
    steps = torch.randint(0, 100, (2,))
    return scheduler, scheduler.add_noise(images, noise, steps), noise, steps


@pytest.mark.parametrize("code", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_denoising_step(code):
    model = unet()
    _, noisy, noise, steps = noisy_images()

    def step():
        prediction = model(noisy, steps).sample
        return F.mse_loss(prediction.float(), noise.float())

    check_step(model, step, ["mse_loss"], code=code, explained=code)


def test_min_snr_weighting():
    """The loss of every element, averaged and weighted per sample."""
    model = unet()
    scheduler, noisy, noise, steps = noisy_images()
    cumulative = scheduler.alphas_cumprod[steps]
    snr = cumulative / (1 - cumulative)
    weights = snr.clamp(max=5.0) / snr

    def step():
        prediction = model(noisy, steps).sample
        loss = F.mse_loss(prediction.float(), noise.float(), reduction="none")
        loss = loss.mean(dim=list(range(1, loss.dim()))) * weights
        return loss.mean()

    check_step(model, step, ["mse_loss"])


def test_autoencoder_step():
    """Reconstruction error and the divergence of the latent distribution, which is no fused op."""
    model = diffusers.AutoencoderKL(
        block_out_channels=(16,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
        sample_size=16,
    )
    images = torch.randn(2, 3, 16, 16)
    noise = torch.randn(2, 4, 16, 16)

    def step():
        posterior = model.encode(images).latent_dist
        latent = posterior.mean + posterior.std * noise
        reconstruction = model.decode(latent).sample
        return F.mse_loss(reconstruction, images) + 1e-6 * posterior.kl().mean()

    check_step(model, step, ["mse_loss"])
