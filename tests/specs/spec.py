"""What a spec holds, and the inputs that every elementwise loss is tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Sample:
    """One call: tensors (some differentiable) and options, as the public op takes them."""

    name: str
    tensors: tuple[Tensor, ...]
    options: dict[str, Any] = field(default_factory=dict)
    differentiable: tuple[int, ...] = (0,)

    def call(self, function: Callable[..., Any], tensors: tuple[Tensor, ...] | None = None) -> Any:
        return function(*(self.tensors if tensors is None else tensors), **self.options)


@dataclass
class Spelling:
    """A way to write a loss: a function of tensors, and what to call it with."""

    name: str
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    reason: str = ""  # for near misses: a part of the reason in the report; "" where none is given
    dynamic: bool = True  # for matches: whether it is also rewritten with dynamic=True


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
    """

    name: str
    torch_loss: Callable[..., Tensor]
    samples: Callable[[str, torch.dtype], Iterator[Sample]]
    operands: Callable[..., tuple[Tensor, ...]]
    matches: list[Spelling]
    near_misses: list[Spelling]

    @property
    def op(self) -> Any:
        return getattr(torch.ops.fused, self.name)


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
) -> Callable[[str, torch.dtype], Iterator[Sample]]:
    """Samples of every layout, with every reduction; every option on the first layout."""

    def samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        generator = torch.Generator(device="cpu").manual_seed(0)

        def draw(make: Callable[..., Tensor]) -> Make:
            return lambda *shape: make(shape, generator).to(device, dtype)

        pairs = list(zip(layouts(draw(make_input)), layouts(draw(make_target)), strict=True))
        for (name, input, _), (_, _, target) in pairs:
            for reduction in reductions:
                yield Sample(
                    f"{name}, reduction {reduction}",
                    (input, target),
                    {"reduction": reduction},
                    (0, 1),
                )
        (_, input, _), (_, _, target) = pairs[0]
        for option in options:
            for reduction in reductions:
                described = ", ".join(f"{key} {value}" for key, value in option.items())
                yield Sample(described, (input, target), {"reduction": reduction, **option}, (0, 1))

    return samples


def normal(shape: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
