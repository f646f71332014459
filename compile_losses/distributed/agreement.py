"""The ranks of a mesh agree on whether the losses of a graph are rewritten.

A rewritten loss of DTensors sends other numbers than torch's own. If one rank left such a loss to
torch, as after a failure inside this package, and the others did not, their collectives would not
match: they would wait for each other forever, or take the numbers of one for those of the other. So
each rank tells the others through the store of the process group what it has made of the graph, and
all of them leave the graph to torch if they differ. Losses of plain tensors need none of this:
passes neither add collectives to a graph nor change their order.

A rank may compile a graph for itself alone, where its guards fail and those of the others do not.
The others run what they agreed on before. So that rank does the same again, or raises an error.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from dataclasses import dataclass, field
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


@dataclass
class Past:
    """What became of the graphs of one text so far.

    Attributes:
        compiled: how often this rank has compiled one together with the others.
        outcomes: those of the last time, by the stage.
        left: why all ranks left it to torch the last time; None if they did not.
    """

    compiled: int = 0
    outcomes: dict[str, str] = field(default_factory=dict)
    left: str | None = None

    def begin(self) -> None:
        """All ranks compile such a graph once more."""
        self.compiled += 1
        self.outcomes.clear()
        self.left = None


_pasts: defaultdict[str, Past] = defaultdict(Past)


class Agreement:
    """What the ranks that compile a graph have made of it.

    Args:
        ranks: those of the meshes in the graph.
        name: of the graph's text, the same on all of these ranks.
        past: of graphs of this text.

    Attributes:
        is_heard: whether all ranks told what they made of the graph; None before they are asked.
    """

    def __init__(self, ranks: list[int], name: str, past: Past) -> None:
        self.ranks, self.past = ranks, past
        self.name = f"{name}.{past.compiled}"
        self.is_heard: bool | None = None

    def difference(self, stage: str, outcome: str, *, fails: bool = False) -> str | None:
        """Tells the others an outcome, and waits for theirs.

        Args:
            stage: the outcomes of one stage are compared.
            fails: whether this rank leaves the graph to torch.

        Returns:
            What is different, the same on all ranks; None if nothing is. If a rank is silent, why
            all ranks left such a graph to torch before; None if they did not. After that nobody
            waits for it at a later stage.
        """
        if self.is_heard is False:
            return None
        store: Any = default_store()
        keys = {rank: f"compile_losses/{self.name}/{stage}/{rank}" for rank in self.ranks}
        own = keys[dist.get_rank()]
        store.set(own, outcome)
        try:
            store.wait(list(keys.values()), PATIENCE)
        except RuntimeError:
            # The next time that all ranks compile it is the next one for all of them.
            store.delete_key(own)
            self.is_heard = False
            _log.warning("no word from all of the ranks %s about a graph", self.ranks)
            return self.past.left
        if self.is_heard is None:
            self.past.begin()
        self.is_heard = True
        found = {rank: store.get(key).decode() for rank, key in keys.items()}
        difference = None
        if len(set(found.values())) > 1:
            told = "; ".join(f"rank {rank}: {text or 'nothing'}" for rank, text in found.items())
            difference = f"the ranks differ in what they made of its graph: {told}"
        self.past.outcomes[stage] = outcome
        if fails or difference is not None:
            self.past.left = difference or outcome
        return difference

    def conflict(self, stage: str, outcome: str) -> str | None:
        """Why a graph can't be run that this rank has compiled alone: the others run what they made
        of it before, whose collectives are others. None if they are the same."""
        before = self.past.outcomes.get(stage, outcome)
        if self.is_heard is not False or self.past.left is not None or before == outcome:
            return None
        made, others = (text or "nothing" for text in (outcome, before))
        return (
            f"rank {dist.get_rank()} compiled a graph of DTensors again, alone among the ranks "
            f"{self.ranks}, and made of it: {made}; the others still run: {others}. Their "
            "collectives would not match. COMPILE_LOSSES=0 in the environment of all ranks leaves "
            "the losses to torch"
        )


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
    return Agreement(ranks, name, _pasts[name])
