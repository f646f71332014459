"""A UNet that predicts the noise in an image, as in diffusion models."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 8


class Block(nn.Module):
    """Two convolutions and a shortcut; the embedding of the noise's step is added in between."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(GROUPS, inputs), nn.GroupNorm(GROUPS, outputs)])
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.second(F.silu(self.norms[1](h)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self-attention over the pixels of an image, with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(attended.squeeze(1).transpose(1, 2).reshape(x.shape))


class UNet(nn.Module):
    """Three resolutions, ``layers`` blocks at each on the way down and up, attention at the lowest.

    Args:
        channels: of the image.
        width: channels at the highest resolution; a multiple of 8.
    """

    def __init__(self, channels: int, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        time = 4 * width
        widths = [width, 2 * width, 4 * width]
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        inputs = width
        for outputs in widths:
            blocks = [Block(outputs if i else inputs, outputs, time) for i in range(layers)]
            self.down.append(nn.ModuleList(blocks))
            inputs = outputs
        self.shrink = nn.ModuleList(nn.Conv2d(w, w, 3, 2, 1) for w in widths[:-1])
        self.attention = Attention(widths[-1])
        self.middle = Block(widths[-1], widths[-1], time)
        for outputs in reversed(widths):
            blocks = [Block((outputs if i else inputs) + outputs, outputs, time)
                      for i in range(layers)]  # fmt: skip
            self.up.append(nn.ModuleList(blocks))
            inputs = outputs
        self.grow = nn.ModuleList(nn.Conv2d(w, w, 3, padding=1) for w in reversed(widths[1:]))
        self.leave = nn.Sequential(
            nn.GroupNorm(GROUPS, width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1)
        )

    def forward(self, image: Tensor, steps: Tensor) -> Tensor:
        """The noise in images [N, channels, side, side] at steps [N]; side is a multiple of 4."""
        half = torch.arange(self.width // 2, device=image.device) * (-2 / self.width)
        angles = steps[:, None] * torch.exp(math.log(10_000) * half)
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(image.dtype))
        x, kept = self.enter(image), []
        for level, blocks in enumerate(self.down):
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x, time)
                kept.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
        x = self.middle(self.attention(x), time)
        for level, blocks in enumerate(self.up):
            for block in blocks:  # type: ignore[attr-defined]
                x = block(torch.cat([x, kept.pop()], 1), time)
            if level < len(self.grow):
                x = self.grow[level](F.interpolate(x, scale_factor=2.0))
        return self.leave(x)  # type: ignore[no-any-return]
