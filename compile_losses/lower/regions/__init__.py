"""Heads without their logits, whatever reads these row by row.

Recognition takes a head together with losses that it knows. What it does not know keeps the logits:
a focal loss, a margin, an adapter on the head. With the option ``prefer_memory``, and where a GPU
has no memory for the logits and their gradient, this pass looks at the graph after autograd. There
a product and all that reads it row by row, its gradient too, are a region
(:mod:`compile_losses.lower.regions.rows`). It becomes calls of ``fused::linear_region``, which
computes it a chunk of rows at a time. If anything else reads the logits, the graph stays.

If the gradients are those of one tangent of one number times what the forward knows, one call makes
them in the forward, in three products; the backward scales them. Else the backward computes the
logits again, in four.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_losses.device_constants import exceeds_memory
from compile_losses.graphs import (
    ancestors,
    annotate,
    copy_nodes,
    descendants,
    emit,
    erase_unused,
    fresh_like,
    is_movable,
    move_before,
    replace_uses,
    undone_if_it_fails,
)
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import Cost, behind_views, hint_of, nbytes_of
from compile_losses.lower.decision import REGION, Decision
from compile_losses.lower.decompose import Decomposition, decompositions_of
from compile_losses.lower.early_sizes import compute_sizes_early
from compile_losses.lower.elementwise.find import linear_part
from compile_losses.lower.fused_calls import Loss
from compile_losses.lower.known_factors import is_one_number
from compile_losses.lower.mutated_inputs import changed_inputs
from compile_losses.lower.regions.rows import Rows
from compile_losses.lower.regions.rules import EXTREMES_OF_TWO
from compile_losses.lower.regions.slices import slices_first
from compile_losses.lower.regions.steps import (
    COLUMN,
    LOGITS,
    End,
    NotOfRowsError,
    Read,
    head_of,
)
from compile_losses.lower.regions.write import Writer, in_shape_of, known_reads, needed, result_of
from compile_losses.lower.shared_with_forward import save
from compile_losses.ops.linear.chunk_size import chunk_rows, held_rows
from compile_losses.ops.linear_region import rows_at_a_time
from compile_losses.sites import in_words, number_of, site_of
from compile_losses.torch_internals.graphs import RECOMPUTE, is_tangent
from compile_losses.torch_internals.inductor import activation_memory_budget

aten = torch.ops.aten
fused = torch.ops.fused

#: How the choices begin for what reads the logits of a region.
BY_CHUNKS = "logits by chunks"

#: Under which key a region's call has its losses: the mark, the name and the trace of each.
LOSSES = "compile_losses_of_region"


def take_regions(graph: AtenGraph) -> None:
    """Replaces each head that may be computed without its logits, if memory is preferred, or if
    there is too little for the logits and their gradient."""
    found = [node for node in graph.graph.nodes if head_of(node) is not None]
    if not graph.request.prefer_memory:
        found = [node for node in found if _exceeds_memory(node)]
    heads = [node for node in found if node not in graph.backward and _is_large(node)]
    for product in [slices_first(head) for head in heads]:
        if product.users:
            _take(graph, product)


def _take(graph: AtenGraph, product: Node) -> None:
    """Replaces one head, or leaves it and says why at the losses that read it."""
    if not _is_large(product):
        return
    sites: dict[int | None, str] = {}
    losses: list[Loss] = []
    try:
        while True:  # torch's ops of one loss may show products that others read
            others = [loss for loss in graph.losses if _reads_rows(loss, product)]
            compute_sizes_early(graph.graph)  # no logits are read for their sizes
            made = {product, *descendants([product])}
            losses = [loss for loss in others if made.intersection(loss.forward.all_input_nodes)]
            rows = _rows(product, others)
            _check(graph, rows)
            losses = [loss for loss in others if _reads(loss, rows)]
            if not losses:
                break
            for decomposition in _decompositions(losses):
                decomposition.apply()
            sites |= {site_of(loss.forward): loss.name for loss in losses}
        chunk = _chunk(rows)
        cost, trace = _costs(rows, chunk), _trace(rows)
        told = [(site, name, trace) for site, name in (sites or {None: REGION}).items()]
        annotate(product, LOSSES, told)  # which calls inherit
        choice = _replaced(graph, rows)
    except NotOfRowsError as error:
        for loss in losses:
            sites.setdefault(site_of(loss.forward), loss.name)
        for site, name in sites.items():
            decision = Decision(site, name, "with its logits", str(error))
            if decision not in graph.decisions:  # another of several products has the same reason
                graph.decisions.append(decision)
        return
    reason = f"{number_of(chunk, 'row')} of logits at a time"
    figures: tuple[Cost | None, Cost | None] = cost  # of all losses together
    for site, name, _ in told:
        graph.decisions.append(Decision(site, name, choice, reason, *figures, trace))
        figures = None, None


def _rows(product: Node, losses: Iterable[Loss]) -> Rows:
    """The rows of a product, and of the products that are read with it.

    Raises:
        NotOfRowsError: with the reason.
    """
    opaque = [call for loss in losses for call in _calls(loss)]
    products = [product]
    while True:
        rows = Rows(products, opaque)
        if len(rows.heads) == len(products):
            return rows
        products = list(rows.heads)


def _calls(loss: Loss) -> list[Node]:
    return [loss.forward, *loss.backwards]


def _reads_rows(loss: Loss, product: Node) -> bool:
    """Whether a loss reads a tensor of several numbers for each row of a product."""
    rows = product.meta["val"].shape[0]
    read = [n.meta.get("val") for n in loss.forward.all_input_nodes]
    return any(
        isinstance(size, int) and size > 1 and statically_known_true(value.numel() == rows * size)
        for value in read
        if isinstance(value, Tensor)
        for size in value.shape
    )


def _reads(loss: Loss, rows: Rows) -> bool:
    """Whether a loss reads logits of rows, or they read its gradients."""
    read = [node for call in _calls(loss) for node in call.all_input_nodes]
    items = [item for call in _calls(loss) for item in (call, *call.users)]
    return any(rows.kind(node) == LOGITS for node in (*read, *items))


def _decompositions(losses: Sequence[Loss]) -> list[Decomposition]:
    """Losses of logits in torch's own ops, which rules know."""
    found = decompositions_of(losses)
    if isinstance(found, Loss):
        raise NotOfRowsError(f"{found.name} reads them, which can't be decomposed")
    return found


