"""torchtitan's llama3 in torchtitan's own Trainer, as ``python -m benchmarks trainers`` runs it.

Only what torchtitan lets a user choose is chosen: its configuration, and a train spec with sizes, a
loss, a data loader and a recorder of losses. Its model, its ways to spread it over ranks, its
compilation of blocks and loss and its optimizer are unmodified. torchtitan 0.2.2 is the newest that
runs on torch 2.11: 0.3.0 imports names and calls pipelines with arguments of a later torch. Its
chunked loss is then taken from a copy of 0.3.0 with another name, see :data:`NEWER`::

    pip install --target site --no-deps torchtitan==0.3.0
    mv site/torchtitan site/torchtitan_newer
    grep -rl torchtitan site/torchtitan_newer | xargs sed -i 's/\\btorchtitan\\b/torchtitan_newer/g'
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.contenders import UnavailableError
from compile_losses.demo.data import BYTES, text, windows

#: A copy of torchtitan 0.3.0, which has a chunked loss, under another name than 0.2.2's.
NEWER = "torchtitan_newer"
CHUNKS = 8
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Size:
    """Sizes of a Llama and its batches; by default 8B's, with few layers. ``batch`` and ``length``
    are those of one data-parallel part."""

    layers: int = 4
    width: int = 4096
    heads: int = 32
    groups: int = 8
    classes: int = 128_256
    batch: int = 1
    length: int = 8192

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}x{self.width}x{self.classes}, {self.layers} layers"


@dataclass(frozen=True)
class Way:
    """A way to spread a training over ranks.

    Attributes:
        parallelism: torchtitan's configuration of that name; "ranks" stands for their number.
        size: of the batch, by its fields, as changes of 8B's sizes.
        dtype: of the weights. Without FSDP2 torchtitan has no mixed precision.
        contenders: see :data:`CONTENDERS`.
        data: whether each rank has a batch of its own.
    """

    parallelism: dict[str, Any]
    size: dict[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    contenders: tuple[str, ...] = ("stock", "ours", "ours_head")
    data: bool = False


_PIPELINE: dict[str, Any] = {"pipeline_parallel_degree": "ranks"}
_MICRO_BATCHES = {"batch": 4, "length": 4096}
WAYS = {
    "fsdp2": Way(
        {}, contenders=("stock", "ours", "ours_head", "ours_sharded", "chunked"), data=True
    ),
    "tensor_parallel": Way(
        {"data_parallel_shard_degree": 1, "tensor_parallel_degree": "ranks"}, dtype="bfloat16"
    ),
    "context_parallel": Way(
        {"data_parallel_shard_degree": 1, "context_parallel_degree": "ranks"},
        {"length": 16_384},
        contenders=("stock", "ours", "ours_head", "chunked"),
    ),
    "pipeline_1f1b": Way(
        {**_PIPELINE, "data_parallel_shard_degree": 1, "pipeline_parallel_schedule": "1F1B"},
        _MICRO_BATCHES,
        dtype="bfloat16",
    ),
    "pipeline_gpipe": Way(
        {**_PIPELINE, "data_parallel_shard_degree": 1, "pipeline_parallel_schedule": "GPipe"},
        _MICRO_BATCHES,
        dtype="bfloat16",
    ),
}


class Recorder:
    """What torchtitan's Trainer tells its metrics processor: here the losses alone are kept."""

    def __init__(self, *_: Any) -> None:
        self.losses: list[float] = []
        self.wanted = True
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.device_memory_monitor = SimpleNamespace(
            device_name="", get_peak_stats=lambda: SimpleNamespace(
                max_reserved_gib=0.0, max_reserved_pct=0.0
            )
        )  # fmt: skip
        self.color = SimpleNamespace(blue="", red="", yellow="", reset="")

    def should_log(self, step: int) -> bool:
        return self.wanted

    def log(self, step: int, loss: float, *_: Any, **__: Any) -> None:
        self.losses.append(loss)


def stretches(size: Any, part: int) -> Iterator[Tensor]:
    """Batches of real text, two bytes a token, the same for every contender: [batch, length + 1].

    Args:
        size: has ``batch``, ``length`` and ``classes``.
        part: which of the batches that ranks read at a time.
    """
    source, generator = text(), Generator().manual_seed(1 + part)
    pairs = (source[:-1] * BYTES + source[1:]) % size.classes
    while True:
        yield windows(pairs, size.length + 1, size.batch, generator)


