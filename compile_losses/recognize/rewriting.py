"""The passes on the graph that Dynamo captured, and on the graphs inside it."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

from torch.fx import Graph, Node

from compile_losses.graphs import Indexed
from compile_losses.guard import Failure, attempt
from compile_losses.passes import REWRITE
from compile_losses.pipeline import Pipeline
from compile_losses.recognize.graph.memory import bodies, look_at
from compile_losses.recognize.graph.taken_apart import read_parts
from compile_losses.recognize.guards import better_left_to_torch, refusal
from compile_losses.recognize.heads.columns_apart import are_gone, read_columns_apart
from compile_losses.recognize.heads.known_heads import known_heads
from compile_losses.recognize.heads.linear_divergence import take_divergence
from compile_losses.recognize.heads.plain_logits import take_plain_logits
from compile_losses.recognize.heads.shared_logits import Kept, Rewritten, take_shared_logits
from compile_losses.recognize.heads.two_way import join_directions
from compile_losses.recognize.heads.with_head import (
    HELD,
    Take,
    take_cross_entropy,
    through_linear,
)
from compile_losses.recognize.match import Decline, Match
from compile_losses.recognize.returned_logits import Lazily, add_logits_without_loss
from compile_losses.recognize.spellings.table import bind
from compile_losses.recognize.spellings.written_out import Recognizer
from compile_losses.recognize.steps import Steps
from compile_losses.recognize.verify import verify as compare
from compile_losses.request import Request
from compile_losses.sites import Site, left_out, mark, site_of, source_of
from compile_losses.torch_internals.ops import HigherOrderOperator

#: Higher-order ops whose body AOTAutograd traces in their place, and differentiates with the rest.
_TRACED_IN_PLACE = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
#: Why a loss inside a higher-order op is left alone, for ops with a reason of their own.
_INSIDE = {
    "autograd_function_apply": "inside an autograd.Function, which has a gradient of its own",
}

_LINEAR = "linear_cross_entropy"
_CROSS_ENTROPY = "cross_entropy"
#: How losses are taken through the linear layer of their logits, each ``X`` to ``linear_X``.
_THROUGH_LINEAR: dict[str, Take] = {
    "cross_entropy": take_cross_entropy,
    "softmax_js_div": take_divergence,
    "softmax_kl_div": take_divergence,
}
#: The steps on whole graphs, as the report names them if one failed.
_TAKEN_APART = "tensors that are put together and taken apart again"
_COLUMNS = "products that are read by rows and by columns"
_BOTH_WAYS = "products of which there are losses by rows and by columns"
_SHARED = "heads whose logits several losses read"
_PLAIN = "logits of which an entropy is read"
_LAZY = "logits that are returned without a loss"
_KNOWN = "heads of other libraries"
_NOT_CHOSEN = "it is not among the losses that options name"


class DynamoGraph(Indexed):
    """A graph that Dynamo captured, with what several passes ask of it.

    Attributes:
        rewriting: of this graph and the graphs around it.
        request: what is asked for this graph.
        is_outermost: whether it is not that of a higher-order op.
        inside: why no loss of it may be rewritten.
    """

    def __init__(
        self,
        graph: Graph,
        rewriting: Rewriting,
        request: Request,
        outer: Graph | None,
        inside: str | None,
    ) -> None:
        super().__init__(graph)
        self.rewriting, self.request = rewriting, request
        self.is_outermost, self.inside = outer is None, inside

    @property
    def recognizer(self) -> Recognizer:
        """Knows the graph as it is: losses that have become ops, too."""
        return self.ask(Recognizer)


class Rewriting:
    """One graph and the graphs inside it. Sites are collected from the end."""

    def __init__(self, steps: Steps, request: Request) -> None:
        self.steps = steps
        self.request = request
        self.sites: list[Site] = []
        self.seen: set[Graph] = set()
        #: The products of which there are two, for rows and for columns.
        self.products: list[Node] = []
        #: How many of them are one call's again.
        self.joined = 0

    def run(
        self,
        graph: Graph,
        outer: Graph | None = None,
        at: Node | None = None,
        inside: str | None = None,
    ) -> None:
        """Rewrites a graph.

        Args:
            outer, at: for the graph of a higher-order op, the graph around it and the op's node.
            inside: why no loss of this graph may be rewritten.
        """
        self.seen.add(graph)
        look_at(graph, outer, at)
        request = self.request
        if outer is not None:
            request = replace(request, lazily=Lazily("the graph is inside of another"))
        _PIPELINE.run(DynamoGraph(graph, self, request, outer, inside))
        if outer is None and self.products and not self._is_worth_two_products():
            self.steps.undo(_COLUMNS)

    def _is_worth_two_products(self) -> bool:
        """Whether products that are computed for columns, too, are held nowhere; and, unless memory
        is preferred, are computed by one call for both."""
        is_joined = self.request.prefer_memory or 2 * self.joined >= len(self.products)
        return is_joined and are_gone(self.products)

    def taken_apart(self, indexed: DynamoGraph) -> None:
        """Leaves out tensors that are put together and taken apart again."""
        if indexed.inside is None:
            self._change(_TAKEN_APART, lambda: read_parts(indexed.graph))

    def columns_apart(self, indexed: DynamoGraph) -> None:
        """Has products that are read by rows and by columns computed for both."""
        wanted = indexed.is_outermost and _LINEAR in self.request.losses
        if wanted and _COLUMNS not in self.steps.useless:
            self._change(_COLUMNS, lambda: self._read_columns_apart(indexed))

    def losses(self, indexed: DynamoGraph) -> None:
        """Replaces each loss by its op."""
        graph, recognizer = indexed.graph, indexed.recognizer
        taken: set[Node] = set()
        #: The nodes of declined losses. A part of such a loss may be a loss that is not declined.
        declined: dict[Node, Site] = {}
        # From the end: the outermost spelling of a loss claims the nodes inside it.
        for node in reversed(graph.nodes):
            if node in taken:
                continue
            if isinstance(node.target, HigherOrderOperator):
                self._bodies(node, indexed.inside)
                continue
            found = self.steps.run(
                (graph, node.name),
                lambda: self._loss(node, recognizer, indexed),  # noqa: B023
            )
            if found is None:
                continue
            if isinstance(found, Failure):
                found = _failed(node, found), []
            site, nodes = found
            if site.status == "rewritten":
                taken.update(nodes)
                whole = declined.get(node)
                if whole is not None:
                    self.sites = [s for s in self.sites if s is not whole]
                    note = f"part of a larger form that stays torch's: {whole.reason}"
                    site = replace(site, reason="; ".join(filter(None, (site.reason, note))))
                self.sites.append(site)
            elif node not in declined:
                self.sites.append(site)
                declined.update(dict.fromkeys(nodes, site))

    def both_ways(self, indexed: DynamoGraph) -> None:
        """Has one call compute the losses of a product by rows and by columns."""
        if indexed.inside is None and _LINEAR in self.request.losses:
            self._change(_BOTH_WAYS, lambda: self._join(indexed))

    def shared_logits(self, indexed: DynamoGraph) -> None:
        """Takes heads whose logits several losses and metrics read."""
        if indexed.inside is None and _LINEAR in self.request.losses:
            self._change(_SHARED, lambda: self._take_shared(indexed))

    def plain_logits(self, indexed: DynamoGraph) -> None:
        """Has one call read the rows of logits of which an entropy is wanted."""
        if (
            indexed.inside is None
            and indexed.is_outermost
            and _CROSS_ENTROPY in self.request.losses
        ):
            self._change(_PLAIN, lambda: self._take_plain(indexed))

    def known_heads(self, indexed: DynamoGraph) -> None:
        """Marks the heads of other libraries."""
        if indexed.is_outermost:
            self._change(_KNOWN, lambda: self.sites.extend(known_heads(indexed.graph)))

    def lazy_logits(self, indexed: DynamoGraph) -> None:
        """Makes logits lazy that are returned without a loss."""
        lazily = indexed.request.lazily
        if lazily is not None and indexed.is_outermost and _LINEAR in self.request.losses:
            self._change(
                _LAZY,
                lambda: add_logits_without_loss(indexed.graph, indexed.recognizer.replay, lazily),
            )

    def _change(self, name: str, action: Callable[[], None]) -> None:
        """A step that looks for losses and changes the graph in turns."""

        def change() -> None:
            self.steps.changes()
            action()

        self.steps.run(name, change)

    def _take_shared(self, indexed: DynamoGraph) -> None:
        """Has one op take each head that several losses read, and tells why another stays."""
        request = indexed.request
        for found in take_shared_logits(indexed.graph, indexed.recognizer.replay, request):
            marks = {site_of(reader) for reader in found.readers} - {None}
            if isinstance(found, Kept):
                self.sites = [
                    _with_readers(s, found.reason) if s.mark in marks else s for s in self.sites
                ]
                if found.picking is not None:
                    where = source_of(found.picking)
                    reason = f"its logits are held: {found.reason}"
                    self.sites.append(Site("linear_row_statistics", "declined", reason, *where))
                continue
            self._put_site("linear_row_statistics", found, marks)
            if request.lazily is not None:
                request.lazily.outputs += found.returned

    def _read_columns_apart(self, indexed: DynamoGraph) -> None:
        prefers = indexed.request.prefer_memory
        self.products += read_columns_apart(indexed.graph, prefer_memory=prefers)

    def _join(self, indexed: DynamoGraph) -> None:
        for found in join_directions(indexed.graph, indexed.recognizer.replay):
            marks = {site_of(reader) for reader in found.readers} - {None}
            self._put_site("two_way_cross_entropy", found, marks)
            self.joined += 1

    def _take_plain(self, indexed: DynamoGraph) -> None:
        """Has one call read the rows of held logits, and notes where the readers stay."""
        replay = indexed.recognizer.replay
        for found in take_plain_logits(indexed.graph, replay, indexed.request):
            marks = {site_of(reader) for reader in found.readers} - {None}
            if isinstance(found, Rewritten):
                self._put_site("row_statistics", found, marks)
                continue
            note = f"the entropy of its logits is read apart: {found.reason}"
            self.sites = [_with_clause(s, note) if s.mark in marks else s for s in self.sites]

    def _put_site(self, name: str, found: Rewritten, marks: Set[int | None]) -> None:
        """Puts one site in the place of those that have the given marks."""
        self.sites = [site for site in self.sites if site.mark not in marks]
        file, line = source_of(found.node)
        notes = "; ".join(found.notes)
        self.sites.append(Site(name, "rewritten", notes, file, line, mark=mark(found.node)))

    def _bodies(self, node: Node, inside: str | None) -> None:
        """Rewrites the graphs inside a higher-order op."""
        name = str(node.target)
        if name not in _TRACED_IN_PLACE:
            apart = f"inside {name}, whose graph torch differentiates and compiles apart"
            inside = inside or _INSIDE.get(name, apart)
        for _, body in bodies(node):
            if body.graph not in self.seen:
                self.run(body.graph, node.graph, node, inside)

    def _loss(
        self, node: Node, recognizer: Recognizer, indexed: DynamoGraph
    ) -> tuple[Site, list[Node]] | None:
        """The site of a node's loss, if the node holds one, and the nodes that the loss takes; None
        if it holds none."""
        refused: tuple[Site, list[Node]] | None = None
        inside, request = indexed.inside, indexed.request
        for candidate in recognizer.candidates(node):
            found = candidate
            if (
                isinstance(found, Match)
                and inside is None
                and f"linear_{found.op}" in request.losses
            ):
                take = _THROUGH_LINEAR[found.op]
                found = through_linear(found, recognizer.replay, take, request)
            if isinstance(found, Decline):
                reason: str | None = found.reason
            else:
                unwanted = None if found.op in request.losses else _NOT_CHOSEN
                reason = inside or unwanted or left_out(found.root) or refusal(found)
                reason = reason or better_left_to_torch(found, request)
            if request.verify and reason is None:
                assert isinstance(found, Match)
                reason, note = compare(found)
                found.notes += [note] if note else []
            if reason is None:
                assert isinstance(found, Match)
                site = _site(found, None, mark(found.root))
                self.steps.changes()
                replaced = found.replace()
                if request.lazily is not None:
                    request.lazily.outputs += found.returned
                return site, replaced
            if refused is None:
                interior = found.interior if isinstance(found, Match) else []
                refused = _site(found, reason, mark(found.root)), interior
        return refused


_PIPELINE: Pipeline[DynamoGraph] = Pipeline(
    REWRITE,
    taken_apart=lambda graph: graph.rewriting.taken_apart(graph),
    columns_apart=lambda graph: graph.rewriting.columns_apart(graph),
    losses=lambda graph: graph.rewriting.losses(graph),
    both_ways=lambda graph: graph.rewriting.both_ways(graph),
    shared_logits=lambda graph: graph.rewriting.shared_logits(graph),
    plain_logits=lambda graph: graph.rewriting.plain_logits(graph),
    known_heads=lambda graph: graph.rewriting.known_heads(graph),
    lazy_logits=lambda graph: graph.rewriting.lazy_logits(graph),
)


def _site(found: Match | Decline, reason: str | None, mark: int) -> Site:
    """The site of a loss; declined if there is a reason."""
    file, line = source_of(found.root)
    if reason is not None:
        name = found.op if isinstance(found, Match) else found.name
        return Site(name, "declined", reason, file, line, mark=mark)
    assert isinstance(found, Match)
    absorbed = [f"absorbed {' and '.join(found.absorbed)}"] if found.absorbed else []
    notes = "; ".join([*absorbed, *found.notes])
    return Site(found.op, "rewritten", notes, file, line, mark=mark)


def _with_readers(site: Site, reason: str) -> Site:
    """A site whose logits stay with all that reads them, unless it says why already."""
    if reason in site.reason:
        return site
    clause = f"the readers of its logits can't share one call: {reason}"
    if site.status == "rewritten" and HELD not in site.reason:
        clause = f"{HELD}: {reason}"  # its loss has no op together with the layer
    return _with_clause(site, clause)


def _with_clause(site: Site, clause: str) -> Site:
    """A site that has one more reason, once."""
    if clause in site.reason:
        return site
    return replace(site, reason="; ".join(filter(None, (site.reason, clause))))


def _failed(node: Node, failure: Failure) -> Site:
    """The site of a node that may hold a loss. This function must not fail as well."""
    call = attempt(lambda: bind(node), strict=False)
    name = call[0].name if isinstance(call, tuple) else str(node.target)
    source = attempt(lambda: source_of(node), strict=False)
    file, line = ("<unknown>", 0) if isinstance(source, Failure) else source
    return Site(name, "declined", failure.reason, file, line)
