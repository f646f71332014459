"""Losses of segmentation, regression and self-supervision, forward and backward, and their bounds.

``python -m benchmarks criteria`` compiles each loss alone and behind a layer, with stock
torch.compile and with this package, checks both against float64, times them in turns and measures
the peak memory. ``bfloat16`` is under autocast: predictions and features are bfloat16, weights are
float32. ``floor`` is a bound: the time to read the inputs and to write the gradients at the
memory's bandwidth, and with it the measured time of the products and of the layer by itself,
forward and backward. A loss whose gradient depends on a sum over all elements reads its inputs
twice, so its true bound is higher.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import report
from benchmarks.clock import Call, Clock, make_clock, measure_bandwidth, time_in_turns
from benchmarks.elementwise import Row, Run, contenders_of, figures, verdict
from benchmarks.linear_steps import allowed_errors, complaint, relative_error
from benchmarks.options import DTYPES, add_options, provenance

Loss = Callable[..., Tensor]


def _one_hot(target: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """As MONAI and nnU-Net write it: of classes [N, 1, ...]."""
    return torch.zeros(like.shape, dtype=dtype, device=like.device).scatter_(1, target, 1)


def monai_dice(x: Tensor, target: Tensor) -> Tensor:
    """MONAI's ``DiceLoss(softmax=True, to_onehot_y=True)``."""
    return _monai(x.softmax(1), _one_hot(target, x, x.dtype))


def monai_dice_sigmoid(x: Tensor, target: Tensor) -> Tensor:
    """MONAI's ``DiceLoss(sigmoid=True)``."""
    return _monai(x.sigmoid(), target)


def _monai(p: Tensor, t: Tensor) -> Tensor:
    places = list(range(2, p.dim()))
    shared = torch.sum(t * p, dim=places)
    both = torch.sum(t, dim=places) + torch.sum(p, dim=places)
    return torch.mean(1.0 - (2.0 * shared + 1e-5) / (both + 1e-5))


def nnunet_dice(x: Tensor, target: Tensor) -> Tensor:
    """nnU-Net's ``MemoryEfficientSoftDiceLoss``, over the batch."""
    p = x.softmax(1)
    places = tuple(range(2, x.dim()))
    with torch.no_grad():
        t = _one_hot(target, x, torch.bool)
        true = t.sum(places)
    shared, found = (p * t).sum(places).sum(0), p.sum(places).sum(0)
    score = (2 * shared + 1e-5) / torch.clip(true.sum(0) + found + 1e-5, 1e-8)
    return -score.mean()


def nnunet_dice_and_cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    """nnU-Net's usual sum."""
    return F.cross_entropy(x, target[:, 0]) + nnunet_dice(x, target)


def smp_dice(x: Tensor, target: Tensor) -> Tensor:
    """segmentation_models_pytorch's ``DiceLoss(mode="multiclass")``, over batch and places."""
    p = x.log_softmax(1).exp().flatten(2)
    t = F.one_hot(target.flatten(1), x.shape[1]).permute(0, 2, 1).type_as(p)
    found, true = p.sum((0, 2)), t.sum((0, 2))
    shared = (found + true - torch.linalg.vector_norm(p - t, ord=1, dim=(0, 2))) / 2
    score = shared / (0.5 * (found + true)).clamp_min(1e-7)
    return ((1 - score) * (true > 0)).mean()


def kornia_focal(x: Tensor, target: Tensor) -> Tensor:
    """kornia's ``focal_loss`` with gamma 2."""
    weight = torch.pow(1.0 - x.softmax(1), 2.0)
    hot = F.one_hot(target, x.shape[1]).movedim(-1, 1).to(x.dtype)
    return (hot * (-0.25 * weight * x.log_softmax(1))).sum(1).mean()


