"""Steps as trainers take them, on several processes: this backend trains as stock does.

Run by tests/distributed/test_trainers.py, which names the checks. docs/distributed.md has each as a
recipe.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import compile_losses
from compile_losses import guard, inductor_passes, options, recognize, switches
from compile_losses.distributed import agreement
from compile_losses.distributed.data_parallel import global_mean
from tests import ROOT
from tests.constants import set_constants
from tests.distributed.processes import checks_in
from tests.graphs import interpreted
from tests.models.training import reported

HIDDEN, CLASSES, LENGTH = 16, 48, 8
#: A batch of sequences for each rank and micro-batch, of which the last rank's are half ignored.
SEQUENCES, MICRO_BATCHES, STEPS = 2, 2, 3
HEAD = "linear_cross_entropy"


class LanguageModel(nn.Module):
    """Returns the sum of its tokens' losses over a given count, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return h + self.down(F.gelu(self.up(h)))

    def forward(self, tokens: Tensor, labels: Tensor, count: Any) -> Tensor:
        logits = self.head(self.hidden(tokens)).flatten(0, -2)
        total = F.cross_entropy(logits.float(), labels.flatten(), reduction="sum")
        return (total.full_tensor() if isinstance(total, DTensor) else total) / count


class NormedModel(LanguageModel):
    """With norms before and after its layers, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def hidden(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return self.last(h + self.down(F.gelu(self.up(self.first(h)))))


def new_model(kind: type[LanguageModel] = LanguageModel) -> LanguageModel:
    torch.manual_seed(0)
    return kind()


def batch(step: int, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, each [SEQUENCES, LENGTH]; the ranks count different numbers of tokens."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    tokens, labels = torch.randint(CLASSES, (2, SEQUENCES, LENGTH), generator=generator)
    labels[:, : 2 * rank] = -100
    return tokens, labels


def counted(step: int, ranks: int) -> int:
    """The tokens of a step, of all ranks and micro-batches."""
    batches = [batch(step, m, r) for m in range(MICRO_BATCHES) for r in range(ranks)]
    return sum(int((labels != -100).sum()) for _, labels in batches)


def alone(
    ranks: int, kind: type[LanguageModel] = LanguageModel
) -> tuple[list[float], dict[str, Tensor]]:
    """Training in one process in eager mode, with the batches of all ranks."""
    model = new_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for step in range(STEPS):
        count, total = counted(step, ranks), 0.0
        for micro_batch in range(MICRO_BATCHES):
            for rank in range(ranks):
                loss = model(*batch(step, micro_batch, rank), count)
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, weights(model)


def weights(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, weight in model.named_parameters():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        name = name.replace("_orig_mod.", "").replace("module.", "")
        found[name] = whole.detach().clone()
    return found


@contextmanager
def small_chunks() -> Iterator[None]:
    """A head of few rows is worth taking, and Inductor's graphs are run op by op."""
    with pytest.MonkeyPatch.context() as patch, interpreted(patch):
        set_constants(patch, least_rows=1, least_elements=1, logits_bytes=1, part_of_weight=0)
        yield


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


Trained = tuple[list[float], dict[str, Tensor]]


def trains_as_stock(
    train: Callable[[Callable[..., Any]], Trained],
    exact: Trained,
    ops: Any = (HEAD,),
    **options: Any,
) -> None:
    """A training compiled by stock and by this backend: both are that of one process.

    Args:
        train: is given ``torch.compile`` with a backend.
        exact: losses and weights of one process.
        ops: the losses that are to be found and rewritten; none for a rank without a loss.
    """
    stock = partial(torch.compile, backend="inductor")
    ours = partial(torch.compile, backend="compile_losses", options=options or None)
    for name, compiled in (("stock", stock), ("ours", ours)):
        torch._dynamo.reset()
        with small_chunks(), reported() as report:
            found = train(compiled)
        same(found, exact)
        assert not report.errors, str(report)
        if name == "ours":
            found_ops = {(site.op, site.status) for site in report.losses}
            assert found_ops == {(op, "rewritten") for op in ops}, str(report)