def _exceeds_memory(product: Node) -> bool:
    value = product.meta["val"]
    return exceeds_memory(value.device, 2 * nbytes_of(value))


def _is_large(product: Node) -> bool:
    """Whether a head has more logits than one chunk; False if that is not known."""
    sizes = _sizes(product)
    if sizes is None:
        return False
    rows, hidden, classes = sizes
    value = product.meta["val"]
    chunk = chunk_rows(rows, hidden, classes, value.dtype, value.device, beside=1)
    return held_rows(chunk, value.device, 1) / 2 <= rows and chunk < rows


def _sizes(product: Node) -> tuple[int, int, int] | None:
    """The rows of a head, or how many they were when it was traced, its features and classes."""
    head = head_of(product)
    assert head is not None
    value = product.meta["val"]
    hidden, classes, rows = head.input.meta["val"].shape[1], value.shape[1], hint_of(value.shape[0])
    known = isinstance(hidden, int) and isinstance(classes, int) and classes > 1 and rows > 1
    return (rows, hidden, classes) if known and value.is_floating_point() else None


def _chunk(rows: Rows) -> int:
    """How many rows of logits are held at a time.

    Raises:
        NotOfRowsError: all.
    """
    value = rows.product.meta["val"]
    widths = [product.meta["val"].shape[1] for product in rows.heads]
    sizes = _sizes(max(rows.heads, key=lambda product: product.meta["val"].shape[1]))
    assert sizes is not None
    sums = [end for end in rows.ends.values() if end.is_sum and end.other is not None]
    chunk = rows_at_a_time(widths, bool(rows.ends), bool(sums), *sizes, value.dtype, value.device)
    if chunk >= sizes[0]:
        raise NotOfRowsError("all of them are one chunk: nothing is saved")
    return chunk


