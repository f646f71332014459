"""The losses in what people train with: checkpointing, parallel wrappers, scalers, exporters."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import compile_losses
from tests.graphs import Head, classes, compare, real


def gradients(model, function, inputs, factor=1.0):
    model.zero_grad()
    loss = function(*inputs)
    (loss * factor).backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("saved", [torch.ops.aten.addmm.default, None], ids=["addmm", "nothing"])
def test_selective_checkpointing(saved, graphs, no_code):
    def policy(context, op, *args, **kwargs):
        keep = op is saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    class Selective(Head):
        def forward(self, x, target):
            return checkpoint(super().forward, x, target, use_reentrant=False, context_fn=contexts)

    compare(Selective(F.cross_entropy, F.gelu), classes())
    compare(Selective(F.mse_loss), real())


def test_submodule_compiled_alone(small_losses):
    """A criterion that is compiled by itself gets its input from an eager model."""

    class Criterion(nn.Module):  # Dynamo skips torch's own modules where they are the whole
        def forward(self, prediction, target):
            return F.cross_entropy(prediction, target, label_smoothing=0.1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 12)
            self.criterion = Criterion()

        def forward(self, x, target):
            return self.criterion(self.linear(x), target)

    model, inputs = Model(), classes()
    compiled = copy.deepcopy(model)
    compiled.criterion.compile(backend="compile_losses", fullgraph=True)
    for factor in (1.0, -2.0):
        torch.testing.assert_close(
            gradients(compiled, compiled, inputs, factor), gradients(model, model, inputs, factor)
        )


def test_compiled_optimizer_step(no_code, small_losses):
    """Three steps of a model whose optimizer is compiled as well, after accumulated gradients."""
    model = Head(F.cross_entropy)
    results = []
    for backend in ("eager", "compile_losses"):
        net = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1))
        forward = torch.compile(net, backend=backend)
        step = torch.compile(optimizer.step, backend=backend)
        torch.manual_seed(1)
        for _ in range(3):
            for _ in range(2):
                (forward(*classes()) / 2).backward()
            step()
            optimizer.zero_grad()
        results.append([p.detach() for p in net.parameters()])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_autocast_and_scaler(dtype, inside, device, no_code, kernels_for_small_losses):
    """A scaled loss of an autocast model, as GradScaler hands it to backward."""

    class Mixed(Head):
        def forward(self, x, target):
            with torch.autocast(device, dtype=dtype, enabled=inside):
                return super().forward(x, target)

    model = Mixed(F.cross_entropy).to(device)
    inputs = [t.to(device) for t in classes(64)]
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
    results = []
    for backend in ("eager", "compile_losses"):
        torch._dynamo.reset()
        net = copy.deepcopy(model)
        compiled = torch.compile(net, backend=backend)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with torch.autocast(device, dtype=dtype, enabled=not inside):
            loss = compiled(*inputs)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert loss.dtype == torch.float32
        results.append([loss.detach(), *(p.grad for p in net.parameters())])
    torch.testing.assert_close(*results, rtol=2e-2, atol=1e-3)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_ddp(process_group, small_losses):
    model, inputs = Head(F.cross_entropy), classes()
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    compiled = torch.compile(wrapped, backend="compile_losses")
    for factor in (1.0, 3.0):
        torch.testing.assert_close(
            gradients(wrapped, compiled, inputs, factor), gradients(model, model, inputs, factor)
        )


def test_fsdp2(process_group, small_losses):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model, inputs = Head(F.mse_loss), real()
    sharded = copy.deepcopy(model)
    mesh = dist.init_device_mesh("cpu", (1,))
    fully_shard(sharded.linear, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    compiled = torch.compile(sharded, backend="compile_losses")
    expected = gradients(model, model, inputs, 2.0)
    actual = gradients(sharded, compiled, inputs, 2.0)
    actual = [t.full_tensor() if isinstance(t, DTensor) else t for t in actual]
    torch.testing.assert_close(actual, expected)


def test_compiled_autograd(small_losses):
    """The backward of a compiled step is captured again, and compiled as a graph of its own."""
    model, inputs = Head(F.cross_entropy), classes()
    compiled = torch.compile(copy.deepcopy(model), backend="compile_losses")
    with torch._dynamo.config.patch(compiled_autograd=True):

        @torch.compile(backend="compile_losses")
        def step(*inputs):
            loss = 0.5 * compiled(*inputs)
            loss.backward()
            return loss.detach()

        for _ in range(2):
            compiled.zero_grad()
            loss = step(*inputs)
    expected = gradients(model, lambda *a: 0.5 * model(*a), inputs)
    torch.testing.assert_close([loss, *(p.grad for p in compiled.parameters())], expected)


def test_hooks(small_losses):
    """Hooks on the loss and on the parameters see, and change, torch's gradients."""
    model, inputs = Head(F.mse_loss), real()
    results = []
    for function in (model, torch.compile(copy.deepcopy(model), backend="compile_losses")):
        seen = []
        loss = function(*inputs)
        loss.register_hook(lambda g, seen=seen: seen.append(g.clone()) or g * 5)
        weight = next(function.parameters())
        weight.register_hook(lambda g, seen=seen: seen.append(g.clone()) or g + 1)
        loss.backward()
        results.append([*seen, *(p.grad for p in function.parameters())])
    torch.testing.assert_close(*results)


class Exported(nn.Module):
    """Calls an op by name, as code that is written for this package does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 12)

    def forward(self, x, target):
        return torch.ops.fused.cross_entropy(self.linear(x), target)


def test_export_keeps_the_ops():
    model, inputs = Exported(), classes()
    program = torch.export.export(model, inputs)
    targets = [str(node.target) for node in program.graph.nodes]
    assert "fused.cross_entropy.default" in targets
    torch.testing.assert_close(program.module()(*inputs), model(*inputs))
    lowered = program.run_decompositions()
    assert any(str(node.target).startswith("fused.cross_entropy") for node in lowered.graph.nodes)
    torch.testing.assert_close(lowered.module()(*inputs), model(*inputs))


def test_export_of_an_unmodified_model_is_torchs():
    """export knows no backend: the losses stay torch's ops, in a program that needs no package."""
    with compile_losses.enable():
        program = torch.export.export(Head(F.mse_loss), real())
    assert not any("fused" in str(node.target) for node in program.graph.nodes)


@pytest.mark.sampled(2)
@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="AOTInductor of torch 2.11 hands ops another dtype"
)
@pytest.mark.usefixtures("kernels_for_small_losses")
@pytest.mark.parametrize("model", [Exported, lambda: Head(F.cross_entropy)], ids=["op", "torch"])
def test_aot_inductor(model, tmp_path):
    model, inputs = model(), classes()
    with torch.no_grad(), compile_losses.enable():
        program = torch.export.export(model, inputs)
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        loaded = torch._inductor.aoti_load_package(path)
        torch.testing.assert_close(loaded(*inputs), model(*inputs))


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_modes_in_training(mode, device, kernels_for_small_losses):
    model = Head(lambda p, t: 0.5 * F.cross_entropy(p, t)).to(device)
    inputs = [t.to(device) for t in classes()]
    compiled = torch.compile(copy.deepcopy(model), backend="compile_losses", mode=mode)
    for factor in (1.0, 3.0):
        torch.testing.assert_close(
            gradients(compiled, compiled, inputs, factor), gradients(model, model, inputs, factor)
        )