# What follows trains and returns the losses of all ranks and the whole weights.


def steps(
    model: nn.Module,
    call: Callable[..., Tensor],
    last: Callable[[bool], Any] = nullcontext,
    *,
    part: tuple[int, int] | None = None,
    prepared: Callable[[Tensor, Tensor], Any] = lambda tokens, labels: (tokens, labels),
) -> Trained:
    """Steps of micro-batches, whose gradients are averaged over the ranks at the last.

    Args:
        model: has the parameters.
        call: of tokens, labels and a count; its loss is this rank's part.
        last: a context for a micro-batch, given whether it is the last.
        part: which part of how many of the batch this rank has; by default one part a rank.
        prepared: the tokens and labels that the model is given.
    """
    rank, ranks = part or (dist.get_rank(), dist.get_world_size())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for step in range(STEPS):
        # As an integer in a tensor, which transformers' Trainer gives.
        count = torch.tensor(counted(step, ranks))
        total = torch.zeros(())
        for micro_batch in range(MICRO_BATCHES):
            with last(micro_batch == MICRO_BATCHES - 1):
                # Averaged over the ranks: times their number, as Trainer multiplies.
                loss = call(*prepared(*batch(step, micro_batch, rank)), count) * ranks
                loss.backward()
            total += loss.detach() / ranks
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / (dist.get_world_size() // ranks))
    return losses, weights(model)


def check_ddp(static_graph: bool = False, outside: bool = True) -> None:
    """With ``no_sync``; the wrapped model compiled, or the model inside."""

    def train(compiled: Callable[..., Any]) -> Trained:
        model = new_model()
        inner = model if outside else compiled(model)
        wrapped = DistributedDataParallel(inner, static_graph=static_graph)
        call = compiled(wrapped) if outside else wrapped
        # A static graph counts its gradients in the first backward, which then must synchronise.
        waits = nullcontext if static_graph else wrapped.no_sync
        return steps(model, call, lambda last: nullcontext() if last else waits())

    trains_as_stock(train, alone(dist.get_world_size()))


def check_ddp_static_graph() -> None:
    check_ddp(static_graph=True)


def check_ddp_around_compiled() -> None:
    check_ddp(outside=False)


def check_ddp_in_buckets() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 64)
        patch.setattr(
            DistributedDataParallel,
            "__init__",
            partial_method(DistributedDataParallel.__init__, bucket_cap_mb=64 / 2**20),
        )
        check_ddp()


def partial_method(method: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return lambda *args, **given: method(*args, **given, **more)


def fsdp2(*apart: str, **options: Any) -> None:
    def train(compiled: Callable[..., Any]) -> Trained:
        model = new_model()
        for name in apart:
            fully_shard(model.get_submodule(name), reshard_after_forward=True)
        fully_shard(model)

        def last(is_last: bool) -> Any:
            model.set_requires_gradient_sync(is_last)
            return nullcontext()

        return steps(model, compiled(model), last)

    trains_as_stock(train, alone(dist.get_world_size()), **options)


def check_fsdp2() -> None:
    """The head's weight belongs to the whole model, whose step gathers it before."""
    fsdp2("up", "down")


def check_fsdp2_of_head() -> None:
    """The head is a module of its own, whose weight is freed after each call: its loss is a kernel,
    and its logits are held."""
    fsdp2("up", "down", "head", ops=["cross_entropy"], lazy_logits=True)


class HeadWithLoss(nn.Linear):
    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(hidden).float(), labels, reduction="sum")


