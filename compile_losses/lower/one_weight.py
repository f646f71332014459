"""One gradient for a weight that several heads read.

Multi-token prediction, or a student that is read twice, multiplies several hidden states with one
weight. Each head makes a gradient of the weight, and autograd adds these up. Here the calls that
make them become one call (:mod:`compile_losses.ops.joined_heads`), where all add to one sum. It
stands where the last of them stood, and what is made of the others' results comes after it.

The gradients have to meet in sums alone, scaled by one tangent if they were made in the forward. A
call that reads what another one makes stays by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from compile_losses.graphs import (
    change_input,
    descendants,
    emit,
    erase,
    erase_unused,
    is_movable,
    replace_uses,
    undone_if_it_fails,
)
from compile_losses.graphs import replace as replace_call
from compile_losses.lower.aten_graph import AtenGraph
from compile_losses.lower.cost import behind_views, nbytes_of
from compile_losses.lower.decision import Decision
from compile_losses.lower.fused_calls import fused_call
from compile_losses.lower.regions import LOSSES
from compile_losses.lower.shared_with_forward import save
from compile_losses.lower.weight_terms import Term, terms_of, weight_sums
from compile_losses.ops.linear import region_program
from compile_losses.ops.linear.joined_calls import JoinedCall, JoinedCalls
from compile_losses.ops.linear.steps import Operand
from compile_losses.sites import site_of
from compile_losses.torch_internals.ops import named_arguments

aten = torch.ops.aten
fused = torch.ops.fused

#: What is decided of heads whose gradients of a weight are one sum.
ONE_GRADIENT = "one gradient of the weight"


def join_heads(graph: AtenGraph) -> None:
    """Joins the calls that make several gradients of one weight."""
    for root in weight_sums(graph):
        groups: dict[Any, list[Term]] = {}
        for term in terms_of(root):
            groups.setdefault((*term.kind, term.call in graph.backward), []).append(term)
        for terms in groups.values():
            kept = _independent(terms)
            if len(kept) > 1:
                decisions = _told(kept)
                if _join(graph, kept):
                    graph.decisions += decisions


def _independent(terms: Sequence[Term]) -> list[Term]:
    """Those terms none of whose calls reads what another call makes."""
    kept: list[Term] = []
    made: set[Node] = set()
    calls: set[Node] = set()
    for term in sorted(terms, key=lambda each: each.call):
        if term.call in calls or term.call not in made:
            kept.append(term)
            calls.add(term.call)
            made |= {*descendants([term.call])} - {term.call}
    return kept


def _join(graph: AtenGraph, terms: Sequence[Term]) -> bool:
    """Puts one call in the place of several; False, and nothing changed, where that can't be."""
    calls = sorted({term.call for term in terms})
    last = calls[-1]
    between = _made_between(calls)
    if between is None or not all(map(_may_wait, calls[:-1])):
        return False
    places = {call: sorted(t.place for t in terms if t.call is call) for call in calls}
    kept = min(terms, key=lambda term: term.reader)
    tensors: dict[Node, int] = {}
    dtype = kept.node.meta["val"].dtype
    in_backward = last in graph.backward
    try:
        joined = tuple(_joined(call, places[call], tensors) for call in calls)
        text = JoinedCalls(joined, dtype).text()
    except TypeError:
        return False
    for node in reversed(between):
        last.append(node)
    with undone_if_it_fails(last):
        call = emit(last, fused.joined_heads.default, (list(tensors), text))
        values = call.meta["val"]
        items = [
            emit(last, operator.getitem, (call, i), value=value) for i, value in enumerate(values)
        ]
    if not in_backward:
        save(call)
    results = iter(items)
    for each in calls:
        others = {
            place: next(results)
            for place in range(len(each.meta["val"]))
            if place not in places[each]
        }
        _give_results(each, others)
    _sum_up(terms, kept, items[-1])
    for each in calls:
        replace_call(each, {})
    erase_unused(item for item in items)
    return True


def _made_between(calls: Sequence[Node]) -> list[Node] | None:
    """What is made of calls' results before the last of them, in the graph's order; None if that
    can't wait."""
    last = calls[-1]
    made = sorted(node for node in descendants(calls) if node < last and node not in calls)
    can_wait = all(node.target is operator.getitem or is_movable(node) for node in made)
    return made if can_wait else None


