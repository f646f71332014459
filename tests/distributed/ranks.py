"""What two processes compute on CPUs through gloo, or on GPUs through NCCL, compared with one.

Run by tests/distributed/test_processes.py, which names the checks.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import compile_losses.functional as fused
from compile_losses.distributed.data_parallel import global_mean
from compile_losses.lazy import LazyLogits, automatic
from compile_losses.linear import linear_log_probs, linear_softmax_kl_div
from tests.constants import set_constants
from tests.distributed import processes
from tests.distributed.processes import checks_in

WORLD = 2
ROWS, CLASSES, HIDDEN = 7, 11, 6


def rand(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(processes.device)


def labels():
    target = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
    target[:4] = -100  # all of rank 0's, where rows are sharded
    return target.to(processes.device)


@cache  # torch 2.13 compiles no op of DTensors on a second mesh that equals the first
def mesh_of(shape=(WORLD,), names=None):
    return init_device_mesh(processes.device.type, shape, mesh_dim_names=names)


def same(ours, exact, tolerance=1e-12):
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    assert (ours - exact).abs().max() <= tolerance, (ours - exact).abs().max()


def agree(loss, tensors, layouts, function=None):
    """A loss of DTensors and its gradients, and those of plain tensors."""
    mesh = mesh_of()
    plain = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    expected = loss(*plain)
    expected.sum().backward()
    sharded = [
        distribute_tensor(t, mesh, [layout]) for t, layout in zip(tensors, layouts, strict=True)
    ]
    for tensor in sharded:
        tensor.requires_grad_(tensor.is_floating_point())
    ours = (function or loss)(*sharded)
    assert isinstance(ours, DTensor)
    ours.backward(distribute_tensor(torch.ones_like(expected), mesh, [Replicate()]))
    same(ours, expected)
    for a, b in zip(sharded, plain, strict=True):
        if b.grad is not None:
            same(a.grad, b.grad)


def check_cross_entropy():
    for layouts in ([Shard(1), Replicate()], [Shard(0), Shard(0)], [Replicate(), Replicate()]):
        for reduction in ("none", "mean", "sum"):
            for smoothing in (0.0, 0.1):
                agree(
                    lambda x, t, r=reduction, s=smoothing: fused.cross_entropy(
                        x, t, reduction=r, label_smoothing=s
                    ),
                    [rand(ROWS, CLASSES), labels()],
                    layouts,
                )


def check_linear():
    tensors = [rand(ROWS, HIDDEN), rand(CLASSES, HIDDEN, seed=2), labels()]
    rows, whole = Shard(0), Replicate()
    for layouts in ([whole, rows, whole], [rows, rows, rows], [rows, whole, rows]):
        for reduction in ("none", "mean", "sum"):
            agree(
                lambda h, w, t, r=reduction: fused.linear_cross_entropy(
                    h, w, t, reduction=r, z_loss=0.01, softcap=4.0
                ),
                tensors,
                layouts,
            )


def two_depths(h, w, t):
    """Heads of one weight, as multi-token prediction has them."""
    one, two = (F.cross_entropy(F.linear(x, w), t) for x in (h, h.tanh()))
    return one + two


def check_heads_of_one_weight():
    """Their gradients of the weight are those of one process, sharded by rows or by classes."""
    tensors = [rand(ROWS, HIDDEN)[1:], rand(CLASSES, HIDDEN, seed=2), labels()[1:]]
    rows, whole = Shard(0), Replicate()
    for layouts in ([rows, whole, rows], [whole, rows, whole]):
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patch:
            set_constants(patch, least_rows=1, logits_bytes=1)
            compiled = torch.compile(two_depths, backend="compile_losses", fullgraph=True)
            agree(two_depths, tensors, layouts, compiled)


def log_probs_and_entropy(h, w, t):
    log_probs, entropy = linear_log_probs(
        h, w, t, temperature=0.7, softcap=4.0, return_entropy=True
    )
    return log_probs.exp() * entropy + entropy


def check_log_probs():
    tensors = [rand(ROWS, HIDDEN), rand(CLASSES, HIDDEN, seed=2), labels()]
    rows, whole = Shard(0), Replicate()
    for layouts in ([whole, rows, whole], [rows, rows, rows], [rows, whole, rows]):
        agree(log_probs_and_entropy, tensors, layouts)
    logits, index = rand(ROWS, CLASSES), labels().clamp(min=0)
    for layouts in ([Shard(1), whole], [rows, rows]):
        agree(fused.selective_log_softmax, [logits, index], layouts)
        agree(fused.softmax_entropy, [logits], layouts[:1])


def check_likeliest_classes():
    """Bits of integers come through the collective."""
    tensors = [rand(ROWS, HIDDEN).float(), rand(CLASSES, HIDDEN, seed=2).float(), labels()]
    _, expected = linear_log_probs(*tensors, return_argmax=True)
    mesh = mesh_of()
    layouts = Replicate(), Shard(0), Replicate()
    sharded = [distribute_tensor(t, mesh, [p]) for t, p in zip(tensors, layouts, strict=True)]
    compiled = torch.compile(linear_log_probs, backend="compile_losses", fullgraph=True)
    for function in (linear_log_probs, compiled):
        _, argmax = function(*sharded, return_argmax=True)
        assert torch.equal(argmax.full_tensor(), expected)


def divergence(h, w, t):
    return linear_softmax_kl_div(h, w, t.detach(), temperature=1.5)


def divergence_of_logits(h, w, t):
    return fused.softmax_kl_div(F.linear(h, w), t.detach(), temperature=1.5)


def check_divergences():
    tensors = [rand(ROWS, HIDDEN), rand(CLASSES, HIDDEN, seed=2), rand(ROWS, CLASSES, seed=3)]
    rows, whole = Shard(0), Replicate()
    for layouts in ([whole, rows, Shard(1)], [rows, whole, rows]):
        for loss in (divergence, divergence_of_logits):
            agree(loss, tensors, layouts)
            torch._dynamo.reset()
            compiled = torch.compile(loss, backend="compile_losses", fullgraph=True)
            agree(loss, tensors, layouts, compiled)


def check_compiled_log_probs():
    tensors = [rand(ROWS, HIDDEN), rand(CLASSES, HIDDEN, seed=2), labels()]
    rows, whole = Shard(0), Replicate()
    for layouts in ([whole, rows, whole], [rows, whole, rows]):
        torch._dynamo.reset()
        compiled = torch.compile(log_probs_and_entropy, backend="compile_losses", fullgraph=True)
        agree(log_probs_and_entropy, tensors, layouts, compiled)


def check_elementwise():
    """Torch's own gradient is as many times too large as there are ranks."""
    for reduction in ("none", "mean", "sum"):
        agree(
            lambda a, b, r=reduction: fused.mse_loss(a, b, reduction=r),
            [rand(ROWS, 3), rand(ROWS, 3, seed=1)],
            [Shard(0), Shard(0)],
        )