def check_fsdp2_of_head_with_loss() -> None:
    """The head returns its loss, between the hooks that gather its weight: one graph of both."""

    def train(compiled: Callable[..., Any]) -> Trained:
        model = new_model()
        head = HeadWithLoss(HIDDEN, CLASSES, bias=False)
        head.weight = model.head.weight
        model.head = head
        for name in ("up", "down", "head"):
            fully_shard(model.get_submodule(name))
        head.forward = compiled(head.forward)

        def forward(tokens: Tensor, labels: Tensor, count: Any) -> Tensor:
            return head(model.hidden(tokens).flatten(0, 1), labels.flatten()) / count

        model.forward = forward
        fully_shard(model)

        def last(is_last: bool) -> Any:
            model.set_requires_gradient_sync(is_last)
            return nullcontext()

        return steps(model, model, last)

    trains_as_stock(train, alone(dist.get_world_size()))


class ShardedHead(LanguageModel):
    """Its head has its own classes on each rank, and its loss is that of all ranks' rows."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, tokens: Tensor, labels: Tensor, count: Any) -> Tensor:
        hidden, labels = (
            DTensor.from_local(own.flatten(0, 1), self.mesh, [Shard(0)])
            for own in (self.hidden(tokens), labels)
        )
        loss = F.cross_entropy(self.head(hidden).float(), labels, reduction="sum")
        return loss.full_tensor() / count


def check_fsdp2_beside_sharded_head() -> None:
    """The weight of the head is never gathered: its op gathers hidden states."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def train(compiled: Callable[..., Any]) -> Trained:
        torch.manual_seed(0)
        model = ShardedHead(mesh)
        weight = nn.Parameter(distribute_tensor(model.head.weight, mesh, [Shard(0)]))
        model.head.weight = weight
        for part in (model.up, model.down):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={weight})
        for part in model.modules():
            if isinstance(part, FSDPModule):  # a sum of the ranks' gradients, as the head's is
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo has nothing else
        step = compiled(model)

        def last(is_last: bool) -> Any:
            model.set_requires_gradient_sync(is_last)
            return nullcontext()

        return steps(model, lambda *batch: step(*batch) / world, last)

    trains_as_stock(train, alone(world))


def parallel(model: LanguageModel, mesh: Any) -> LanguageModel:
    """Matrices by columns and by rows, and the head by its classes, whose logits stay sharded. If
    the model has norms, each rank has a part of the sequence between the matrices."""
    outer: dict[str, Any] = {}
    between: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    if isinstance(model, NormedModel):
        outer, between = {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}
        embedding = RowwiseParallel(input_layouts=Replicate(), **between)
        plan = {"embedding": embedding, "first": SequenceParallel(), "last": SequenceParallel()}
    plan |= {
        "up": ColwiseParallel(**outer),
        "down": RowwiseParallel(**between),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False, **outer),
    }
    return parallelize_module(model, mesh, plan)


