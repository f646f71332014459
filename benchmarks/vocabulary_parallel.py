"""A vocabulary-parallel training step of a language model's head: time and peak memory a rank.

Hidden [rows, hidden] is on every rank, the head's weight [classes, hidden] sharded by rows. A step
is the head, the loss and the gradients of both. Contenders:

ours           ``F.linear`` and ``compile_losses.functional.cross_entropy`` of DTensors
ours, linear   ``compile_losses.functional.linear_cross_entropy`` of DTensors: no logits are held
ours, compiled torch's functions in a step compiled with ``backend="compile_losses"``
loss_parallel  torch's own: ``F.cross_entropy`` in its context
megatron       Megatron-LM's scheme in torch's ops: three all-reduces, and the softmax saved

Every rank checks every contender against float64 before it is timed::

    torchrun --nproc-per-node 2 -m benchmarks.vocabulary_parallel --shape 8192x4096x128256
    torchrun --nproc-per-node 2 -m benchmarks.vocabulary_parallel --shape 64x16x1000 --check
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import compile_losses.functional as fused
from benchmarks.clock import make_clock
from benchmarks.matrix import cpu_peak_mib

Loss = Callable[[Any, Any, Any], Any]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def ours(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    return fused.cross_entropy(F.linear(hidden, weight), target)


def ours_linear(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    return fused.linear_cross_entropy(hidden, weight, target)


def stock(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


class Megatron(torch.autograd.Function):
    """Shoeybi et al., Megatron-LM, 2019: the cross entropy of a rank's own logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int) -> Tensor:
        wide = logits.float() if logits.dtype == torch.bfloat16 else logits
        largest = wide.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        wide = wide - largest.unsqueeze(-1)
        elsewhere = (target < first) | (target >= first + wide.shape[-1])
        index = (target - first).masked_fill(elsewhere, 0)
        picked = wide.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        dist.all_reduce(picked)
        softmax = wide.exp()
        total = softmax.sum(-1)
        dist.all_reduce(total)
        softmax.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, index, elsewhere)
        ctx.dtype = logits.dtype
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        gradient, index, elsewhere = ctx.saved_tensors
        rows = torch.arange(len(index), device=index.device)
        gradient[rows, index] -= 1 - elsewhere.to(gradient.dtype)
        return gradient.mul_(grad_output / len(index)).to(ctx.dtype), None, None


def megatron(hidden: DTensor, weight: DTensor, target: DTensor) -> Tensor:
    mesh = weight.device_mesh
    # The gradient of what every rank has is a part of the whole's.
    own = hidden.to_local(grad_placements=[torch.distributed.tensor.Partial()])
    _, first = Shard.local_shard_size_and_offset(
        weight.shape[0], mesh.size(), mesh.get_local_rank()
    )
    logits = F.linear(own, weight.to_local())
    return Megatron.apply(logits, target.to_local(), first)


CONTENDERS: dict[str, Loss] = {
    "ours": ours,
    "ours, linear": ours_linear,
    "ours, compiled": torch.compile(stock, backend="compile_losses"),
    "loss_parallel": stock,
    "megatron": megatron,
}


class Problem:
    """A step's tensors, the same on every rank."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, mesh: DeviceMesh, *, check: bool
    ) -> None:
        rows, hidden, classes = shape
        device = torch.device(mesh.device_type)
        generator = torch.Generator(device).manual_seed(0)
        size, first = Shard.local_shard_size_and_offset(classes, mesh.size(), mesh.get_local_rank())
        plain = torch.randn(rows, hidden, dtype=dtype, device=device, generator=generator)
        scale = hidden**-0.5
        # Drawn in parts, so that no rank holds the whole weight unless it is to be checked.
        parts = []
        for begin in range(0, classes, 1024):
            part = torch.randn(1024, hidden, device=device, generator=generator) * scale
            part = part[: classes - begin].to(dtype)
            low, high = max(first - begin, 0), max(first + size - begin, 0)
            parts.append(part if check else part[low:high])
        head = torch.cat(parts)
        target = torch.randint(classes, (rows,), device=device, generator=generator)
        own = head[first : first + size] if check else head
        self.hidden = DTensor.from_local(plain, mesh, [Replicate()]).requires_grad_()
        self.weight = DTensor.from_local(
            own, mesh, [Shard(0)], shape=torch.Size((classes, hidden)), stride=(hidden, 1)
        ).requires_grad_()
        self.target = DTensor.from_local(target, mesh, [Replicate()])
        if check:
            tensors = [t.detach().double().requires_grad_() for t in (plain, head)]
            loss = F.cross_entropy(F.linear(*tensors), target)
            loss.backward()
            grads = (tensors[0].grad, tensors[1].grad[first : first + size])
            self.exact = (loss.detach(), *grads)

    def step(self, name: str) -> tuple[Tensor, ...]:
        self.hidden.grad = self.weight.grad = None
        if name == "loss_parallel":
            with loss_parallel():
                loss = stock(self.hidden, self.weight, self.target)
                loss.backward()
        else:
            loss = CONTENDERS[name](self.hidden, self.weight, self.target)
            loss.backward()
        return loss.detach(), self.hidden.grad, self.weight.grad

    def error(self, name: str) -> float:
        """The largest error, over that of the exact result's largest number."""
        loss, of_hidden, of_weight = self.step(name)
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        found = (loss, of_hidden.full_tensor(), of_weight.to_local())
        pairs = zip(found, self.exact, strict=True)
        return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def _shape(text: str) -> tuple[int, int, int]:
    rows, hidden, classes = map(int, text.split("x"))
    return rows, hidden, classes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    shapes = [(8192, 4096, 128256)]
    parser.add_argument(
        "--shape", type=_shape, nargs="+", default=shapes, help="ROWSxHIDDENxCLASSES"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--contender", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="only compare with float64")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    clock = None if arguments.check else make_clock(torch.device(device))
    dtype = DTYPES[arguments.dtype]
    wrong = 0
    for shape in arguments.shape:
        checked = Problem((64, *shape[1:]), dtype, mesh, check=True)
        problem = None if clock is None else Problem(shape, dtype, mesh, check=False)
        for name in arguments.contender:
            error = checked.error(name)
            line = f"{'x'.join(map(str, shape)):<20}{name:<16}error {error:.1e}"
            # Sums of products over rows, hidden features and ranks.
            wrong += error > 64 * torch.finfo(dtype).eps
            if clock is not None and problem is not None:
                call = lambda n=name, p=problem: p.step(n)  # noqa: E731
                times = [clock.sample(lambda: call, 0.0) for _ in range(arguments.samples)]  # noqa: B023
                peak = clock.peak_mib(call)
                peak = cpu_peak_mib(call) if peak is None else peak
                line += f"  {statistics.median(times):9.3f} ms  {peak:9.1f} MiB"
            if dist.get_rank() == 0:
                print(line, flush=True)
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
