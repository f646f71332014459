"""A graph of AOTAutograd's, with what several passes ask of it and what they decide."""

from __future__ import annotations

from torch.fx import Graph, Node

from compile_losses.graphs import Indexed
from compile_losses.lower.decision import Decision
from compile_losses.lower.fused_calls import Call, Loss, find_calls, find_losses
from compile_losses.lower.node_relations import depends_on_tangents, graph_outputs
from compile_losses.request import Request


class AtenGraph(Indexed):
    """A joint graph, that of an inference, or that of a forward or a backward alone.

    Attributes:
        request: what is asked of the passes.
        decisions: of the passes so far.
    """

    def __init__(self, graph: Graph, request: Request) -> None:
        super().__init__(graph)
        self.request = request
        self.decisions: list[Decision] = []

    @property
    def calls(self) -> list[Call]:
        """The calls of fused ops, in the graph's order."""
        return self.ask(find_calls)

    @property
    def losses(self) -> list[Loss]:
        """The losses that are not composed of others, each with its gradients."""
        return self.ask(find_losses)

    @property
    def backward(self) -> set[Node]:
        """The nodes that depend on tangents; the output is among them, if one is returned."""
        return self.ask(depends_on_tangents)

    @property
    def outputs(self) -> list[Node]:
        """The nodes that the graph returns."""
        return self.ask(graph_outputs)

    @property
    def forward_outputs(self) -> list[Node]:
        """Those that its forward returns."""
        backward = self.backward
        return [node for node in self.outputs if node not in backward]