def in_parallel(
    compiled: Callable[..., Any],
    data: int = 1,
    kind: type[LanguageModel] = LanguageModel,
    called: Callable[[Any], Any] = lambda step: step,
) -> Trained:
    """Steps with the logits of each rank's classes.

    Args:
        data: with FSDP2 over so many ranks, along the mesh's other dimension.
        called: what is called in place of the compiled model.
    """
    names = ("data", "tensor")
    mesh = init_device_mesh("cpu", (data, dist.get_world_size() // data), mesh_dim_names=names)
    model = parallel(new_model(kind), mesh["tensor"])
    if data > 1:
        fully_shard(model, mesh=mesh["data"])

    def replicated(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, DTensor.from_local(labels, mesh["tensor"], [Replicate()])

    part = mesh["data"].get_local_rank(), data
    return steps(model, called(compiled(model)), part=part, prepared=replicated)


def check_tensor_parallel(data: int = 1, kind: type[LanguageModel] = LanguageModel) -> None:
    trains_as_stock(partial(in_parallel, data=data, kind=kind), alone(data, kind))


def check_tensor_parallel_of_fsdp2() -> None:
    check_tensor_parallel(data=2)


def check_tensor_parallel_of_sequences() -> None:
    """Norms of a rank's part of the sequence: the head gathers it."""
    check_tensor_parallel(kind=NormedModel)


def check_loss_parallel(whole: bool = False, kind: type[LanguageModel] = LanguageModel) -> None:
    """Labels that are no DTensors, in torch's own context; the loss compiled, or all of a step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def train(compiled: Callable[..., Any]) -> Trained:
        model = parallel(new_model(kind), mesh)

        def loss(logits: Tensor, labels: Tensor, count: Any) -> Tensor:
            logits = logits.flatten(0, 1).float()
            return F.cross_entropy(logits, labels.flatten(), reduction="sum") / count

        def step(tokens: Tensor, labels: Tensor, count: Any) -> Tensor:
            return loss(model.head(model.hidden(tokens)), labels, count)

        compiled_loss, compiled_step = compiled(loss), compiled(step)

        def call(tokens: Tensor, labels: Tensor, count: Any) -> Tensor:
            with loss_parallel():
                if whole:
                    total = compiled_step(tokens, labels, count)
                else:
                    total = compiled_loss(model.head(model.hidden(tokens)), labels, count)
                return total.full_tensor() if isinstance(total, DTensor) else total

        return steps(model, call, part=(0, 1))

    trains_as_stock(train, alone(1, kind), ops=[HEAD if whole else "cross_entropy"])


def check_loss_parallel_of_step() -> None:
    check_loss_parallel(whole=True)


def check_loss_parallel_of_sequences() -> None:
    check_loss_parallel(whole=True, kind=NormedModel)


def check_context_parallel() -> None:
    """Every rank has a part of each sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def train(compiled: Callable[..., Any]) -> Trained:
        model = new_model()
        step = compiled(DistributedDataParallel(model))

        losses = []
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for index in range(STEPS):
            total = torch.zeros(())
            for micro_batch in range(MICRO_BATCHES):
                buffers = list(batch(index, micro_batch, 0))
                # Its end restores the buffers, which the backward reads.
                with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1]):
                    loss = step(*buffers, torch.tensor(counted(index, 1))) * mesh.size()
                    loss.backward()
                total += loss.detach() / mesh.size()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            losses.append(total.item())
        return losses, weights(model)

    trains_as_stock(train, alone(1))


class Stage(nn.Module):
    """A part of a model: its head, or what is before it."""

    def __init__(self, model: LanguageModel, is_last: bool) -> None:
        super().__init__()
        self.model, self.is_last = model, is_last

    def forward(self, given: Tensor) -> Tensor:
        return self.model.head(given) if self.is_last else self.model.hidden(given)


def pipeline(schedule: Any, op: str, data: int = 1, **options: Any) -> None:
    """Two stages, compiled one by one, and the loss that their schedule is given.

    Args:
        schedule: of torch's.
        op: what the loss becomes, on the ranks of the last stage.
        data: with FSDP2 of each stage over so many ranks.
    """
    mesh = init_device_mesh("cpu", (2, data), mesh_dim_names=("stages", "data"))
    stages, part = mesh["stages"], mesh["data"].get_local_rank()
    index = stages.get_local_rank()

    def train(compiled: Callable[..., Any]) -> Trained:
        model = new_model()
        own = Stage(model, is_last=index == 1)
        if data > 1:
            fully_shard(own, mesh=mesh["data"])
        count = torch.ones(())

        def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return total / count * data

        group = stages.get_group()
        stage = PipelineStage(compiled(own), index, 2, torch.device("cpu"), group=group)
        schedule_of = schedule(stage, MICRO_BATCHES, loss_fn=compiled(loss_of), scale_grads=False)
        optimizer, found = torch.optim.SGD(own.parameters(), 0.5), []
        for step in range(STEPS):
            count.fill_(counted(step, data))
            batches = [batch(step, m, part) for m in range(MICRO_BATCHES)]
            tokens, labels = map(torch.cat, zip(*batches, strict=True))
            losses: list[Tensor] = []
            if index == 0:
                schedule_of.step(tokens)
            else:
                schedule_of.step(target=labels, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            total = torch.tensor(sum(loss.item() for loss in losses)) / data
            dist.all_reduce(total)
            found.append(total.item())
        whole = weights(model)
        for name, weight in whole.items():
            dist.broadcast(weight, data if name.startswith("head") else 0)
        return found, whole

    trains_as_stock(train, alone(data), [op] if index == 1 else [], **options)


def check_pipeline() -> None:
    """The loss takes the head of the last stage, which returns lazy logits."""
    pipeline(ScheduleGPipe, HEAD, lazy_logits=True)


def check_pipeline_of_losses() -> None:
    """A loss of logits that the schedule holds."""
    pipeline(Schedule1F1B, "cross_entropy")


def check_pipeline_of_fsdp2() -> None:
    """FSDP2 has hooks on the results of a stage, which need the gradient of its logits."""
    pipeline(Schedule1F1B, "cross_entropy", data=2, lazy_logits=True)


@contextmanager
def launched() -> Iterator[None]:
    """The environment that ``torchrun`` gives its processes."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        yield


def forget_states() -> None:
    """accelerate keeps its states for a process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def check_accelerate() -> None:
    """DDP, with ``accumulate`` and the number of tokens that ``gather`` sums."""
    from accelerate import Accelerator

    ranks, rank = dist.get_world_size(), dist.get_rank()

    def train(compiled: Callable[..., Any]) -> Trained:
        forget_states()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
        assert accelerator.num_processes == ranks
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        wrapped, optimizer = accelerator.prepare(compiled(model), optimizer)
        losses = []
        for step in range(STEPS):
            batches = [batch(step, m, rank) for m in range(MICRO_BATCHES)]
            own = torch.tensor(sum(int((labels != -100).sum()) for _, labels in batches))
            count = accelerator.gather(own).sum()
            total = torch.zeros(())
            for tokens, labels in batches:
                with accelerator.accumulate(wrapped):
                    loss = wrapped(tokens, labels, count) * ranks * MICRO_BATCHES
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                total += loss.detach() / ranks / MICRO_BATCHES
            losses.append(accelerator.reduce(total).item())
        return losses, weights(model)

    with launched():
        trains_as_stock(train, alone(ranks))


@contextmanager
def deepspeed_on_cpus() -> Iterator[None]:
    import deepspeed

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        # Its kernels are compiled when they are first used, which takes minutes.
        patch.setattr(deepspeed.ops, "__compatible_ops__", {})
        patch.setattr(F, "linear", F.linear)  # which ZeRO-3 replaces for all of the process
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        yield


def deepspeed(stage: int, op: str) -> None:
    """DeepSpeed's engine on the CPU.

    Args:
        stage: of ZeRO.
        op: what the loss becomes.
    """
    import deepspeed

    ranks, rank = dist.get_world_size(), dist.get_rank()
    settings = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }

    def train(compiled: partial[Any]) -> Trained:
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        engine.compile(compiled.keywords["backend"])
        losses = []
        for step in range(STEPS):
            count, total = torch.tensor(counted(step, ranks)), torch.zeros(())
            for m in range(MICRO_BATCHES):
                loss = engine(*batch(step, m, rank), count)
                engine.backward(loss * (ranks * MICRO_BATCHES))
                engine.step()
                total += loss.detach()
            dist.all_reduce(total)
            losses.append(total.item())
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return losses, weights(model)

    with launched(), deepspeed_on_cpus():
        trains_as_stock(train, alone(ranks), [op])


def check_deepspeed() -> None:
    """ZeRO-2: the weights are whole, and parts of one buffer."""
    deepspeed(2, HEAD)


def check_deepspeed_of_shards() -> None:
    """ZeRO-3 gathers a weight in the hooks of its module, which are between graphs."""
    deepspeed(3, "cross_entropy")


#: What a Trainer of Lightning is not to do; nor is it to spread the batches over the ranks.
QUIET = (
    "logger",
    "enable_checkpointing",
    "enable_model_summary",
    "enable_progress_bar",
    "use_distributed_sampler",
)


def check_lightning() -> None:
    """A compiled module in a Trainer with DDP, which accumulates gradients."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    ranks, rank = dist.get_world_size(), dist.get_rank()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = new_model(), []

        def training_step(self, batch: Any, index: int) -> Tensor:
            # Lightning divides by the number of micro-batches, and DDP by that of ranks.
            return self.model(*batch) * (ranks * MICRO_BATCHES)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.losses.append(outputs["loss"].detach() / ranks)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.5)

    def train(compiled: Callable[..., Any]) -> Trained:
        module = Module()
        trainer = Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=DDPStrategy(process_group_backend="gloo"),
            max_epochs=1,
            accumulate_grad_batches=MICRO_BATCHES,
            **dict.fromkeys(QUIET, False),
        )
        data = [
            (*batch(step, m, rank), torch.tensor(counted(step, ranks)))
            for step in range(STEPS)
            for m in range(MICRO_BATCHES)
        ]
        trainer.fit(compiled(module), torch.utils.data.DataLoader(data, batch_size=None))
        totals = torch.stack(module.losses).view(STEPS, MICRO_BATCHES).sum(1)
        dist.all_reduce(totals)
        return totals.tolist(), weights(module.model)

    with launched():
        trains_as_stock(train, alone(ranks))


def check_fabric() -> None:
    """Lightning's loop by hand; it compiles the wrapped model as the model was compiled."""
    from lightning import Fabric
    from lightning.fabric.strategies import DDPStrategy

    ranks = dist.get_world_size()

    def train(compiled: Callable[..., Any]) -> Trained:
        strategy = DDPStrategy(process_group_backend="gloo")
        fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
        fabric.launch()
        model = new_model()
        wrapped = fabric.setup_module(compiled(model))
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.5))
        losses = []
        for step in range(STEPS):
            total = torch.zeros(())
            for m in range(MICRO_BATCHES):
                with fabric.no_backward_sync(wrapped, enabled=m < MICRO_BATCHES - 1):
                    loss = wrapped(*batch(step, m, dist.get_rank()), counted(step, ranks)) * ranks
                    fabric.backward(loss)
                total += loss.detach() / ranks
            optimizer.step()
            optimizer.zero_grad()
            losses.append(fabric.all_reduce(total, reduce_op="sum").item())
        return losses, weights(model)

    with launched():
        trains_as_stock(train, alone(ranks))


