"""What a spec holds, and the inputs that every elementwise loss is tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Sample:
    """One call: tensors (some differentiable) and options, as the public op takes them.

    The last tensors are given by the names in ``weights``.
    """

    name: str
    tensors: tuple[Tensor, ...]
    options: dict[str, Any] = field(default_factory=dict)
    differentiable: tuple[int, ...] = (0,)
    weights: tuple[str, ...] = ()

    def arguments(
        self, tensors: tuple[Tensor, ...] | None = None
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        tensors = self.tensors if tensors is None else tensors
        positional = len(tensors) - len(self.weights)
        named = dict(zip(self.weights, tensors[positional:], strict=True))
        return tensors[:positional], {**named, **self.options}

    def call(self, function: Callable[..., Any], tensors: tuple[Tensor, ...] | None = None) -> Any:
        args, kwargs = self.arguments(tensors)
        return function(*args, **kwargs)


@dataclass
class Spelling:
    """A way to write a loss: a function of tensors, and what to call it with."""

    name: str
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    reason: str = ""  # for near misses: a part of the reason in the report; "" where none is given
    dynamic: bool = True  # for matches: whether it is also rewritten with dynamic=True
    since: tuple[int, int] = (0, 0)  # the version before which torch itself fails


@dataclass
class Spec:
    """A loss.

    Attributes:
        name: of the op.
        torch_loss: torch's own loss with the public op's arguments, in any dtype.
        samples: inputs for a device and dtype.
        matches: spellings that must be rewritten to this op, one site each.
        near_misses: spellings that look alike and must be left alone.
        operands: tensors of a given shape and dtype that are good arguments.
        exact_loss: torch_loss in float64, where torch's own is not exact enough to compare with.
        public: the public op, where ``name`` is only that of the ops it is made of.
        parts: the ops that the public one is made of.
        broadcasts: whether input and target may differ in shape.
    """

    name: str
    torch_loss: Callable[..., Tensor]
    samples: Callable[[str, torch.dtype], Iterator[Sample]]
    operands: Callable[..., tuple[Tensor, ...]]
    matches: list[Spelling]
    near_misses: list[Spelling]
    exact_loss: Callable[..., Tensor] | None = None
    public: str = ""
    parts: tuple[str, ...] = ("forward", "backward", "with_grad", "with_grad_")
    broadcasts: bool = True

    @property
    def op(self) -> Any:
        return getattr(torch.ops.fused, self.public or self.name)

    @property
    def exact(self) -> Callable[..., Tensor]:
        return self.exact_loss or self.torch_loss

    def part(self, suffix: str) -> Any:
        return getattr(torch.ops.fused, f"{self.name}_{suffix}").default

    @property
    def arguments(self) -> list[str]:
        return [argument.name for argument in self.op.default._schema.arguments]


Make = Callable[..., Tensor]


def layouts(make: Make) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Pairs of input and target in every layout; make(*shape) draws values."""
    yield "contiguous", make(33, 65), make(33, 65)
    yield "1-d", make(1031), make(1031)
    yield "0-d", make(), make()
    yield "empty", make(0, 5), make(0, 5)
    yield "transposed", make(65, 33).t(), make(65, 33).t()
    yield "one transposed", make(65, 33).t(), make(33, 65)
    yield "sliced", make(40, 130)[3:36, ::2], make(33, 65)
    yield "offset", make(33 * 65 + 1)[1:].view(33, 65), make(33, 65)
    yield "expanded", make(33, 1).expand(33, 65), make(33, 65)
    yield "broadcast target", make(7, 33, 65), make(33, 1)
    yield "broadcast both", make(33, 1), make(1, 65)
    yield "scalar target", make(33, 65), make()
    yield (
        "channels-last",
        make(2, 3, 5, 7).to(memory_format=torch.channels_last),
        make(2, 3, 5, 7).to(memory_format=torch.channels_last),
    )
    yield "permuted", make(4, 5, 6).permute(2, 0, 1), make(6, 4, 5)
    yield "many chunks", make(3, 50_021), make(3, 50_021)


def elementwise_samples(
    make_input: Callable[..., Tensor],
    make_target: Callable[..., Tensor],
    options: list[dict[str, Any]],
    reductions: tuple[int, ...] = (0, 1, 2),
    weights: tuple[tuple[str, ...], ...] = (),
    differentiable_weights: bool = True,
    broadcasts: bool = True,
) -> Callable[[str, torch.dtype], Iterator[Sample]]:
    """Samples of every layout, with every reduction; every option on the first layout; every
    combination of weights in every shape there, and of the loss's shape on every layout."""

    def samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        generator = torch.Generator(device="cpu").manual_seed(0)

        def draw(make: Callable[..., Tensor]) -> Make:
            return lambda *shape: make(shape, generator).to(device, dtype)

        pairs = [
            (name, input, target)
            for (name, input, _), (_, _, target) in zip(
                layouts(draw(make_input)), layouts(draw(make_target)), strict=True
            )
            if broadcasts or input.shape == target.shape
        ]
        for name, input, target in pairs:
            for reduction in reductions:
                yield Sample(
                    f"{name}, reduction {reduction}",
                    (input, target),
                    {"reduction": reduction},
                    (0, 1),
                )
        _, input, target = pairs[0]
        for option in options:
            for reduction in reductions:
                described = ", ".join(f"{key} {value}" for key, value in option.items())
                yield Sample(described, (input, target), {"reduction": reduction, **option}, (0, 1))
        draw_weight = draw(positive)
        for i, names in enumerate(weights):
            roots = tuple(range(2 + (len(names) if differentiable_weights else 0)))
            described = " and ".join(names)
            for shape in ("all", "rows", "columns", "one", "number", "transposed"):
                tensors = (input, target, *(weight_of(shape, input, draw_weight) for _ in names))
                for reduction in reductions:
                    option = {"reduction": reduction, **(options[-1] if options else {})}
                    # A weighted mean does not change with a weight that is one number: what is left
                    # of its gradient is rounding.
                    some = roots[:2] if tensors[2].numel() < input.numel() else roots
                    yield Sample(f"{described}, {shape}", tensors, option, some, names)
            for j, (name, a, b) in enumerate(pairs[1:]):
                full = torch.broadcast_shapes(a.shape, b.shape)
                tensors = (a, b, *(draw_weight(*full) for _ in names))
                option = {"reduction": reductions[(i + j) % len(reductions)]}
                yield Sample(f"{described}, {name}", tensors, option, roots, names)

    return samples


def weight_of(shape: str, like: Tensor, draw: Make) -> Tensor:
    rows, cols = like.shape
    if shape == "transposed":
        return draw(cols, rows).t()
    sizes = {"all": (rows, cols), "rows": (rows, 1), "columns": (cols,), "one": (1,), "number": ()}
    return draw(*sizes[shape])


def positive(shape: Any, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5


def weighted(loss: Callable[..., Tensor], *, normalize: bool) -> Callable[..., Tensor]:
    """A loss of torch's with a weight that broadcasts; torch's own must have input's size."""

    def torch_loss(
        input: Tensor, target: Tensor, reduction: int = 1, *, weight: Any = None, **options: Any
    ) -> Tensor:
        name = ("none", "mean", "sum")[reduction]
        if weight is None:
            return loss(input, target, reduction=name, **options)
        losses = loss(input, target, reduction="none", **options) * weight
        if name == "mean" and normalize:
            return losses.sum() / weight.expand(losses.shape).sum()
        return losses if name == "none" else getattr(losses, name)()

    return torch_loss


def normal(shape: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