def check_compiled():
    """Torch's own functions, rewritten and run by Inductor, and ours where torch refuses."""

    def step(h, w, t):
        return F.cross_entropy(F.linear(h, w), t, label_smoothing=0.1)

    def without_smoothing(h, w, t):  # of sharded rows torch 2.11 refuses it
        return F.cross_entropy(F.linear(h, w), t)

    def ours(h, w, t):
        return fused.cross_entropy(F.linear(h, w), t, label_smoothing=0.1)

    hidden, head, target = rand(ROWS, HIDDEN), rand(CLASSES, HIDDEN, seed=2), labels()
    rows, whole = Shard(0), Replicate()
    even = [hidden[1:], head, target[1:]]
    for tensors, layouts, exact, function in (
        ([hidden, head, target], [whole, rows, whole], step, step),
        (even, [rows, whole, rows], without_smoothing, without_smoothing),
        ([hidden, head, target], [rows, whole, rows], step, ours),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="compile_losses", fullgraph=True)
        agree(exact, tensors, layouts, compiled)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(HIDDEN, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.first(x).tanh())


def model():
    torch.manual_seed(0)
    return Model().double().to(processes.device)


def mean_of_tokens(logits, target, group=None):
    total = F.cross_entropy(logits, target, reduction="sum")
    return global_mean(total, (target != -100).sum(), group)


def data_parallel(wrapped, group=None, criterion=mean_of_tokens):
    """One step on a rank's own rows, and on all rows in one process."""
    alone, x, target = model(), rand(ROWS, HIDDEN), labels()
    expected = F.cross_entropy(alone(x), target)
    expected.backward()
    rank = dist.get_rank()
    mine = slice(0, 5) if rank == 0 else slice(5, ROWS)
    loss = criterion(wrapped(x[mine]), target[mine], group)
    loss.backward()
    same(loss.detach(), expected)
    inner = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    for ours, exact in zip(inner.parameters(), alone.parameters(), strict=True):
        same(ours.grad, exact.grad)


