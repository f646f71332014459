"""The contenders of ``benchmarks.vocabulary_parallel``, whose docstring describes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import compile_losses
import compile_losses.functional as fused

Step = Callable[..., Any]  # of the tensors of its loss, see LOSSES
TEMPERATURE = 2.0


def ours(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    return fused.cross_entropy(F.linear(hidden, weight), target)


def stock(hidden: Any, weight: Any, target: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def policy(log_probs: Any, entropy: Any) -> Any:
    """A loss of tokens: the log-likelihood and a bonus for entropy."""
    return -(log_probs + 0.1 * entropy).mean()


def ours_log_probs(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    log_probs, entropy = compile_losses.linear_log_probs(
        hidden, weight, target, return_entropy=True
    )
    return policy(log_probs, entropy)


def ours_log_probs_of_logits(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return policy(fused.selective_log_softmax(logits, target), fused.softmax_entropy(logits))


def stock_log_probs(hidden: Any, weight: Any, target: Any) -> Tensor:
    return _stock_policy(F.linear(hidden, weight), target)


def gathered_log_probs(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    logits: Any = F.linear(hidden, weight)
    # Torch 2.13 differentiates the gather of sharded classes to a gradient of another shape.
    return _stock_policy(logits.redistribute(placements=[Replicate()]), target)


def _stock_policy(logits: Any, target: Any) -> Tensor:
    logarithms = F.log_softmax(_wide(logits), -1)
    log_probs = logarithms.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return policy(log_probs, -(logarithms.exp() * logarithms).sum(-1))


def _wide(logits: Any) -> Any:
    """What torch computes of bfloat16 is in float32."""
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def ours_divergence(hidden: DTensor, weight: DTensor, taught: DTensor, teacher: DTensor) -> Tensor:
    return compile_losses.linear_softmax_kl_div(
        hidden, weight, taught, target_weight=teacher, temperature=TEMPERATURE
    )


def ours_divergence_of_logits(
    hidden: DTensor, weight: DTensor, taught: DTensor, teacher: DTensor
) -> Tensor:
    logits, target = F.linear(hidden, weight), F.linear(taught, teacher)
    return fused.softmax_kl_div(logits, target, "batchmean", temperature=TEMPERATURE)


def stock_divergence(hidden: Any, weight: Any, taught: Any, teacher: Any) -> Tensor:
    return _stock_divergence(F.linear(hidden, weight), F.linear(taught, teacher))


def gathered_divergence(
    hidden: DTensor, weight: DTensor, taught: DTensor, teacher: DTensor
) -> Tensor:
    pair: list[Any] = [F.linear(hidden, weight), F.linear(taught, teacher)]
    return _stock_divergence(*(logits.redistribute(placements=[Replicate()]) for logits in pair))


def _stock_divergence(logits: Any, target: Any) -> Tensor:
    logarithms, wanted = (F.log_softmax(_wide(each) / TEMPERATURE, -1) for each in (logits, target))
    return F.kl_div(logarithms, wanted, reduction="batchmean", log_target=True)


def _below_largest(logits: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """A rank's own logits less the largest of all ranks, and the largest."""
    largest = logits.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return logits - largest.unsqueeze(-1), largest