def logged(trainer: Any) -> Trained:
    """The losses that a trainer of transformers logs at each step, and the weights after."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return losses, weights(trainer.model)


def trainer_options(folder: str) -> dict[str, Any]:
    """For transformers' trainers; they average over the tokens of all devices by themselves."""
    own = {"output_dir": folder, "use_cpu": True, "ddp_backend": "gloo", "torch_compile": True}
    own |= {"per_device_train_batch_size": SEQUENCES, "max_steps": STEPS, "logging_steps": 1}
    own |= {"gradient_accumulation_steps": MICRO_BATCHES, "learning_rate": 0.01, "bf16": False}
    own |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "max_grad_norm": 0.0}
    return own | {"gradient_checkpointing": False}


def new_llama(classes: int, **tokens: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=classes, **sizes, **heads, **tokens))


def trainer_on(folder: str, is_wrapped: bool = True, **more: Any) -> Trained:
    """What transformers' Trainer logs and trains with ``torch_compile=True``. Of some sequences no
    token of the first half counts.

    Args:
        is_wrapped: whether FSDP2 is to give the head hooks of its own.
        more: options.
    """
    from transformers import Trainer, TrainingArguments

    data = []
    for rank in range(2 * STEPS * MICRO_BATCHES):
        tokens, labels = batch(rank, 0, rank % 4)
        for own, of in zip(tokens, labels, strict=True):
            data.append({"input_ids": own, "labels": of, "position_ids": torch.arange(LENGTH)})
    model = new_llama(CLASSES)
    if not is_wrapped:
        model.get_output_embeddings = lambda: None
    arguments = TrainingArguments(**trainer_options(folder) | more)
    return logged(Trainer(model, arguments, train_dataset=data))


