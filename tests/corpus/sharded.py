"""Losses of DTensors, on one of the ranks of a group that communicates with nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.corpus.program import Program

WORLD, ROWS, CLASSES, HIDDEN = 4, 8, 12, 6


@contextmanager
def group() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sharded(dims, *shapes):
    """Tensors that are sharded along a dimension each, or replicated; class indices of one."""

    def make():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh, tensors = init_device_mesh("cpu", (WORLD,)), []
        for dim, shape in zip(dims, shapes, strict=True):
            whole = torch.randint(CLASSES, shape) if len(shape) == 1 else torch.randn(shape)
            placement = Replicate() if dim is None else Shard(dim)
            tensor = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
            tensors.append(tensor.requires_grad_(whole.is_floating_point()))
        return tensors

    return make


LOGITS, LABELS = (ROWS, CLASSES), (ROWS,)
LAYER = ((ROWS, HIDDEN), (CLASSES, HIDDEN), LABELS)

PROGRAMS = [
    Program(f"sharded: {name}", function, make, group)
    for name, (function, make) in {
        "classes": (F.cross_entropy, _sharded((1, None), LOGITS, LABELS)),
        "rows": (F.cross_entropy, _sharded((0, 0), LOGITS, LABELS)),
        "elements": (F.mse_loss, _sharded((0, 0), LOGITS, LOGITS)),
        "written out": (
            lambda x, t: -x.log_softmax(1).gather(1, t.unsqueeze(1)).mean(),
            _sharded((0, 0), LOGITS, LABELS),
        ),
        "a layer": (
            lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t),
            _sharded((None, 0, None), *LAYER),
        ),
        "rows of a layer": (
            lambda h, w, t: F.cross_entropy(F.linear(h, w), t),
            _sharded((0, None, 0), *LAYER),
        ),
    }.items()
] if dist.is_available() else []  # fmt: skip