class Pages:
    """A data loader of such batches."""

    def __init__(self, size: Size, part: int) -> None:
        self.size, self.part = size, part

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for drawn in stretches(self.size, self.part):
            yield {"input": drawn[:, :-1].contiguous()}, drawn[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Apart(nn.Module):
    """In place of the head, which its loss calls: the model returns hidden states."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    @property
    def weight(self) -> Any:
        return self.head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class OfHead:
    """The head and cross entropy in one graph: what a user writes who wants no logits.

    ``take`` makes the model return hidden states. FSDP2 gathers the weight in hooks around the call
    of the head, which then returns its loss.
    """

    def __init__(self, loss: Callable[..., Tensor], backend: str) -> None:
        self.loss, self.backend = loss, backend
        self.call: Callable[..., Tensor] | None = None

    def take(self, model: Any) -> None:
        head, model.output = model.output, Apart(model.output)
        if isinstance(head, FSDPModule):

            def of(hidden: Tensor, labels: Tensor) -> Tensor:
                return self.loss(F.linear(hidden, head.weight), labels)

            head.forward = torch.compile(of, backend=self.backend)
            self.call = head
        else:

            def with_head(hidden: Tensor, labels: Tensor) -> Tensor:
                return self.loss(head(hidden), labels)

            self.call = torch.compile(with_head, backend=self.backend)

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        assert self.call is not None
        return self.call(hidden, labels)


class Chunked:
    """torchtitan's loss in chunks of a sequence, each with its part of the head.

    It divides by the count of tokens itself, because its backward ignores the gradient of its loss.
    """

    def __init__(self, tokens: int) -> None:
        kind, config = newer_loss()
        self.loss = kind.Config(num_chunks=CHUNKS).build(compile_config=config)
        self.tokens = tokens

    def parallelized(self, parallelize: Callable[..., Any]) -> Callable[..., Any]:
        """torchtitan's function that spreads a model, with FSDP2 of the head by itself.

        The loss reshards the head's group of weights. In torch 2.11 the norm, which torchtitan puts
        in that group, would not be gathered again for its backward.
        """

        def spread(model: Any, dims: Any, config: Any) -> Any:
            head, model.output = model.output, None
            model = parallelize(model, dims, config)
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            fully_shard(head, mesh=dims.get_mesh(["fsdp"]), mp_policy=policy)
            head.set_gradient_divide_factor(1.0)
            model.output = Apart(head)
            self.loss.set_lm_head(head)
            return model

        return spread

    def take(self, model: Any) -> None:
        """The loss has the head already."""

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        loss, _ = self.loss(hidden, labels, self.tokens)
        return loss * self.tokens


class Sharded:
    """The head's weight sharded by classes over FSDP2's mesh, and never gathered: the loss is that
    of all ranks' rows, whose hidden states its op gathers."""

    def __init__(self, backend: str) -> None:
        def loss(hidden: Any, weight: Any, labels: Any) -> Tensor:
            logits = F.linear(hidden, weight.to(hidden.dtype)).float()
            return F.cross_entropy(logits, labels, reduction="sum")

        self.loss = torch.compile(loss, backend=backend)
        self.mesh: Any = None
        self.head: Any = None

    def parallelized(self, parallelize: Callable[..., Any]) -> Callable[..., Any]:
        """torchtitan's function that spreads a model, which then does not see the head."""

        def spread(model: Any, dims: Any, config: Any) -> Any:
            head, model.output = model.output, None
            model = parallelize(model, dims, config)
            self.head, self.mesh = head, dims.get_mesh(["fsdp"])
            weight = distribute_tensor(head.weight, self.mesh, [Shard(0)], src_data_rank=None)
            head.weight = nn.Parameter(weight)
            model.output = Apart(head)
            return model

        return spread

    def take(self, model: Any) -> None:
        """The loss has the head already."""

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        rows = [
            DTensor.from_local(own.flatten(0, 1), self.mesh, [Shard(0)]) for own in (hidden, labels)
        ]
        total: Any = self.loss(rows[0], self.head.weight, rows[1])
        total = total.full_tensor()
        # The ranks' losses are summed afterwards, and their gradients are those of the whole.
        return total + total.detach() * (1 / self.mesh.size() - 1)


def newer_loss() -> tuple[Any, Any]:
    """The chunked loss and its configuration of compilation.

    Raises:
        UnavailableError: there is none.
    """
    try:
        config = import_module(f"{NEWER}.config").CompileConfig(enable=True)
        return import_module(f"{NEWER}.components.loss").ChunkedLossWrapper, config
    except ImportError as error:
        raise UnavailableError(f"no torchtitan 0.3.0 under the name {NEWER}") from error


#: How each compiles: the backend of blocks and loss, and of the head with its loss.
CONTENDERS: dict[str, tuple[str, str]] = {
    "stock": ("inductor", ""),
    "ours": ("compile_losses", ""),
    "ours_head": ("compile_losses", "compile_losses"),
    "ours_sharded": ("compile_losses", "compile_losses"),
    "stock_head": ("inductor", "inductor"),
    "chunked": ("inductor", "chunked"),
}
LIBRARY = "torchtitan"


class _Absent(ModuleType):
    """A package that torchtitan imports for data sets, none of which is read here."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def prepare(device: torch.device) -> None:
    """Makes torchtitan importable without its data sets, and its device this one."""
    if "datasets" not in sys.modules and find_spec("datasets") is None:
        for name in ("datasets", "datasets.distributed"):
            sys.modules[name] = _Absent(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)
    # It asks torch when it is imported, and takes a CUDA device where torch knows none.
    ask = torch._utils._get_available_device_type
    torch._utils._get_available_device_type = lambda: device.type
    try:
        import torchtitan.train  # noqa: F401
    finally:
        torch._utils._get_available_device_type = ask


class Run:
    """One contender's Trainer.

    Attributes:
        tokens: of a step, of all ranks.
    """

    def __init__(self, way: str, name: str, size: Size, device: torch.device) -> None:
        self.way, (backend, self.head) = WAYS[way], CONTENDERS[name]
        ranks = dist.get_world_size()
        self.tokens = size.batch * size.length * (ranks if self.way.data else 1)
        prepare(device)
        from torchtitan.components.loss import cross_entropy_loss
        from torchtitan.models.llama3 import get_train_spec, llama3_args
        from torchtitan.protocols import train_spec
        from torchtitan.train import Trainer

        config = self._config(backend, size, ranks)
        args = llama3_args["8B"]
        args = replace(
            args, n_layers=size.layers, dim=size.width, n_heads=size.heads,
            n_kv_heads=size.groups, vocab_size=size.classes, max_seq_len=size.length,
        )  # fmt: skip
        spec = get_train_spec()
        spec.model_args = {"8B": args}
        spec.build_tokenizer_fn = None
        spec.build_dataloader_fn = lambda dp_rank, **_: Pages(size, dp_rank)
        spec.build_metrics_processor_fn = Recorder
        last = (
            dist.get_rank() == ranks - 1 or "pipeline_parallel_degree" not in self.way.parallelism
        )
        loss: Any = None
        if self.head == "chunked":
            loss = Chunked(self.tokens)
        elif name.endswith("_sharded"):
            loss = Sharded(self.head)
        elif self.head:
            loss = OfHead(cross_entropy_loss, self.head)
        if isinstance(loss, Chunked | Sharded):
            spec.parallelize_fn = loss.parallelized(spec.parallelize_fn)
        if loss is not None:
            spec.build_loss_fn = lambda *_, **__: loss
        train_spec._extra_train_specs["llama3"] = spec
        self.trainer = Trainer(config)
        if loss is not None and last:
            loss.take(self.trainer.model_parts[-1])
        if device.type == "cpu":  # gloo has no average
            for part in self.trainer.model_parts:
                for module in part.modules():
                    if isinstance(module, FSDPModule):
                        module.set_force_sum_reduction_for_comms(True)
        self.batches = self.trainer.batch_generator(self.trainer.dataloader)

    def _config(self, backend: str, size: Size, ranks: int) -> Any:
        from torchtitan.config import JobConfig

        config = JobConfig()
        config.job.dump_folder = tempfile.gettempdir()
        config.model.flavor = "8B"
        config.training.local_batch_size = size.batch
        config.training.seq_len = size.length
        config.training.dtype = self.way.dtype
        config.optimizer.lr = LEARNING_RATE
        config.lr_scheduler.warmup_steps = 2
        config.activation_checkpoint.mode = "none"
        config.compile.enable = True
        config.compile.backend = backend
        config.comm.trace_buf_size = 0
        config.debug.seed = 0
        for key, value in self.way.parallelism.items():
            setattr(config.parallelism, key, ranks if value == "ranks" else value)
        return config

    def step(self, *, record: bool = False) -> float | None:
        """A step of training; the loss over all ranks' tokens if it is asked for, on those ranks
        that know it."""
        recorder = self.trainer.metrics_processor
        recorder.wanted = record
        self.trainer.step += 1
        self.trainer.train_step(self.batches)
        return recorder.losses[-1] if record else None

    def clear(self) -> None:
        """Leaves nothing between steps but weights and the optimizer's state."""
        self.trainer.optimizers.zero_grad()