def _megatron_softmax(
    logits: Tensor, target: Tensor, first: int, group: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of a rank's own logits, by three all-reduces: softmax; the logarithm of its divisor; the
    target's logit and the largest, from which both count; the target's index and whether another
    rank has it."""
    wide, largest = _below_largest(_wide(logits), group)
    elsewhere = (target < first) | (target >= first + wide.shape[-1])
    index = (target - first).masked_fill(elsewhere, 0)
    picked = wide.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
    dist.all_reduce(picked, group=group)
    softmax = wide.exp()
    total = softmax.sum(-1)
    dist.all_reduce(total, group=group)
    softmax.div_(total.unsqueeze(-1))
    return softmax, total.log(), picked, largest, index, elsewhere


class Megatron(torch.autograd.Function):
    """Shoeybi et al., Megatron-LM, 2019: the cross entropy of a rank's own logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int, group: Any) -> Tensor:
        softmax, logarithm, picked, _, index, elsewhere = _megatron_softmax(
            logits, target, first, group
        )
        ctx.save_for_backward(softmax, index, elsewhere)
        ctx.dtype = logits.dtype
        return (logarithm - picked).mean()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        gradient, index, elsewhere = ctx.saved_tensors
        rows = torch.arange(len(index), device=index.device)
        gradient[rows, index] -= 1 - elsewhere.to(gradient.dtype)
        return gradient.mul_(grad_output / len(index)).to(ctx.dtype), None, None, None


class MegatronLogProbs(torch.autograd.Function):
    """The log-probabilities, and the entropies as verl's vocab_parallel_entropy computes them."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, first: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        softmax, logarithm, picked, largest, index, elsewhere = _megatron_softmax(
            logits, target, first, group
        )
        mean = (softmax * logits).sum(-1)
        dist.all_reduce(mean, group=group)
        ctx.save_for_backward(softmax, logits, mean, index, elsewhere)
        return picked - logarithm, largest + logarithm - mean

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> Any:
        softmax, logits, mean, index, elsewhere = ctx.saved_tensors
        gradient = (mean.unsqueeze(-1) - logits).mul_(grad_entropy.unsqueeze(-1))
        gradient.sub_(grad_log_probs.unsqueeze(-1)).mul_(softmax)
        rows = torch.arange(len(index), device=index.device)
        gradient[rows, index] += grad_log_probs.masked_fill(elsewhere, 0)
        return gradient.to(logits.dtype), None, None, None


class MegatronDivergence(torch.autograd.Function):
    """The mean divergence from the target's softmax to that of a rank's own logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        logarithms = []
        for each in (logits, target):
            wide, _ = _below_largest(_wide(each) / TEMPERATURE, group)
            total = wide.exp().sum(-1, keepdim=True)
            dist.all_reduce(total, group=group)
            logarithms.append(wide.sub_(total.log_()))
        probs, wanted = (each.exp() for each in logarithms)
        loss = (wanted * (logarithms[1] - logarithms[0])).sum() / len(logits)
        dist.all_reduce(loss, group=group)
        ctx.save_for_backward(probs, wanted)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        probs, wanted = ctx.saved_tensors
        factor = grad_output / (len(probs) * TEMPERATURE)
        return probs.sub_(wanted).mul_(factor).to(ctx.dtype), None, None


def _own_logits(hidden: DTensor, weight: DTensor, target: DTensor) -> tuple[Any, ...]:
    """A rank's own logits, and the other arguments of Megatron's functions."""
    mesh = weight.device_mesh
    # The gradient of a replicated tensor is a part of the whole gradient.
    own = hidden.to_local(grad_placements=[Partial()])
    _, first = Shard.local_shard_size_and_offset(
        weight.shape[0], mesh.size(), mesh.get_local_rank()
    )
    return F.linear(own, weight.to_local()), target.to_local(), first, mesh.get_group()


def megatron(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    return Megatron.apply(*_own_logits(hidden, weight, target))


def megatron_log_probs(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    return policy(*MegatronLogProbs.apply(*_own_logits(hidden, weight, target)))


def megatron_divergence(
    hidden: DTensor, weight: DTensor, taught: DTensor, teacher: DTensor
) -> Tensor:
    own, own_taught, _, group = _own_logits(hidden, weight, taught)
    return MegatronDivergence.apply(own, F.linear(own_taught, teacher.to_local()), group)


def _whole(weight: Any) -> Any:
    """The weight of all classes; the ranks' gradients of it are summed and sharded again."""
    return weight.redistribute(placements=[Replicate()])


def ours_gathered(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    return fused.linear_cross_entropy(hidden, _whole(weight), target)


def stock_gathered() -> Step:
    compiled = torch.compile(stock, dynamic=False)

    def loss(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
        own = hidden.to_local()
        whole = _whole(weight).to_local(grad_placements=[Partial()])
        part = compiled(own, whole, target.to_local()) * (own.shape[0] / hidden.shape[0])
        total = part.detach().clone()
        dist.all_reduce(total, group=weight.device_mesh.get_group())
        return part + (total - part.detach())

    return loss


def ours_of_logits(hidden: Any, weight: DTensor, target: Any) -> Tensor:
    everywhere = [Replicate()]
    logits = F.linear(hidden.redistribute(placements=everywhere), weight)
    return fused.cross_entropy(logits, target.redistribute(placements=everywhere))


class Exchange(torch.autograd.Function):
    """The collectives of a step without what it computes: an all-gather, and in the backward a
    reduce-scatter of as many numbers."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.whole = own.new_empty(own.shape[0] * group.size(), *own.shape[1:])
        ctx.group = group
        dist.all_gather_into_tensor(ctx.whole, own, group=group)
        return own.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        whole = ctx.whole
        own = whole.new_empty(whole.shape[0] // ctx.group.size(), *whole.shape[1:])
        dist.reduce_scatter_tensor(own, whole, group=ctx.group)
        return own, None


def exchange_weight(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    group = weight.device_mesh.get_group()
    own = weight.to_local()[
        : weight.shape[0] // group.size()
    ]  # of uneven shards as much as all have
    return Exchange.apply(own, group)


def exchange_hidden(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    group = weight.device_mesh.get_group()
    return Exchange.apply(hidden.to_local()[: hidden.shape[0] // group.size()], group)


#: The losses, on one device: of hidden, weight and the labels or, of a divergence, the teacher's
#: hidden and weight.
LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": stock,
    "of_rows": stock,
    "log_probs": stock_log_probs,
    "divergence": stock_divergence,
}


@dataclass(frozen=True)
class Contender:
    build: Callable[[], Step]
    package: str
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which the step runs
    loss: str = "cross_entropy"
    is_checked: bool = True  # whether it computes the loss


def _compiled(function: Step) -> Step:
    # The check has fewer rows than the timed step, which would be compiled for any number of rows.
    return torch.compile(function, backend="compile_losses", dynamic=False)


def _of_log_probs(build: Callable[[], Step], package: str) -> Contender:
    return Contender(build, package, loss="log_probs")


def _of_rows(build: Callable[[], Step], package: str, *, is_checked: bool = True) -> Contender:
    return Contender(build, package, loss="of_rows", is_checked=is_checked)


def _of_divergence(build: Callable[[], Step], package: str) -> Contender:
    return Contender(build, package, loss="divergence")


CONTENDERS: dict[str, Contender] = {
    "ours": Contender(lambda: ours, "compile_losses"),
    "ours_linear": Contender(lambda: fused.linear_cross_entropy, "compile_losses"),
    "ours_compiled": Contender(lambda: _compiled(stock), "compile_losses"),
    "loss_parallel": Contender(lambda: stock, "torch", loss_parallel),
    "megatron": Contender(lambda: megatron, "torch"),
    "ours_log_probs": _of_log_probs(lambda: ours_log_probs, "compile_losses"),
    "ours_log_probs_compiled": _of_log_probs(lambda: _compiled(ours_log_probs), "compile_losses"),
    "ours_log_probs_of_logits": _of_log_probs(lambda: ours_log_probs_of_logits, "compile_losses"),
    "dtensor_log_probs": _of_log_probs(lambda: gathered_log_probs, "torch"),
    "megatron_log_probs": _of_log_probs(lambda: megatron_log_probs, "torch"),
    "ours_divergence": _of_divergence(lambda: ours_divergence, "compile_losses"),
    "ours_divergence_compiled": _of_divergence(
        lambda: _compiled(ours_divergence), "compile_losses"
    ),
    "ours_divergence_of_logits": _of_divergence(
        lambda: ours_divergence_of_logits, "compile_losses"
    ),
    "dtensor_divergence": _of_divergence(lambda: gathered_divergence, "torch"),
    "megatron_divergence": _of_divergence(lambda: megatron_divergence, "torch"),
    "stock_gathered": _of_rows(stock_gathered, "torch"),
    "ours_gathered": _of_rows(lambda: ours_gathered, "compile_losses"),
    "ours_of_rows": _of_rows(lambda: fused.linear_cross_entropy, "compile_losses"),
    "ours_of_logits_of_rows": _of_rows(lambda: ours_of_logits, "compile_losses"),
    "exchange_weight": _of_rows(lambda: exchange_weight, "torch", is_checked=False),
    "exchange_hidden": _of_rows(lambda: exchange_hidden, "torch", is_checked=False),
}
