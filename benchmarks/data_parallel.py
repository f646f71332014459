"""A Llama of transformers with DDP and accelerate's FSDP2, for ``python -m benchmarks trainers``.

The unmodified model returns its loss and its logits, and is compiled as a whole. Each rank has
batches of its own of as many tokens.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks import titan
from benchmarks.contenders import UnavailableError

LIBRARY = "transformers"
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Size(titan.Size):
    """By default those of 1B; the batches are a rank's."""

    width: int = 2048
    batch: int = 4
    length: int = 2048


@dataclass(frozen=True)
class Way:
    """A way to train on ranks.

    Attributes:
        wrap: of a compiled model's parameters: "ddp", or "accelerate".
        static_graph: DDP's.
        micro_batches: of a step; all but the last without synchronisation.
    """

    wrap: str = "ddp"
    static_graph: bool = False
    micro_batches: int = 1
    size: dict[str, int] = field(default_factory=dict)
    contenders: tuple[str, ...] = ("stock", "ours")
    dtype: str = "bfloat16"


WAYS = {
    "ddp": Way(),
    "ddp_static_graph": Way(static_graph=True),
    "ddp_no_sync": Way(micro_batches=4),
    "accelerate_fsdp2": Way("accelerate", dtype="float32"),
}
#: How each compiles.
CONTENDERS: dict[str, dict[str, Any]] = {
    "stock": {},
    "ours": {"backend": "compile_losses", "options": {"lazy_logits": True}},
}


def causal_lm(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.classes,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.groups,
        max_position_embeddings=size.length,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


class Run:
    """One contender's model, optimizer and batches."""

    def __init__(self, way: str, name: str, size: Size, device: torch.device) -> None:
        self.way, self.device = WAYS[way], device
        self.tokens = size.batch * size.length * self.way.micro_batches * dist.get_world_size()
        torch.manual_seed(0)
        with torch.device(device):
            model = causal_lm(size).to(getattr(torch, self.way.dtype))
        options = CONTENDERS[name]
        if self.way.wrap == "accelerate":
            self._prepare(model, options)
        else:
            ids = [device.index] if device.type == "cuda" else None
            static = self.way.static_graph
            self.wrapped: Any = DistributedDataParallel(model, ids, static_graph=static)
            self.call: Any = torch.compile(self.wrapped, **options)
            self.optimizer: Any = self._adam(model)
        self.batches = titan.stretches(size, dist.get_rank())

    def _adam(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)

    def _prepare(self, model: nn.Module, options: dict[str, Any]) -> None:
        """As docs/distributed.md writes it: compiled before ``prepare``."""
        if self.device.type == "cpu":
            raise UnavailableError("accelerate's FSDP2 is for GPUs")
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
        compiled = torch.compile(model, **options)
        self.call, self.optimizer = accelerator.prepare(compiled, self._adam(model))
        self.wrapped = self.call
        if not all(isinstance(weight, DTensor) for weight in self.call.parameters()):
            raise RuntimeError("accelerate did not shard the model")

    def step(self, *, record: bool = False) -> float | None:
        """A step of training; the mean loss of all ranks if it is asked for."""
        total: Tensor | float = 0.0
        for index in range(self.way.micro_batches):
            tokens = next(self.batches)[:, :-1].to(self.device)
            waits = index < self.way.micro_batches - 1
            with self.wrapped.no_sync() if waits else nullcontext():
                loss = self.call(input_ids=tokens, labels=tokens).loss / self.way.micro_batches
                loss.backward()
            total = total + loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not record:
            return None
        assert isinstance(total, Tensor)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def clear(self) -> None:
        self.optimizer.zero_grad()
