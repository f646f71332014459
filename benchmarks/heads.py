"""The heads and the losses of the compile matrix.

A head turns inputs into predictions of ``shape``. Most heads are a linear layer and an op after it.
The layer is thin, so that the loss dominates the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, int]  # rows, cols
Target = Callable[[Shape, torch.dtype, torch.device], Tensor]

FEATURES = 16  # of the linear layers


@dataclass(frozen=True)
class Loss:
    """A loss of predictions, as users write it, and a function that draws its targets."""

    function: Callable[[Tensor, Tensor], Tensor]
    target: Target


def _normal(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def _distributions(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _normal(shape, dtype, device).softmax(-1)


def _classes(shape: Shape, _: torch.dtype, device: torch.device) -> Tensor:
    rows, cols = shape
    return torch.randint(cols, (rows,), device=device)


LOSSES = {
    "mse": Loss(lambda p, t: ((p - t) ** 2).mean(), _normal),
    "smooth_l1_loss": Loss(lambda p, t: F.smooth_l1_loss(p, t, beta=0.5), _normal),
    "huber_loss": Loss(lambda p, t: F.huber_loss(p, t, delta=0.5), _normal),
    "kl_div": Loss(lambda p, t: F.kl_div(p, t, reduction="batchmean"), _distributions),
    "cross_entropy": Loss(F.cross_entropy, _classes),
}


class Head(nn.Module):
    """Predictions of a shape from this head's own kind of input."""

    #: Whether the input requires grad in training.
    differentiates_input = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    def input(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.randn(self.shape[0], FEATURES, dtype=dtype, device=device)


class GraphInput(Head):
    def input(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.randn(self.shape, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Linear(Head):
    def __init__(self, shape: Shape, rows: int = 0, cols: int = 0) -> None:
        super().__init__(shape)
        self.rows = shape[0] + rows
        self.linear = nn.Linear(FEATURES, shape[1] + cols)

    def input(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.randn(self.rows, FEATURES, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class LinearOfData(Linear):
    differentiates_input = False


class Gelu(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


class SoftCap(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 30 * torch.tanh(self.linear(x) / 30)


class LayerNorm(Linear):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.norm = nn.LayerNorm(shape[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class CastFromBFloat16(Linear):
    """A bfloat16 layer before a float32 loss, whatever the cell's dtype."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.linear.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.bfloat16(), self.linear.weight.bfloat16()).float()


class View(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.view(2, -1, FEATURES)).view(self.shape)


class Transpose(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (self.linear.weight @ x.t()).t()


class Slice(Linear):
    """All rows but the last, as if logits were shifted against their targets."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, rows=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:-1]


class SliceOfColumns(Linear):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, cols=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, :-8]


class Convolution(Head):
    """A 1x1 convolution, whose channels and pixels make up the columns."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.convolution = nn.Conv1d(4, 16, 1)

    def input(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.randn(self.shape[0], 4, self.shape[1] // 16, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).flatten(1)


class TiedEmbedding(Head):
    """Logits from the embedding table of the tokens."""

    differentiates_input = False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table = nn.Embedding(shape[1], FEATURES)

    def input(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.randint(self.shape[1], (self.shape[0],), device=device)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.table(x).relu(), self.table.weight)


HEADS: dict[str, type[Head]] = {
    "graph input": GraphInput,
    "linear": Linear,
    "linear of data": LinearOfData,
    "convolution": Convolution,
    "layer norm": LayerNorm,
    "gelu": Gelu,
    "soft-cap": SoftCap,
    "cast from bfloat16": CastFromBFloat16,
    "view": View,
    "transpose": Transpose,
    "slice of rows": Slice,
    "slice of columns": SliceOfColumns,
    "tied embedding": TiedEmbedding,
}
