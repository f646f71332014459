"""The bodies of statistics of rows of logits; the formulas are those of
csrc/losses/row_statistics.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compile_losses.bodies.blocks import Block, blocks
from compile_losses.bodies.class_targets import check_bounds
from compile_losses.bodies.rows import (
    add_at,
    capped,
    column,
    finite_or_zero,
    largest_of,
    slope_of_cap,
)
from compile_losses.ops.checks import accumulation_type

_NAME = "row_statistics"
_GRADS = ("grad_nll", "grad_logsumexp", "grad_entropy", "grad_total")
#: Below any difference of logits that counts, so that 0 times it is 0.
_LOWEST = -1e30


class Rows:
    """Logits [rows, classes] with their targets."""

    def __init__(
        self, input: Tensor, target: Tensor | None, ignore_index: int, softcap: float | None
    ) -> None:
        self.input, self.softcap = input, softcap
        self.dtype = accumulation_type(input.dtype)
        self.kept: Tensor | None = None
        self.place: Tensor | None = None
        if target is not None:
            check_bounds(_NAME, target, input.shape[1], ignore_index)
            self.kept = target != ignore_index
            self.place = torch.where(self.kept, target, 0)

    def blocks(self) -> Any:
        rows, classes = self.input.shape
        return blocks((rows,), self.input.device, classes, by_threads=True)

    def forward(self, results: Sequence[Tensor], *, squares: bool) -> None:
        nll, logsumexp, entropy, total, maximum, argmax, stats, log_squares = results
        for block in self.blocks():
            z = capped(block(self.input).to(self.dtype), self.softcap)
            largest = largest_of(z)
            relative = (z - finite_or_zero(largest)).clamp_(min=_LOWEST)
            exponential = relative.exp()
            summed = exponential.sum(-1)
            weighted = relative.mul_(exponential).sum(-1)
            log_sum, most = summed.log(), largest.squeeze(-1)
            of_block = log_sum - weighted / summed
            block(logsumexp).copy_(
                torch.where(most == torch.inf, most, finite_or_zero(most) + log_sum)
            )
            block(entropy).copy_(of_block)
            block(total).copy_(z.sum(-1))
            block(maximum).copy_(most)
            block(argmax).copy_(z.argmax(-1))
            block(stats).copy_(torch.stack([most, log_sum, of_block], -1))
            if squares:
                of_squares = exponential.square_().sum(-1)
                block(log_squares).copy_((of_squares / summed.square()).log())
            if self.place is not None and self.kept is not None:
                target_logit = z.gather(-1, block(self.place).unsqueeze(-1)).squeeze(-1)
                each = (most - target_logit) + log_sum
                block(nll).copy_(torch.where(block(self.kept), each, 0))

    def write_gradient(
        self,
        result: Tensor,
        grads: Sequence[Tensor | None],
        stats: Tensor,
        added: Callable[[Tensor, Block], Tensor] | None = None,
    ) -> None:
        """Writes the gradient of the logits, which may be over them.

        Args:
            added: the gradient of some logits after the soft-cap, which is added.
        """
        self._check_stats(stats)
        given = [self._given(name, grad) for name, grad in zip(_GRADS, grads, strict=True)]
        nll, logsumexp, of_entropy, of_total = given
        if self.kept is None or self.place is None:
            nll = None
        elif nll is not None:
            nll = torch.where(self.kept, nll, 0)
        for block in self.blocks():
            rows = block(self.input).to(self.dtype)
            z = capped(rows, self.softcap)
            gradient = self._of_softmax(z, block, stats, nll, logsumexp, of_entropy)
            if of_total is not None:
                gradient += column(block(of_total), self.dtype)
            if nll is not None and self.place is not None:
                add_at(gradient, block(self.place), -column(block(nll), self.dtype))
            if added is not None:
                gradient += added(z, block)
            if self.softcap is not None:
                gradient *= slope_of_cap(rows, self.softcap)
            block(result).copy_(gradient)

    def _of_softmax(
        self,
        z: Tensor,
        block: Block,
        stats: Tensor,
        nll: Tensor | None,
        logsumexp: Tensor | None,
        of_entropy: Tensor | None,
    ) -> Tensor:
        if nll is None and logsumexp is None and of_entropy is None:
            return torch.zeros_like(z)
        largest, log_sum, entropy = block(stats).unsqueeze(-1).unbind(1)
        difference = (z - largest).sub_(log_sum)
        factors = [block(each) for each in (nll, logsumexp) if each is not None]
        factor = column(sum(factors, torch.zeros_like(entropy[:, 0])), self.dtype)
        probability = difference.exp()
        if of_entropy is None:
            share = probability * factor
        else:
            share = difference.add_(entropy).mul_(-column(block(of_entropy), self.dtype))
            share.add_(factor).mul_(probability)
        return share.masked_fill_(probability == 0, 0)

    def _given(self, name: str, grad: Tensor | None) -> Tensor | None:
        """A gradient of a statistic; None for 0."""
        if grad is None or grad.numel() == 0:
            return None
        expected = self.input.shape[:1]
        if grad.shape != expected:
            raise RuntimeError(
                f"{_NAME}: expected {name} of shape {list(expected)}, got {list(grad.shape)}"
            )
        return grad.to(self.dtype)

    def _check_stats(self, stats: Tensor) -> None:
        if stats.shape != (self.input.shape[0], 3) or stats.dtype != self.dtype:
            raise RuntimeError(
                f"{_NAME}_backward: expected stats as {_NAME}_forward returns it, "
                f"got shape {list(stats.shape)}"
            )


def forward(results: Sequence[Tensor], *arguments: Any) -> None:
    *given, squares = arguments
    Rows(*given).forward(results, squares=squares)


def backward(result: Tensor, *arguments: Any) -> None:
    grads, (input, target, stats, *options) = arguments[:4], arguments[4:]
    Rows(input, target, *options).write_gradient(result, grads, stats)


def backward_(_: None, *arguments: Any) -> None:
    backward(arguments[4], *arguments)