def _may_wait(call: Node) -> bool:
    """Whether what a call reads, and would be held until it runs, is less than the gradient of the
    weight that is not held."""
    layer = {behind_views(node) for node in _weights_of(call)}
    sources = {node: behind_views(node) for node in call.all_input_nodes}
    held = [n for n, s in sources.items() if s not in layer and s.op != "placeholder"]
    weights = min(nbytes_of(node.meta["val"]) for node in _weights_of(call))
    return sum(nbytes_of(node.meta["val"]) for node in held) <= weights


def _weights_of(call: Node) -> list[Node]:
    """The weights that a call multiplies rows with."""
    args: Any = call.args
    if call.target is fused.linear_region.default:
        products = region_program.parsed(args[2]).products
        return [args[1][product.columns] for product in products]
    return [named_arguments(call)["linear_weight"]]


def _joined(call: Node, places: Sequence[int], tensors: dict[Node, int]) -> JoinedCall:
    """A call for the text.

    Args:
        tensors: what the calls read, each with its place; they are added.

    Raises:
        TypeError: an argument that is a node holds no tensor.
    """

    def operand(node: Node) -> Any:
        if not isinstance(node.meta.get("val"), Tensor):
            raise TypeError(f"{node.name} is no tensor")
        return Operand(tensors.setdefault(node, len(tensors)))

    args, kwargs = list(call.args), dict(call.kwargs)
    if call.target is fused.linear_region.default:
        program = region_program.parsed(args[2])  # type: ignore[arg-type]
        first = len(program.columns) + len(program.row_products)
        sums = [
            replace(each, is_turned=each.is_turned and place not in places)
            for place, each in enumerate(program.sums, first)
        ]
        args[2] = replace(program, sums=tuple(sums)).text()
        of_rows = args[0][0]  # type: ignore[index]
    else:
        of_rows = named_arguments(call)["input"]
    step = call.target, _mapped(args, operand), _mapped(kwargs, operand)
    return JoinedCall(step, tuple(places), operand(of_rows).number)  # type: ignore[arg-type]


def _mapped(arguments: Any, operand: Any) -> Any:
    """Arguments whose nodes are operands, with lists that are lists."""
    if isinstance(arguments, dict):
        return {name: _mapped(argument, operand) for name, argument in arguments.items()}
    if isinstance(arguments, list | tuple):
        return [_mapped(argument, operand) for argument in arguments]
    return map_arg(arguments, operand)


def _give_results(call: Node, results: dict[int, Node]) -> None:
    """Has the readers of a call's results read others."""
    for item in list(call.users):
        place: Any = item.args[1]
        if place in results:
            replace_uses(item, results[place])


def _sum_up(terms: Iterable[Term], kept: Term, total: Node) -> None:
    """Puts a sum of all terms in the place of one of them, and takes the others out."""
    if kept.number is not None:
        total = emit(kept.reader, fused.scale.default, (total, kept.number), like=kept.node)
    if kept.is_turned:
        total = emit(kept.reader, aten.permute.default, (total, [1, 0]), like=kept.node)
    change_input(kept.reader, kept.node, total)
    _erase_chain(kept.node)
    for term in terms:
        if term is not kept:
            (reader,) = term.node.users  # another one than before if that is gone
            (other,) = [each for each in reader.all_input_nodes if each is not term.node]
            replace_uses(reader, other)
            erase(reader)
            _erase_chain(term.node)


def _erase_chain(node: Node) -> None:
    """Erases a term's nodes, but for the result that they begin with."""
    while node.target is not operator.getitem:
        source: Any = node.args[0]
        erase(node)
        node = source


def _told(terms: Sequence[Term]) -> list[Decision]:
    """What is decided of the losses of some terms."""
    reason = f"a sum over {len(terms)} heads"
    return [
        Decision(site, name, ONE_GRADIENT, reason, trace=trace)
        for call in dict.fromkeys(term.call for term in terms)
        for site, name, trace in _losses_of(call)
    ]


def _losses_of(call: Node) -> Sequence[tuple[int | None, str, str]]:
    """The losses of a call by their marks, their names and their traces."""
    if call.target is fused.linear_region.default:
        told: Sequence[tuple[int | None, str, str]] = call.meta[LOSSES]
        return told
    name, _ = fused_call(call) or ("", "")
    return [(site_of(call), name.removesuffix("_rows"), "")]
