"""Models and data for ``python -m benchmarks steps``: built from configurations, random weights.

The language models read the text of ``pydoc_data.topics``, two bytes a token, modulo the number of
classes: real text with a few thousand different tokens, far fewer than a large vocabulary has.
Images, the noise that is added to them, and the teacher's weights are random.
Nothing is downloaded, and there is no dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.images import Detector, VariationalAutoencoder
from benchmarks.unet import UNet
from compile_losses.demo.data import BYTES, text, windows
from compile_losses.demo.language_models import GPT

Batch = tuple[Tensor, ...]
TEMPERATURE, NOISE_STEPS, MASKED_SHARE = 2.0, 1000, 0.15


@dataclass(frozen=True)
class Size:
    """Sizes of a model and its batches. ``length``: of a sequence, or the side of an image."""

    batch: int
    length: int
    width: int
    layers: int
    classes: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}x{self.width}x{self.classes}, {self.layers} layers"

    @property
    def attention(self) -> dict[str, int]:
        """Heads of 64 elements, in groups of four."""
        heads = max(2, self.width // 64)
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 4),
            "head_dim": self.width // heads,
        }


@dataclass(frozen=True)
class Setup:
    """A model to train.

    Attributes:
        model: holds the parameters.
        loss: the forward and the loss of a batch, as people write them.
        batch: draws a batch on the generator's device; samples are in the first dimension.
    """

    model: nn.Module
    loss: Callable[..., Tensor]
    batch: Callable[[Generator], Batch]


#: Builds a model with weights of a dtype, on torch's default device.
Make = Callable[[Size, torch.dtype], Setup]


@dataclass(frozen=True)
class Task:
    """A kind of training.

    Attributes:
        op: the op that its loss must become; "" if it has no op.
        library: the package that the model comes from; "torch" if it is built of torch's own ops.
        curve: the number of steps in which the loss curves are compared.
    """

    op: str
    library: str
    make: Make
    reference: Size
    small: Size
    curve: int = 50


def _tokens(size: Size) -> Callable[[Generator], Tensor]:
    """Draws stretches of text: int64 [batch, length + 1]."""
    source = text().to(torch.get_default_device())
    pairs = (source[:-1] * BYTES + source[1:])[::2] % size.classes
    return lambda generator: windows(pairs, size.length + 1, size.batch, generator)


def _hugging_face(kind: str, **options: Any) -> Make:
    def make(size: Size, dtype: torch.dtype) -> Setup:
        import transformers

        masked = kind == "Bert"
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=size.classes,
            hidden_size=size.width,
            intermediate_size=4 * size.width,
            num_hidden_layers=size.layers,
            max_position_embeddings=size.length,
            use_cache=False,
            **({"num_attention_heads": max(2, size.width // 64)} if masked else size.attention),
            **options,
        )
        head = "MaskedLM" if masked else "CausalLM"
        model = getattr(transformers, f"{kind}For{head}")(config).to(dtype).train()
        tokens = _tokens(size)

        def loss(input_ids: Tensor, labels: Tensor) -> Tensor:
            return model(input_ids=input_ids, labels=labels).loss  # type: ignore[no-any-return]

        def causal(generator: Generator) -> Batch:
            stretch = tokens(generator)[:, :-1]
            return stretch, stretch  # the model shifts the labels itself

        def restored(generator: Generator) -> Batch:
            stretch = tokens(generator)[:, :-1]
            share = torch.rand(stretch.shape, generator=generator, device=generator.device)
            hidden = share < MASKED_SHARE
            mask_token = size.classes - 1
            return stretch.masked_fill(hidden, mask_token), stretch.masked_fill(~hidden, -100)

        return Setup(model, loss, restored if masked else causal)

    return make


def _gpt(size: Size, dtype: torch.dtype) -> Setup:
    model = _language_model(size).to(dtype)
    tokens = _tokens(size)

    def batch(generator: Generator) -> Batch:
        stretch = tokens(generator)
        return stretch[:, :-1].contiguous(), stretch[:, 1:].contiguous()

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model.logits(inputs)
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.view(-1))

    return Setup(model, loss, batch)


def _language_model(size: Size) -> GPT:
    heads = size.attention["num_attention_heads"]
    return GPT(size.width, size.layers, heads, size.length, size.classes)


def _distillation(size: Size, dtype: torch.dtype) -> Setup:
    student, teacher = (_language_model(size).to(dtype) for _ in range(2))
    # As confident as a trained teacher; by default all classes are nearly equally likely.
    nn.init.normal_(teacher.head.weight, std=3 / size.width**0.5)
    teacher.requires_grad_(False)
    tokens = _tokens(size)

    def loss(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            expected = teacher.logits(inputs).flatten(0, 1).float()
        found = student.logits(inputs).flatten(0, 1).float()
        divergence = F.kl_div(
            F.log_softmax(found / TEMPERATURE, dim=-1),
            F.softmax(expected / TEMPERATURE, dim=-1),
            reduction="batchmean",
        )
        return divergence * TEMPERATURE * TEMPERATURE

    return Setup(student, loss, lambda generator: (tokens(generator)[:, :-1].contiguous(),))


def _images(size: Size, generator: Generator) -> Tensor:
    """Draws smooth images: [batch, channels, side, side]."""
    shape = (size.batch, size.classes, 8, 8)
    coarse = torch.randn(shape, generator=generator, device=generator.device)
    return F.interpolate(coarse, size=(size.length, size.length), mode="bilinear")


def _denoising(make_model: Callable[[Size], nn.Module]) -> Make:
    def make(size: Size, dtype: torch.dtype) -> Setup:
        model = make_model(size).to(dtype).train()
        kept = (1 - torch.linspace(1e-4, 0.02, NOISE_STEPS)).cumprod(0)

        def loss(noisy: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
            prediction = model(noisy, steps)
            prediction = getattr(prediction, "sample", prediction)  # diffusers' has a name
            return F.mse_loss(prediction.float(), noise.float())

        def batch(generator: Generator) -> Batch:
            on = {"generator": generator, "device": generator.device}
            shape = (size.batch, size.classes, size.length, size.length)
            images = _images(size, generator)
            noise = torch.randn(shape, **on)
            steps = torch.randint(NOISE_STEPS, (size.batch,), **on)
            share = kept[steps].view(-1, 1, 1, 1)
            noisy = share.sqrt() * images + (1 - share).sqrt() * noise
            return noisy.to(dtype), steps, noise.to(dtype)

        return Setup(model, loss, batch)

    return make


def _diffusers_unet(size: Size) -> nn.Module:
    import diffusers

    widths = (size.width, 2 * size.width, 4 * size.width)
    return diffusers.UNet2DModel(  # type: ignore[no-any-return]
        sample_size=size.length,
        in_channels=size.classes,
        out_channels=size.classes,
        layers_per_block=size.layers,
        block_out_channels=widths,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        attention_head_dim=widths[0],
    )


def _autoencoder(size: Size, dtype: torch.dtype) -> Setup:
    model = VariationalAutoencoder(size.classes, size.width, size.layers).to(dtype)

    def batch(generator: Generator) -> Batch:
        on = {"generator": generator, "device": generator.device}
        images, half = _images(size, generator).to(dtype), size.length // 2
        return images, torch.randn(size.batch, size.classes, half, half, **on)

    return Setup(model, model, batch)


def _detector(size: Size, dtype: torch.dtype) -> Setup:
    model = Detector(3, size.width, size.layers, size.classes).to(dtype)

    def batch(generator: Generator) -> Batch:
        on = {"generator": generator, "device": generator.device}
        side = size.length // 8
        images = torch.randn(size.batch, 3, size.length, size.length, **on)
        boxes = torch.rand(size.batch, model.BOXES * size.classes, side, side, **on) < 1e-3
        return images.to(dtype), boxes.to(dtype)

    return Setup(model, model, batch)


_SMALL = Size(batch=17, length=128, width=32, layers=1, classes=50_304)
_IMAGES = Size(batch=64, length=128, width=64, layers=2, classes=3)
_SMALL_IMAGES = Size(batch=8, length=16, width=16, layers=1, classes=3)


def _transformers(kind: str, reference: Size, curve: int = 50, **options: Any) -> Task:
    make = _hugging_face(kind, **options)
    return Task("linear_cross_entropy", "transformers", make, reference, _SMALL, curve)


TASKS = {
    "llama": _transformers("Llama", Size(8, 1024, 2048, 2, 128_256), 200),
    "qwen3": _transformers("Qwen3", Size(8, 1024, 1024, 2, 151_936), tie_word_embeddings=True),
    "gemma2": _transformers("Gemma2", Size(4, 1024, 2048, 2, 256_000)),
    "bert": _transformers(
        "Bert",
        Size(32, 512, 768, 4, 30_522),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    "gpt": Task("linear_cross_entropy", "torch", _gpt, Size(8, 1024, 768, 4, 50_304), _SMALL, 200),
    "unet": Task(
        "mse_loss",
        "torch",
        _denoising(lambda size: UNet(size.classes, size.width, size.layers)),
        _IMAGES,
        _SMALL_IMAGES,
        200,
    ),
    "diffusers_unet": Task(
        "mse_loss", "diffusers", _denoising(_diffusers_unet), _IMAGES, _SMALL_IMAGES
    ),
    "vae": Task("", "torch", _autoencoder, Size(64, 256, 64, 1, 8), Size(8, 16, 16, 1, 3)),
    "detector": Task("", "torch", _detector, Size(16, 512, 256, 4, 80), Size(2, 32, 16, 1, 5)),
    "distillation": Task(
        "linear_softmax_kl_div", "torch", _distillation, Size(8, 1024, 768, 2, 32_000), _SMALL
    ),
}