def _costs(rows: Rows, chunk: int) -> tuple[Cost, Cost]:
    """Bytes of logits, of their gradients and of the sums of the others, ours and torch's."""
    of_heads = [nbytes_of(product.meta["val"]) for product in rows.heads]
    held, logits = sum(of_heads), max(of_heads)
    sums = [end for end in rows.ends.values() if end.is_sum]
    # Written by a product and read; written and read again, and by a product for each gradient.
    moved = 2 * held + (2 * bool(rows.ends) + len(rows.ends)) * logits
    count = hint_of(rows.rows)
    again = sum(2 * (-(-count // chunk) - 1) * nbytes_of(end.node.meta["val"]) for end in sums)
    at_a_time = (held + bool(rows.ends) * logits) * chunk // count
    return Cost(moved + again, at_a_time), Cost(moved, held)


def _trace(rows: Rows) -> str:
    """The stack trace of the first number of each row that is made of logits."""
    read = [node for node in (*rows.steps, *rows.wholes) if _is_number_of_logits(rows, node)]
    return next((t for node in sorted(read) if (t := node.meta.get("stack_trace"))), "")


def _check(graph: AtenGraph, rows: Rows) -> None:
    """Checks that numbers of each row leave the forward, and only gradients' products the backward.

    Raises:
        NotOfRowsError: with the reason.
    """
    for end in rows.ends.values():
        if end.node not in graph.backward:
            raise NotOfRowsError(f"{in_words(end.node)} reads them")
    is_read = rows.opaque or rows.wholes
    if not is_read and not any(_is_number_of_logits(rows, node) for node in rows.steps):
        raise NotOfRowsError("no number of each row is read")


def _is_number_of_logits(rows: Rows, node: Node) -> bool:
    step = rows.wholes.get(node) or rows.steps[node]
    return step.kind == COLUMN and any(read.kind == LOGITS for read in step.reads)


def _replaced(graph: AtenGraph, rows: Rows) -> str:
    """Replaces the rows of a head; what was done, in words.

    Raises:
        NotOfRowsError: with the reason, before anything has changed.
    """
    _check(graph, rows)
    ends = sorted(rows.ends.values(), key=attrgetter("node"))
    outside, gradients = _read_outside(graph, rows)
    if not outside and not ends:
        raise NotOfRowsError("nothing reads what is made of them")
    if not ends and not gradients:
        _write_forward(graph, rows, outside)
        _erase(rows)
        return BY_CHUNKS
    tangent = _tangent(graph, rows, ends, gradients)
    if isinstance(tangent, Node):
        _write_both(graph, rows, outside, ends, gradients, tangent)
        _erase(rows)
        return f"{BY_CHUNKS}, gradient in forward"
    _write_apart(graph, rows, outside, ends, gradients)
    _erase(rows)
    return f"{BY_CHUNKS}, computed again in the backward: {tangent}"


def _read_outside(graph: AtenGraph, rows: Rows) -> tuple[list[Node], list[Node]]:
    """The forward's columns and numbers of all logits that something outside of the rows reads; and
    the backward's that are made of logits, as the gradient of a temperature.

    Other columns of the backward stay in the graph, and what they read is outside.
    """
    backward = graph.backward
    columns = [node for node in rows.steps if rows.kind(node) == COLUMN and _leaves(rows, node)]
    found, gradients = dict[Node, None](), list[Node]()
    for column in columns:
        if column not in backward:
            found[column] = None
            continue
        reads = _made_there(rows, column, backward)
        if any(read.kind == LOGITS for read in reads):
            gradients.append(column)
        else:
            found |= {
                r.node: None for r in reads if r.node in rows.steps and r.node not in backward
            }
    wholes = [whole for whole in rows.wholes if whole.users]
    gradients += [whole for whole in wholes if whole in backward]
    return [*sorted(found), *(w for w in wholes if w not in backward)], sorted(gradients)


def _made_there(rows: Rows, column: Node, backward: Container[Node]) -> list[Read]:
    """What a column of the backward reads, and those of the backward that it reads."""
    reads: list[Read] = []
    waiting, seen = [column], {column}
    while waiting:
        for read in rows.steps[waiting.pop()].reads:
            reads.append(read)
            if read.kind != LOGITS and read.node in rows.steps and read.node in backward:
                waiting += [read.node] * (read.node not in seen)
                seen.add(read.node)
    return reads


def _leaves(rows: Rows, node: Node) -> bool:
    """Whether something outside of the rows reads a node."""
    return any(user not in rows.steps and user not in rows.ends for user in node.users)


def _tangent(
    graph: AtenGraph, rows: Rows, ends: Sequence[End], gradients: Sequence[Node]
) -> Node | str:
    """The tangent that all gradients are multiples of, or why the backward has to make them."""
    backward = graph.backward
    nodes = needed(rows, [*(end.logits for end in ends), *gradients], {})
    reads = [read.node for read in known_reads(rows, nodes)]
    cone = {node for node in ancestors(reads) if node in backward}
    tangents = {node for node in (*cone, *nodes) if node.op == "placeholder" and is_tangent(node)}
    if any(node in rows.made for node in ancestors(reads)):
        return "its gradients depend on numbers of all rows"
    if len(tangents) != 1 or not all(map(is_one_number, tangents)):
        return "its gradients are made of more than one number from outside of the graph"
    if backward.intersection(_layers(rows, nodes)) or any(end.other in backward for end in ends):
        return "the backward makes what its gradients are made of"
    values = [node.meta["val"] for node in (*nodes, *(cone - tangents))]
    if any(isinstance(value, Tensor) and value.dtype == torch.float16 for value in values):
        return "a unit gradient would underflow in float16 before the loss scale reaches it"
    if activation_memory_budget() < 1 or any(n.meta.get(RECOMPUTE) is not None for n in nodes):
        return "the forward may run twice"
    (tangent,) = tangents
    linear = set(linear_part(tangent, backward, moves=True))
    if not (cone - {tangent}) | {n for n in (*nodes, *gradients) if n in backward} <= linear:
        return "its gradients are no multiples of the tangent"
    return tangent


def _write_forward(
    graph: AtenGraph, rows: Rows, columns: Sequence[Node], ends: Sequence[End] = ()
) -> dict[Node, Node]:
    """Computes columns in a call of their own, and replaces them; the nodes that hold them."""
    place = _first_reader(graph, rows, columns, ends)
    nodes = needed(rows, columns, {})
    _move_known(rows, nodes, place)
    with undone_if_it_fails(place):
        results = Writer(rows, place, {}, {}).call(columns, [])
        shaped = [result_of(r, c, rows, place) for r, c in zip(results, columns, strict=True)]
    for column, result in zip(columns, shaped, strict=True):
        replace_uses(column, result)
    save(results[0].args[0])  # type: ignore[arg-type]
    return dict(zip(columns, results, strict=True))


def _first_reader(
    graph: AtenGraph, rows: Rows, columns: Iterable[Node], ends: Iterable[End]
) -> Node:
    """The first of the ends, and of the nodes that read some columns and may stay in the graph."""
    backward = graph.backward
    readers = (user for column in columns for user in column.users)
    outside = (user for user in readers if user not in rows.steps or user in backward)
    return min((*outside, *(end.node for end in ends)))


def _layers(rows: Rows, nodes: Iterable[Node]) -> list[Node]:
    """The inputs, weights and biases of the heads among some nodes."""
    heads = [rows.heads[node] for node in nodes if node in rows.heads]
    return [n for head in heads for n in (head.input, head.columns, head.bias) if n is not None]


def _move_known(
    rows: Rows,
    nodes: Sequence[Node],
    place: Node,
    *,
    others: Iterable[Node] = (),
    copied: Container[Node] = (),
) -> None:
    """Has all that a call reads stand before its place.

    Args:
        others: what it reads besides what nodes of the rows read.
        copied: what is copied there, and so does not move.

    Raises:
        NotOfRowsError: something can't.
    """
    known = [read.node for read in known_reads(rows, nodes) if read.node not in copied]
    late = next((node for node in known if node in rows.made), None)
    if late is not None:  # it is made of the call's own results
        raise NotOfRowsError(f"{in_words(late)} mixes their rows")
    if not move_before([*_layers(rows, nodes), *known, *others], place):
        raise NotOfRowsError("what is read with them can't be computed before")


def _write_both(
    graph: AtenGraph,
    rows: Rows,
    columns: Sequence[Node],
    ends: Sequence[End],
    gradients: Sequence[Node],
    tangent: Node,
) -> None:
    """Computes columns and gradients in one call, and scales the gradients in the backward."""
    backward = graph.backward
    place = _first_reader(graph, rows, columns, ends)
    nodes = needed(rows, [*columns, *gradients, *(end.logits for end in ends)], {})
    reads = [read.node for read in known_reads(rows, nodes)]
    cone = sorted(
        node for node in set(ancestors(reads)) if node in backward and node is not tangent
    )
    before = [source for node in cone for source in node.all_input_nodes if source not in backward]
    others = [end.other for end in ends if end.other is not None]
    if not all(map(is_movable, cone)):
        raise NotOfRowsError("what is read with them can't be computed before")
    _move_known(rows, nodes, place, others=[*others, *before], copied=backward)
    with undone_if_it_fails(place):
        value = tangent.meta["val"]
        kind = {"dtype": value.dtype, "device": value.device, "layout": torch.strided}
        args = ([*value.shape], 1)
        copies = {
            tangent: emit(place, aten.full.default, args, kind, like=rows.product, value=value)
        }
        copy_nodes(cone, copies, lambda _: place, rows.product)
        numbers = [*columns, *gradients]
        results = Writer(rows, place, copies, {}).call(numbers, ends)
        shaped = [result_of(r, c, rows, place) for r, c in zip(results, numbers, strict=False)]
    for column, result in zip(columns, shaped, strict=False):
        replace_uses(column, result)
    units = [*zip(gradients, shaped[len(columns) :], strict=True)]
    units += zip((end.node for end in ends), results[len(numbers) :], strict=True)
    for node, unit in units:
        value = fresh_like(unit.meta["val"])
        scaled = emit(node, fused.scale.default, (unit, tangent), value=value)
        replace_uses(node, in_shape_of(scaled, node, node))
    save(results[0].args[0])  # type: ignore[arg-type]


def _write_apart(
    graph: AtenGraph,
    rows: Rows,
    columns: Sequence[Node],
    ends: Sequence[End],
    gradients: Sequence[Node],
) -> None:
    """Computes columns in the forward, and gradients in the backward, from logits made again."""
    backward = graph.backward
    targets = [*(end.logits for end in ends), *gradients]
    of_logits = needed(rows, targets, {})
    read = {
        read.node
        for node in of_logits
        if node in backward
        for read in rows.step(node).reads  # type: ignore[union-attr]
        if read.kind == COLUMN and read.node in rows.steps and read.node not in backward
    }
    given = dict.fromkeys(read)
    nodes = needed(rows, targets, given)
    made = [*(end.node for end in ends), *gradients]
    place = min(made)
    reads = [r.node for r in known_reads(rows, nodes, given) if r.node not in given]
    if set(reads) & set(descendants(made)):
        raise NotOfRowsError("what its gradients read is made of its own results")
    changed = set(changed_inputs(graph))
    if any(behind_views(node) in changed for node in (*reads, *_layers(rows, nodes))):
        raise NotOfRowsError("the forward changes what the backward would read")
    if not move_before([*reads, *(e.other for e in ends if e.other is not None)], place):
        raise NotOfRowsError("what is read with its gradients can't be computed before")
    flat = _write_forward(graph, rows, list(dict.fromkeys((*columns, *sorted(read)))), ends)
    writer = Writer(rows, place, {}, {node: flat[node] for node in read})
    results = writer.call(gradients, ends)
    for node, result in zip(gradients, results, strict=False):
        replace_uses(node, result_of(result, node, rows, place))
    for end, result in zip(ends, results[len(gradients) :], strict=True):
        replace_uses(end.node, in_shape_of(result, end.node, end.node))


def _erase(rows: Rows) -> None:
    """Erases what nothing reads any more."""
    own = {*rows.steps, *rows.beside, *rows.ends, *rows.wholes}
    pairs = {user for node in rows.steps for user in node.users if user.target in EXTREMES_OF_TWO}
    erase_unused(sorted(own | pairs, reverse=True))
