"""The bodies of an elementwise loss, made of its reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compile_losses.bodies.blocks import Block, blocks, sum_of_all, total
from compile_losses.bodies.differentiating import differentiating, leaf
from compile_losses.ops import checks

NONE, MEAN, BATCHMEAN = (checks.REDUCTIONS[name] for name in ("none", "mean", "batchmean"))


class Elementwise:
    """The bodies of a loss.

    Args:
        reference: the loss in torch's ops: of input, target, the weights, a reduction and values.
        weights: the names of the tensors after input and target.
    """

    def __init__(self, name: str, reference: Callable[..., Tensor], weights: Sequence[str]) -> None:
        self.name, self.reference, self.weights = name, reference, weights
        self.tensors = 2 + len(weights)

    def forward(self, result: Tensor, *arguments: Any) -> None:
        *given, dtype = arguments
        call = _Call(self, given, dtype)
        if call.reduction == NONE:
            for block in blocks(call.shape, result.device):
                block(result).copy_(call.losses(block))
            return
        sums = [sum_of_all(call.losses(block)) for block in blocks(call.shape, result.device)]
        result.copy_(total(sums, result) / call.divisor)

    def backward(self, results: Sequence[Tensor], grad_output: Tensor, *arguments: Any) -> None:
        given, needs = arguments[: -len(results)], arguments[-len(results) :]
        call = _Call(self, given, grad_output.dtype)
        if not any(needs):
            return
        for block in blocks(call.shape, grad_output.device):
            _, gradients = call.differentiated(block, needs, grad_output)
            for result, gradient in zip(results, gradients, strict=True):
                if gradient is not None:
                    block(result).copy_(gradient)

    def with_grad(self, results: tuple[Tensor, Tensor], *arguments: Any) -> None:
        self._loss_and_gradient(*results, *arguments)

    def with_grad_(self, loss: Tensor, *arguments: Any) -> None:
        self._loss_and_gradient(loss, arguments[0], *arguments)

    def _loss_and_gradient(self, loss: Tensor, gradient: Tensor, *arguments: Any) -> None:
        *given, dtype, grad_output = arguments
        call = _Call(self, given, dtype)
        checks.check_with_gradient(self.name, call.reduction)
        if given[0].shape != call.shape:
            raise RuntimeError(
                f"{self.name}: a loss with its gradient needs an input of the broadcast shape "
                f"{list(call.shape)}, got {list(given[0].shape)}"
            )
        needs = (True, *(False for _ in call.tensors[1:]))
        factor = loss.new_ones((), dtype=call.wide) if grad_output is None else grad_output
        sums = []
        for block in blocks(call.shape, loss.device):
            losses, (of_input, *_) = call.differentiated(block, needs, factor)
            sums.append(sum_of_all(losses))
            assert of_input is not None
            block(gradient).copy_(of_input)
        loss.copy_(total(sums, loss) / call.divisor)


class _Call:
    """One call: its tensors, expanded to one shape, and its options."""

    def __init__(self, loss: Elementwise, given: Sequence[Any], dtype: torch.dtype) -> None:
        self.loss = loss
        tensors: Sequence[Tensor | None] = given[: loss.tensors]
        self.reduction, *self.values = given[loss.tensors :]
        input, target, *weights = tensors
        for name, weight in zip(loss.weights, weights, strict=True):
            if weight is not None:
                checks.check_floating(loss.name, **{name: weight})
        assert input is not None
        assert target is not None
        self.shape = checks.broadcast_shape(loss.name, input, target)
        dtypes = [dtype, *(tensor.dtype for tensor in tensors if tensor is not None)]
        self.wide = torch.float64 if torch.float64 in dtypes else torch.float32
        self.tensors = [None if t is None else t.expand(self.shape) for t in tensors]
        self.divisor = {MEAN: math.prod(self.shape), BATCHMEAN: checks.batch_of(input)}.get(
            self.reduction, 1
        )

    def losses(self, block: Block) -> Tensor:
        given = [None if t is None else block(t).to(self.wide) for t in self.tensors]
        return self.loss.reference(*given, NONE, *self.values)

    def differentiated(
        self, block: Block, needs: Sequence[bool], grad_output: Tensor
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The losses of a block, and its gradients as far as they are needed."""
        flags = [*needs, *(False for _ in self.tensors[len(needs) :])]
        if self.reduction == NONE:
            factor = block(grad_output).to(self.wide)
        else:
            factor = grad_output.reshape(()).to(self.wide)
            factor = factor / self.divisor if self.divisor else factor * torch.nan
        with differentiating():
            given = [
                None if t is None else leaf(block(t), self.wide, needed)
                for t, needed in zip(self.tensors, flags, strict=True)
            ]
            losses = self.loss.reference(*given, NONE, *self.values)
            wanted = [t for t in given if t is not None and t.requires_grad]
            found = iter(torch.autograd.grad(losses, wanted, factor.expand_as(losses)))
        gradients = [next(found) if t is not None and t.requires_grad else None for t in given]
        return losses.detach(), gradients[: len(needs)]
