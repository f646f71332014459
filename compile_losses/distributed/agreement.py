"""The ranks of a mesh agree on whether the losses of a graph are rewritten.

A rewritten loss of DTensors sends other numbers than torch's own. If one rank left such a loss to
torch, as after a failure inside this package, and the others did not, their collectives would not
match: they would wait for each other forever, or take the numbers of one for those of the other. So
each rank tells the others through the store of the process group what it has made of the graph, and
all of them leave the graph to torch if they differ. Losses of plain tensors need none of this:
passes neither add collectives to a graph nor change their order.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from compile_losses.distributed import are_dtensors
from compile_losses.graphs import value_of
from compile_losses.torch_internals.dtensors import default_store

_log = logging.getLogger(__name__)
#: How long a rank waits for what the others have made of a graph. All ranks compile a graph of
#: DTensors at the same step; one that compiles for itself alone goes on after that time.
PATIENCE = timedelta(seconds=120)
#: How often graphs of a text were compiled.
_compiled: Counter[str] = Counter()


class Agreement:
    """What the ranks that compile a graph have made of it.

    Args:
        ranks: those of the meshes in the graph.
        name: of the graph, the same on all of these ranks.
    """

    def __init__(self, ranks: list[int], name: str) -> None:
        self.ranks, self.name = ranks, name
        self.is_heard = True

    def difference(self, stage: str, outcome: str) -> str | None:
        """Tells the others an outcome, and waits for theirs.

        Args:
            stage: the outcomes of one stage are compared.

        Returns:
            What is different, the same on all ranks; None if nothing is, or if a rank is silent.
            After that nobody waits for it at a later stage.
        """
        if not self.is_heard:
            return None
        store: Any = default_store()
        keys = {rank: f"compile_losses/{self.name}/{stage}/{rank}" for rank in self.ranks}
        store.set(keys[dist.get_rank()], outcome)
        try:
            store.wait(list(keys.values()), PATIENCE)
        except RuntimeError:
            self.is_heard = False
            _log.warning("no word from all of the ranks %s about a graph", self.ranks)
            return None
        found = {rank: store.get(key).decode() for rank, key in keys.items()}
        if len(set(found.values())) == 1:
            return None
        told = "; ".join(f"rank {rank}: {text or 'nothing'}" for rank, text in found.items())
        return f"the ranks differ in what they made of its graph: {told}"


def agreement_on(gm: GraphModule) -> Agreement | None:
    """For a Dynamo graph that has DTensors; None where no other rank has a part of them."""
    values = [value_of(node) for node in gm.graph.nodes]
    meshes = [value.device_mesh for value in values if are_dtensors(value)]
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    ranks = sorted({int(rank) for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    if len(ranks) == 1 or dist.get_rank() not in ranks:
        return None
    text = f"{ranks} {gm.graph}"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    _compiled[name] += 1
    return Agreement(ranks, f"{name}.{_compiled[name]}")