def focal_of_cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    """The usual short spelling, with gamma 2."""
    loss = F.cross_entropy(x, target, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def smp_focal(x: Tensor, target: Tensor) -> Tensor:
    """segmentation_models_pytorch's ``FocalLoss(mode="multiclass")``: sigmoids, class by class."""
    total = x.new_zeros(())
    for index in range(x.shape[1]):
        y = (target == index).type(x.dtype)
        log_p = F.binary_cross_entropy_with_logits(x[:, index], y, reduction="none")
        total = total + ((1.0 - torch.exp(-log_p)).pow(2.0) * log_p).mean()
    return total / x.shape[1]


def gaussian_nll(mean: Tensor, raw: Tensor, target: Tensor) -> Tensor:
    return F.gaussian_nll_loss(mean, target, F.softplus(raw))


def barlow_twins(a: Tensor, b: Tensor) -> Tensor:
    """Zbontar et al., 2021, as in its authors' code, with a batch norm without parameters."""
    rows, cols = a.shape
    a, b = (F.batch_norm(z, None, None, training=True) for z in (a, b))
    c = (a.T @ b).div_(rows)
    on = torch.diagonal(c).add_(-1).pow_(2).sum()
    off = c.flatten()[:-1].view(cols - 1, cols + 1)[:, 1:].flatten().pow_(2).sum()
    return on + 0.0051 * off


@dataclass(frozen=True)
class Criterion:
    """A loss, and how to draw what it is called with.

    Attributes:
        predictions: how many of the first arguments are predictions.
        target: "classes" [N, ...], "classes of 1" [N, 1, ...], "normal", "binary" or "".
        shapes: of a prediction, on CUDA and on a CPU.
        features: of the layer before.
        products: how many matrix products of [cols, rows] by [rows, cols] the loss makes in all.
    """

    loss: Loss
    predictions: int
    target: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    features: int
    products: int = 0


_VOLUMES = ((2, 4, 128, 128, 128), (2, 4, 48, 48, 48))
_IMAGES = ((8, 21, 512, 512), (2, 21, 192, 192))
CRITERIA = {
    each.loss.__name__: each
    for each in (
        Criterion(monai_dice, 1, "classes of 1", _VOLUMES, 32),
        Criterion(monai_dice_sigmoid, 1, "binary", _VOLUMES, 32),
        Criterion(nnunet_dice, 1, "classes of 1", _VOLUMES, 32),
        Criterion(nnunet_dice_and_cross_entropy, 1, "classes of 1", _VOLUMES, 32),
        Criterion(smp_dice, 1, "classes", _IMAGES, 64),
        Criterion(kornia_focal, 1, "classes", _IMAGES, 64),
        Criterion(focal_of_cross_entropy, 1, "classes", _IMAGES, 64),
        Criterion(smp_focal, 1, "classes", _IMAGES, 64),
        Criterion(gaussian_nll, 2, "normal", ((8192, 1024), (1024, 512)), 1024),
        Criterion(barlow_twins, 2, "", ((4096, 8192), (256, 512)), 1024, products=3),
    )
}


def layer(features: Tensor, weight: Tensor) -> Tensor:
    """A linear layer of rows, or of each place of an image or a volume."""
    if features.dim() == 2:
        return F.linear(features, weight)
    convolution = F.conv2d if features.dim() == 4 else F.conv3d
    return convolution(features, weight)


class Problem:
    """A criterion's inputs, alone or behind a layer; predictions, features and weights have grad.

    Args:
        narrow: whether under autocast.
    """

    def __init__(self, name: str, device: torch.device, *, narrow: bool, behind: bool) -> None:
        self.criterion = CRITERIA[name]
        self.device, self.narrow, self.behind = device, narrow, behind
        self.shape = self.criterion.shapes[device.type != "cuda"]
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=device)
        dtype = torch.bfloat16 if narrow else torch.float32
        count, features = self.criterion.predictions, self.criterion.features
        if behind:
            of_layer = (self.shape[0], features, *self.shape[2:])
            weights = (self.shape[1], features, *(1 for _ in self.shape[2:]))
            weight = [draw(weights) * features**-0.5 for _ in range(count)]
            shared = 1 if self.criterion.target else count  # Barlow's are two views
            leaves = [draw(of_layer).to(dtype) for _ in range(shared)] + weight
        else:
            leaves = [draw(self.shape).to(dtype) for _ in range(count)]
        self.leaves = [leaf.requires_grad_() for leaf in leaves]
        self.targets = self._targets(generator, dtype)

    def _targets(self, generator: torch.Generator, dtype: torch.dtype) -> list[Tensor]:
        options = {"generator": generator, "device": self.device}
        batch, classes, *places = self.shape
        match self.criterion.target:
            case "":
                return []
            case "normal":
                return [torch.randn(self.shape, **options)]  # type: ignore[call-overload]
            case "binary":
                return [torch.randint(2, self.shape, **options).to(dtype)]  # type: ignore[call-overload]
            case kind:
                shape = (batch, *([1] if kind == "classes of 1" else []), *places)
                return [torch.randint(classes, shape, **options)]  # type: ignore[call-overload]

    @property
    def inputs(self) -> list[Tensor]:
        return [*self.leaves, *self.targets]

    def predictions(self, leaves: list[Tensor]) -> list[Tensor]:
        if not self.behind:
            return leaves
        count = self.criterion.predictions
        features, weights = leaves[:-count], leaves[-count:]
        return [layer(features[i % len(features)], weight) for i, weight in enumerate(weights)]

    def function(self, *inputs: Tensor) -> Tensor:
        count = len(self.leaves)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.narrow):
            predictions = self.predictions(list(inputs[:count]))
            return self.criterion.loss(*predictions, *inputs[count:])

    def exact(self) -> list[Tensor]:
        """The loss and its gradients in float64."""
        wide = [
            each.detach().double() if each.is_floating_point() else each for each in self.inputs
        ]
        leaves = [each.requires_grad_() for each in wide[: len(self.leaves)]]
        loss = self.criterion.loss(*self.predictions(leaves), *wide[len(leaves) :])
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    def errors(self, run: Run, exact: list[Tensor]) -> list[float]:
        loss, gradients = run.results()
        found = [torch.tensor(loss, device=self.device, dtype=torch.float64), *gradients]
        return [relative_error(*pair) for pair in zip(found, exact, strict=True)]

    def products_ms(self, clock: Clock, budget_s: float) -> float:
        """The time of the layer by itself, forward and backward, and of the loss's products."""
        runs = []
        if self.behind:
            runs.append(Run(torch.compile(self._layer_alone, dynamic=False), self.leaves))
        calls = [run.next_call for run in runs]
        if self.criterion.products:
            rows, cols = self.shape
            dtype = torch.bfloat16 if self.narrow else torch.float32
            a, b = (torch.randn(rows, cols, device=self.device, dtype=dtype) for _ in range(2))
            # The products of the gradients have as many operations as the one of the loss.
            product: Call = partial(torch.mm, a.T, b)
            calls += [lambda: product] * self.criterion.products
        return sum(map(statistics.median, time_in_turns(calls, clock, budget_s)))

    def _layer_alone(self, *leaves: Tensor) -> Tensor:
        """A sum has a gradient of ones, which are not read: it is the cheapest loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.narrow):
            return torch.stack([each.sum() for each in self.predictions(list(leaves))]).sum()

    def moved(self) -> int:
        """Bytes of the criterion's inputs, read once, and of its gradients, written once."""
        width = 2 if self.narrow else 4
        size = torch.Size(self.shape).numel() * self.criterion.predictions * width
        return 2 * size + sum(each.nbytes for each in self.targets)


