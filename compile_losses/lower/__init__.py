"""From fused ops in AOTAutograd's graphs to fewer passes over memory.

``plan`` works on the joint graph (or that of inference), ``in_place`` on the forward and backward
graphs that it is cut into. ``lower_or_leave`` runs either, and undoes it where it fails.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph

from compile_losses.guard import Failure, Snapshot, attempt
from compile_losses.library import is_declared
from compile_losses.lower.dead_buffers import donated_buffers
from compile_losses.lower.decision import Decision, log
from compile_losses.lower.elementwise import scalar_tangents
from compile_losses.lower.fused_calls import PARTS
from compile_losses.lower.in_place import in_place
from compile_losses.lower.plan import plan
from compile_losses.sites import site_of
from compile_losses.torch_internals.ops import OpOverload, schema_of

__all__ = ["Decision", "donated_buffers", "in_place", "lower_or_leave", "plan"]


def lower_or_leave(
    lower: Callable[[Graph], list[Decision]], graph: Graph, *, strict: bool | None = None
) -> list[Decision]:
    """What a pass decides about a graph; where it fails, the graph is as it was.

    The ops of the losses have kernels and gradients of their own: such a graph is right, if slower.
    A graph with neither such ops nor the tangent of one number holds nothing to be lowered.
    """
    calls = [
        (node, node.target)
        for node in graph.nodes
        if isinstance(node.target, OpOverload) and is_declared(node.target)
    ]
    snapshots: list[Snapshot] = []

    def lowered() -> list[Decision]:
        if not calls and not scalar_tangents(graph):
            return []
        snapshots.append(Snapshot(graph))
        decisions = lower(graph)
        snapshots[0].check()
        return decisions

    found = attempt(lowered, strict=strict)
    if not isinstance(found, Failure):
        for decision in found:
            log.debug("%s", decision)
        return found
    for snapshot in snapshots:
        snapshot.restore()
    decisions = []
    if not calls:
        decisions.append(Decision(None, "elementwise", "gradient in backward", found.reason))
    for node, target in calls:
        loss, _, part = schema_of(target).name.removeprefix("fused::").rpartition("_")
        if part in PARTS and part != "backward":
            site = attempt(lambda: site_of(node), strict=False)  # noqa: B023
            number = None if isinstance(site, Failure) else site
            decisions.append(Decision(number, loss, "kernel", found.reason))
    return decisions