def sft_on(folder: str, **more: Any) -> Trained:
    """What TRL's SFTTrainer logs and trains, with more options."""
    from tests.models.test_trl_trainers import sft

    sys.path.insert(0, str(ROOT / "examples"))
    from text import byte_tokenizer

    tokenizer = byte_tokenizer()
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = new_llama(len(tokenizer), **ends)
    return logged(sft(model, trainer_options(folder) | more, tokenizer))


def check_trainer() -> None:
    by_trainer(trainer_on, HEAD, lazy_logits=True)


def check_sft_trainer() -> None:
    by_trainer(sft_on, None)


def by_trainer(train: Callable[[str], Trained], op: str | None, **options: Any) -> None:
    """Trains with stock's ``torch.compile`` and with ``enable()``.

    Args:
        op: the loss in the compiled graphs, all of which is to be rewritten; None if the head is
            TRL's, a known one.
    """
    switches.counters().clear()
    found = []
    for is_on in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with (
            launched(),
            small_chunks(),
            reported() as report,
            compile_losses.enable(**options) if is_on else nullcontext(),
            tempfile.TemporaryDirectory() as folder,
        ):
            found.append(train(folder))
    stock, ours = found
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
    assert not report.errors, str(report)
    if op is None:
        counted = switches.counters()
        met = counted["known heads"]["trl's ChunkedLogProbFunction"]
        assert met + counted["rewritten"]["linear_row_statistics"] >= 1, counted
    else:
        rewritten = {site.op for site in report.losses if site.status == "rewritten"}
        assert rewritten == {op}, str(report)


