"""A small GPT on a mesh: tensor parallel along one dimension, data parallel along the other.

The head's weight is sharded along the vocabulary, and its logits stay so: the loss is computed from
them with one small collective. Run it with ``torchrun``, on processors or on GPUs::

    torchrun --nproc-per-node 4 examples/tensor_parallel.py --tensor 2
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import VOCABULARY, batches
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from compile_losses.distributed.data_parallel import global_mean

HEAD = 16  # features of an attention head


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        x = self.norm1(h)
        # A rank's own attention heads.
        q, k, v = (
            f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(attended.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class GPT(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, length: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        h = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def parallelize(model: GPT, mesh: DeviceMesh) -> GPT:
    """Each block's matrices by columns and then by rows, the head by its vocabulary; then FSDP."""
    columns = ("query", "key", "value", "up")
    plan = {name: ColwiseParallel() for name in columns} | {
        name: RowwiseParallel() for name in ("out", "down")
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    # Logits that are a DTensor, Shard(-1): nothing gathers them.
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tensor"], {"head": head})
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def main(steps: int = 200, tensor: int = 2) -> list[float]:
    """Trains on the ranks that there are, and returns the loss of every step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    ranks = dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, (ranks // tensor, tensor), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)  # the same initial weights on every rank
    model = parallelize(GPT().to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        """The mean over the tokens of all ranks."""
        shared = DTensor.from_local(targets.flatten(), mesh["tensor"], [Replicate()])
        total = F.cross_entropy(logits.flatten(0, 1), shared, reduction="sum").full_tensor()
        return global_mean(total, targets.numel(), mesh["data"])

    loss_of = torch.compile(loss_of, backend="compile_losses")  # the added line
    losses = []
    for tokens in batches(steps, batch=16, length=129):
        # Ranks that share a model's shards share its data; the others have a part each.
        mine = tokens.tensor_split(ranks // tensor)[mesh["data"].get_local_rank()].to(device)
        loss = loss_of(model(mine[:, :-1]), mine[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0 and len(losses) % 20 == 1:
            print(f"step {len(losses):4}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share a layer (2)")
    main(**vars(parser.parse_args()))
    dist.destroy_process_group()