def check_ddp():
    data_parallel(DistributedDataParallel(model()))


def check_compiled_ddp():
    compiled = torch.compile(mean_of_tokens, backend="compile_losses", fullgraph=True)
    data_parallel(DistributedDataParallel(model()), criterion=compiled)


def check_fsdp2():
    sharded = model()
    mesh = mesh_of()
    for layer in (sharded.first, sharded.head):
        fully_shard(layer, mesh=mesh)
    data_parallel(fully_shard(sharded, mesh=mesh))


def check_hsdp():
    for shape in ((2, 1), (1, 2)):
        mesh = mesh_of(shape, ("replicate", "shard"))
        data_parallel(fully_shard(model(), mesh=mesh), mesh)


class Returning(nn.Module):
    """Returns its logits beside the loss."""

    def __init__(self):
        super().__init__()
        self.inner = model()
        self.inner.head = nn.Linear(self.inner.head.in_features, 4 * CLASSES).to(
            processes.device, torch.float64
        )

    def forward(self, x, target):
        logits = self.inner(x)
        return F.cross_entropy(logits, target, reduction="sum") / 8, logits


@contextmanager
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        set_constants(patch, least_rows=1, least_elements=1, logits_bytes=1, part_of_weight=0)
        yield


def lazily(wrap):
    """Steps of a wrapped model, compiled itself or in its step, with losses inside and outside."""
    for outside in (False, True):
        expected = steps(wrap, "nothing", outside=outside)[0]
        with small_chunks():
            for compiles in ("model", "step"):
                losses, logits = steps(wrap, compiles, outside=outside)
                same(losses, expected)
                assert isinstance(logits, LazyLogits), compiles
                if not outside:
                    with pytest.raises(RuntimeError, match="were not read yet"):
                        logits.sum()


def steps(wrap, compiles, *, outside, lazy=True, reads=False):
    """The losses of two steps of training, and the logits of the last.

    Args:
        reads: whether each step's logits are gathered from all ranks, after the step.
    """
    torch._dynamo.reset()
    wrapped = wrap(Returning())
    optimizer = torch.optim.AdamW(wrapped.parameters(), 0.1)
    options = {"lazy_logits": lazy, "inner_backend": "aot_eager"}
    compiled = partial(torch.compile, backend="compile_losses", options=options)
    model = compiled(wrapped) if compiles == "model" else wrapped

    def step(x, target):
        loss, logits = model(x, target)
        return (loss + 0.5 * F.cross_entropy(logits, target) if outside else loss), logits

    step = compiled(step) if compiles == "step" else step
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss, logits = step(rand(ROWS, HIDDEN), labels())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if reads:
            gathered = [torch.empty_like(logits) for _ in range(WORLD)]
            dist.all_gather(gathered, logits.detach())
            losses += [each.sum() for each in gathered]
    return torch.stack(losses), logits


def automatically(wrap, expected_kind):
    """The same without an option: nothing raises, and the logits are there when they are read."""
    for outside in (False, True):
        for reads in (False, True):
            automatic.forget()
            expected = steps(wrap, "nothing", outside=outside, reads=reads)[0]
            with small_chunks():
                found, logits = steps(wrap, "model", outside=outside, lazy="auto", reads=reads)
            same(found, expected)
            assert type(logits) in (expected_kind, torch.Tensor)
            same(logits.sum(), logits.detach().clone().sum())


def check_automatic_ddp():
    automatically(DistributedDataParallel, LazyLogits)


def check_automatic_fsdp2():
    def wrap(whole):
        return fully_shard(whole, mesh=mesh_of())

    automatically(wrap, LazyLogits)


def check_lazy_ddp():
    lazily(DistributedDataParallel)


def check_lazy_ddp_in_parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 64)
        lazily(partial(DistributedDataParallel, bucket_cap_mb=64 / 2**20))


def check_lazy_fsdp2():
    def wrap(whole):
        mesh = mesh_of()
        fully_shard(whole.inner.first, mesh=mesh)
        return fully_shard(whole, mesh=mesh)

    lazily(wrap)


CHECKS = checks_in(globals())