# What differs on one rank: nothing hangs, and the numbers are those of one process.


class PlantedError(Exception):
    pass


def fails(*_: Any, **__: Any) -> Any:
    raise PlantedError


#: The functions of the stages.
STAGES = {
    "recognition": (options, "rewrite_graph"),
    "rewriting": (recognize.Rewriting, "run"),
    "plan": (inductor_passes, "plan"),
    "in place": (inductor_passes, "in_place"),
}


class Counting(nn.Module):
    """A model with collectives of its own: a metric's, and that of the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = new_model()

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        total = self.inner(tokens, labels, 1)
        seen = all_reduce(tokens.sum().float(), "sum", dist.group.WORLD)
        return global_mean(total, (labels != -100).sum()), seen


def in_ddp(model: nn.Module, compiled: Callable[..., Any]) -> Any:
    return compiled(DistributedDataParallel(model))


def in_fsdp2(model: nn.Module, compiled: Callable[..., Any]) -> Any:
    for part in (model.inner.up, model.inner.down, model):
        fully_shard(part)
    return compiled(model)


def trains(
    different: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]],
    stage: str = "",
    wrapped: Callable[..., Any] = in_ddp,
) -> None:
    """A step of plain tensors on ranks of which the last one has something of its own.

    Args:
        different: the batch of the last rank, of tokens, labels and the step.
        stage: which stage fails on it; "" for none.
        wrapped: what is called, of a model and ``torch.compile`` with a backend.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    is_last = rank == ranks - 1

    def batches(step: int) -> list[tuple[Tensor, Tensor]]:
        found = [batch(step, 0, r) for r in range(ranks)]
        return [*found[:-1], different(*found[-1], step)]

    def train(step: Callable[..., Any], model: nn.Module, own: Callable[[int], Any]) -> Trained:
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
        for index in range(STEPS):
            loss, seen = step(*own(index))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.item(), float(seen)))
        return losses, weights(model)

    def whole(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return alone(tokens, labels, (labels != -100).sum()), tokens.sum()

    alone = new_model()
    exact = train(whole, alone, lambda i: map(torch.cat, zip(*batches(i), strict=True)))
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, small_chunks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if stage and is_last:
            patch.setattr(*STAGES[stage], fails)
        compiled = partial(torch.compile, backend="compile_losses", options={"strict": False})
        model = Counting()
        step = wrapped(model, compiled)
        found = train(step, model.inner, lambda i: batches(i)[rank])
    same(found, exact)


def unchanged(tokens: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return tokens, labels


def uncounted(tokens: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return tokens, torch.full_like(labels, -100)


def empty(tokens: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return tokens[:0], labels[:0]


def reshaped(tokens: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """The second batch has another shape, and the third one again."""
    rows = (2, 1, 3)[step]
    return torch.cat([tokens, tokens])[:rows], torch.cat([labels, labels])[:rows]


def check_one_rank_fails_to_recognise() -> None:
    trains(unchanged, "recognition")


def check_one_rank_fails_to_plan() -> None:
    """Its collectives come in the same order as those of the ranks that have a plan."""
    trains(unchanged, "plan")


def check_one_rank_fails_in_place() -> None:
    trains(unchanged, "in place")


def check_one_rank_counts_nothing() -> None:
    trains(uncounted)


def check_one_rank_has_an_empty_batch() -> None:
    trains(empty)


def check_one_rank_recompiles() -> None:
    trains(reshaped)


def check_one_rank_of_fsdp2_fails() -> None:
    """FSDP2's own collectives are between the graphs, whatever a rank made of them."""
    for stage in STAGES:
        trains(unchanged, stage, in_fsdp2)


def check_one_rank_of_fsdp2_has_another_batch() -> None:
    for different in (uncounted, empty, reshaped):
        trains(different, wrapped=in_fsdp2)


def with_dtensors(
    stage: str, told: str = "", after: Callable[[], None] | None = None, data: int = 1
) -> None:
    """Steps with the head's classes sharded on ranks of which the last one differs.

    Args:
        stage: which stage fails on it; "" for none.
        told: what all ranks are warned of.
        after: is called on it after the first micro-batch.
        data: with FSDP2 over so many ranks.
    """
    torch._dynamo.reset()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    left = [after] if after is not None and is_last else []

    def called(step: Any) -> Any:
        def call(*given: Any) -> Tensor:
            loss = step(*given)
            while left:
                left.pop()()
            return loss

        return call

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        compiled = partial(torch.compile, backend="compile_losses", options={"strict": False})
        patch.setattr(guard, "_warned", set())
        if stage and is_last:
            patch.setattr(*STAGES[stage], fails)
        with small_chunks():
            found = in_parallel(compiled, data, called=called)
    same(found, alone(data))
    messages = [str(each.message) for each in warned]
    assert not told or any(told in each for each in messages), messages


def check_one_rank_of_a_mesh_fails() -> None:
    """All ranks leave the loss to torch, whose collectives are others."""
    with_dtensors("recognition", "PlantedError")


def check_one_rank_of_a_mesh_fails_later() -> None:
    with_dtensors("rewriting", "PlantedError")


def check_one_rank_of_a_mesh_has_no_plan() -> None:
    """The ops send the same numbers with and without one."""
    for stage in ("plan", "in place"):
        with_dtensors(stage)


def check_one_rank_of_a_mesh_recompiles() -> None:
    """It makes the same of the graph as before, without a word of the others, which wait for its
    part of the loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "PATIENCE", timedelta(seconds=1))
        with_dtensors("", after=torch._dynamo.reset)


def check_one_rank_of_two_dimensions_fails() -> None:
    """Those that share the classes leave the loss to torch, and the others do not."""
    with_dtensors("rewriting", data=2)


def check_one_part_of_two_dimensions_counts_nothing() -> None:
    """The ranks that share the last batch. It is not empty: with any backend torch.compile of torch
    2.13 never ends where it flattens an empty DTensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "batch", batch_of_first)
        with_dtensors("", data=2)


def batch_of_first(step: int, micro_batch: int, rank: int, given: Any = batch) -> Any:
    """As batch, but that the other ranks count no tokens."""
    tokens, labels = given(step, micro_batch, rank)
    return uncounted(tokens, labels, step) if rank else (tokens, labels)


CHECKS = checks_in(globals())