def measured(problem: Problem, clock: Clock, arguments: argparse.Namespace) -> dict[str, str]:
    runs = contenders_of(problem.function, problem.inputs)
    exact = problem.exact()
    dtype = torch.bfloat16 if problem.narrow else torch.float32
    allowed = allowed_errors(problem.errors(Run(problem.function, problem.inputs), exact), dtype)
    for name, run in zip(("stock", "ours"), runs, strict=True):
        reason = complaint(problem.errors(run, exact), allowed)
        if reason:
            return {"reason": f"{name} {reason}"}
    del exact
    floor = arguments.bandwidth.floor_ms(problem.moved(), writes=True)
    return figures(
        runs, clock, arguments.budget, floor + problem.products_ms(clock, arguments.budget)
    )


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    output: Path = arguments.output or report.default_output(device, "criteria")
    table = report.kept(output, Row, append=arguments.append)
    clock = make_clock(device)
    arguments.bandwidth = measure_bandwidth(clock)
    common = provenance(arguments, device)
    failed = 0
    head = ("stock", "ours", "ratio", "floor", "ours/fl.", "MiB", "ours")
    print(f"{'loss':<68}" + "".join(f"{text:>9}" for text in head))
    for loss in arguments.loss:
        for dtype in arguments.dtype:
            for place in arguments.place:
                torch._dynamo.reset()
                narrow, behind = dtype == "bfloat16", place == "behind"
                problem = Problem(loss, device, narrow=narrow, behind=behind)
                found = measured(problem, clock, arguments)
                failed += "ratio" not in found
                size = "x".join(map(str, problem.shape))
                shape = f"{size} behind {problem.criterion.features}" if behind else size
                known = {**common, "loss": loss, "dtype": dtype, "shape": shape, **found}
                row = report.row_of(Row, known)
                table[row.key] = row
                columns = (row.stock_ms, row.ours_ms, row.ratio, row.floor_ms, row.of_floor,
                           row.stock_peak_mib, row.ours_peak_mib)  # fmt: skip
                text = "".join(f"{column:>9}" for column in columns)
                print(f"{f'{loss} {dtype} {shape}':<68}{text}  {verdict(row)}", flush=True)
                report.write(output, Row, table.values())
                del problem
    print(f"wrote {output}")
    return int(failed > 0)


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    summary = "losses of segmentation, regression and self-supervision, with their bounds"
    parser = commands.add_parser("criteria", help=summary, description=__doc__)
    choose = partial(parser.add_argument, nargs="+", help="default: all")
    choose("--loss", choices=CRITERIA, default=list(CRITERIA))
    choose("--dtype", choices=DTYPES, default=list(DTYPES))
    choose("--place", choices=("alone", "behind"), default=["alone", "behind"])
    add_options(parser, 0.3, append=True)
