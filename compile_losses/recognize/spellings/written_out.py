"""Losses written out in other functions: a normal form whose body one of the families knows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from compile_losses.graphs import ancestors, descendants
from compile_losses.library import DECLARED
from compile_losses.op_traits import SCALINGS
from compile_losses.ops.checks import REDUCTIONS
from compile_losses.recognize.graph.aten_replay import AtenReplay, aten, compute, same_sizes
from compile_losses.recognize.graph.symbolic_tensors import Value, example, sources, whole
from compile_losses.recognize.match import Decline, Match
from compile_losses.recognize.spellings.absorb import absorb
from compile_losses.recognize.spellings.difference import find_difference
from compile_losses.recognize.spellings.divergence import softmax_divergences
from compile_losses.recognize.spellings.joined_calls import joined_calls
from compile_losses.recognize.spellings.logistic import find_logistic
from compile_losses.recognize.spellings.masked_terms import (
    INFINITE,
    NAN,
    finite_divergences,
    without_infinities,
    without_nan,
)
from compile_losses.recognize.spellings.normal_form import (
    NormalForm,
    Written,
    added_forms,
    normal_forms,
    sums_classes,
)
from compile_losses.recognize.spellings.probabilities import written_probabilities
from compile_losses.recognize.spellings.softmax_algebra import SoftmaxAlgebra
from compile_losses.recognize.spellings.table import (
    Arguments,
    Call,
    Loss,
    UnsupportedError,
    bind,
    recognize_call,
    reduction_of,
)
from compile_losses.torch_internals.ops import SIZE_ASSERTIONS, schema_of

#: Names of functions and methods, for cheap tests of a root. A sum to one number is one of these.
_TOTALS = {
    *("mean", "sum", "div", "truediv", "true_divide", "mul", "multiply", "divide", "neg"),
    *("negative", "pow", "square", "multilabel_soft_margin_loss"),
}
#: Numbers for each row come out of one of these,
_SOFTMAXES = {"softmax", "log_softmax", "logsumexp", "exp"}
#: through some of these.
_ROWS = {
    *_TOTALS,
    *("sub", "subtract", "rsub", "add", "gather", "take_along_dim", "getitem", "squeeze", "view"),
    *("reshape", "log", "exp", "unsqueeze", "kl_div", "xlogy", "flatten", "transpose", "permute"),
    *("stack", "cat", "concat", "concatenate", "logaddexp", "lerp", "broadcast_tensors"),
}
#: Functions that keep a part of the rows, or write over a sum's first term, and are no loss
#: themselves.
_WITHIN = {"masked_fill", "iadd", "isub"}
_WITHOUT_NAN = {"nanmean", "nansum"}
_BINARY = "binary_cross_entropy_with_logits"
_LEARNED_WEIGHT = "a weight requires a gradient, which the op does not compute"
#: Losses that are no single function of torch's; kl_div is a part of them.
_DIVERGENCES = ("softmax_kl_div", "softmax_js_div")


def _name(node: Node) -> str:
    """The name of what a node calls; empty if it calls nothing."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    return getattr(node.target, "__name__", "").partition(".")[0]


class Recognizer:
    """Finds the losses written out in one graph."""

    def __init__(self, graph: Graph) -> None:
        self.replay = AtenReplay()
        self.algebra = SoftmaxAlgebra(self.replay)
        self._from_softmax: set[Node] = set()
        for node in graph.nodes:
            name = _name(node)
            if name in _SOFTMAXES or (
                name in _ROWS | _WITHIN
                and any(n in self._from_softmax for n in node.all_input_nodes)
            ):
                self._from_softmax.add(node)

    def candidates(self, node: Node) -> Iterator[Match | Decline]:
        """The losses that ``node`` may hold, the match that takes most into its op first."""
        call = bind(node)
        joined = joined_calls(node, self.replay)
        if joined is not None:
            absorb(joined)
            yield joined
        for match in self._written(node, call):
            if isinstance(match, Match):
                absorb(match)
            yield match
        found = recognize_call(node)
        if found is not None:
            yield found

    def _written(self, node: Node, call: Call | Decline | None) -> Iterator[Match | Decline]:
        """The losses written out that a node may hold, of which calls of torch's losses are
        parts."""
        if isinstance(call, tuple) and call[0].name != "kl_div":
            if call[0].name == "nll_loss":
                yield from self._likelihood(node, *call)
            return
        name, rows = _name(node), node in self._from_softmax
        if name in _WITHOUT_NAN:
            yield from self._without_nan(node)
        if name not in (_ROWS if rows else _TOTALS):
            return
        value = example(node)
        if not isinstance(value, torch.Tensor) or not (rows or value.dim() == 0):
            return
        if not value.is_floating_point():
            return
        if self.replay.of(node).node is not node:
            return
        for form in normal_forms(node, self.replay):
            for match in self._matches(node, form):
                if call is not None and getattr(match, "op", "") not in _DIVERGENCES:
                    continue  # the table knows more of its options
                if form.root.op in SCALINGS and (isinstance(match, Decline) or match.steps):
                    continue  # the factor stays the user's: the node inside it is a root as well
                yield match

    def _matches(self, node: Node, form: NormalForm) -> Iterator[Match | Decline]:
        """The losses of all families that one form of a node may be."""
        whole = form.root.fake.dim() == 0 and form.reduced and form.selection is None
        if whole:
            yield from self._differences(node, form)
            yield from self._logistic(node, form)
        for written in written_probabilities(form, self.algebra):
            if written.op in DECLARED:
                yield from self._probabilities(node, written)
        yield from self._weighted_rows(node, form)
        if node in self._from_softmax:
            yield from self._without_infinities(node, form)
        for one, other in added_forms(form, self.replay):
            total = self.algebra.of(one.body) * one.constant
            total = total + self.algebra.of(other.body) * other.constant
            for written in softmax_divergences(replace(one, constant=1.0), total, self.algebra):
                yield from self._probabilities(node, written)
        if whole and not form.weights and form.body.whole:
            yield from self._calls(node, form)

    def _weighted_rows(self, node: Node, form: NormalForm) -> Iterator[Match]:
        """The losses of each row that are left of a form without a weight of each row, which stands
        within the sum over the classes, as a mask does in EAGLE-3's loss."""
        dims = sums_classes(form)
        weight = _product(form.weights) if form.weights and form.root.fake.dim() else None
        if dims is None or weight is None or weight.fake.dim() != form.body.fake.dim():
            return
        (dim,) = dims
        weight = compute(aten.squeeze.dim, weight, dim) if weight.fake.shape[dim] == 1 else None
        if weight is None or not same_sizes(weight.fake.shape, form.root.fake.shape):
            return
        for written in written_probabilities(replace(form, weights=()), self.algebra):
            if written.op not in DECLARED or not written.each:
                continue
            for match in self._probabilities(node, written):
                match.steps = [*match.steps, (aten.mul.Tensor, (weight,))]
                yield match

    def _without_infinities(self, node: Node, form: NormalForm) -> Iterator[Match | Decline]:
        """The divergences that are left of a form without the terms of infinite logits."""
        found = without_infinities(form, self.replay)
        if found is None:
            return
        finite = list(finite_divergences(found, self.algebra))
        for written in finite:
            yield from self._probabilities(node, written)
        for written in written_probabilities(found.form, self.algebra) if not finite else ():
            yield Decline(node, written.op, INFINITE)

    def _without_nan(self, node: Node) -> Iterator[Decline]:
        """Why a sum or mean without nan of what may be a loss stays torch's."""
        value = example(node)
        if not isinstance(value, torch.Tensor) or value.dim() > 0:
            return
        form = without_nan(whole(node), self.replay)
        if form is None or bind(form.body.node) is not None:
            return
        found = [*self._differences(node, form), *self._logistic(node, form)]
        if found:
            yield Decline(node, getattr(found[0], "op", _BINARY), NAN)

    def _differences(self, node: Node, form: NormalForm) -> Iterator[Match]:
        """The losses of a difference that a form may be, those with the fewest steps first."""
        found = find_difference(form.body, self.replay)
        matches = []
        for one in found:
            if one.family.op not in DECLARED:
                continue
            # A weighted mean of torch's divides by the weights' sum: such a loss is a sum.
            counts = {} if form.weights else {"mean": math.prod(form.body.fake.shape)}
            keywords = {}
            if form.weights:
                weight = _product(form.weights)
                if weight is None or not _takes_weight(one.family.op):
                    continue
                keywords["weight"] = weight.argument
            own = () if one.family.parameter is None else (one.parameter,)
            args = (one.input.argument, one.target.argument)
            scaled = _scaled(form, one.scale).scale(counts, list(sources(args)))
            if scaled is None:
                continue
            reduction, steps = scaled
            args = (*args, REDUCTIONS[reduction], *own)
            preference = len(steps), one.scale != 1
            matches.append((preference, self._match(node, one.family.op, args, keywords, steps)))
        # The Huber and smooth L1 losses are multiples of each other.
        for _, match in sorted(matches, key=lambda candidate: candidate[0]):
            yield match

    def _logistic(self, node: Node, form: NormalForm) -> Iterator[Match | Decline]:
        """The binary cross entropies of logits that a form may be, or why they stay torch's."""
        for one in find_logistic(form.body, self.replay):
            if one.reason is not None:
                yield Decline(node, _BINARY, one.reason)
                continue
            factors = (*form.weights, *one.weights)
            weight = _product(factors) if factors else None
            if factors and weight is None:
                continue
            if _needs_gradient(weight) or _needs_gradient(one.pos_weight):
                yield Decline(node, _BINARY, _LEARNED_WEIGHT)
                continue
            given = (one.input.argument, one.target.argument)
            scaled = _scaled(form, one.scale).scale(
                {"mean": math.prod(form.body.fake.shape)}, list(sources(given))
            )
            if scaled is None:
                continue
            reduction, steps = scaled
            weights = (v if v is None else v.argument for v in (weight, one.pos_weight))
            args = (*given, *weights, REDUCTIONS[reduction])
            weighted = weight is not None or one.pos_weight is not None
            match = self._match(node, _BINARY, args, {}, steps, weighted=weighted)
            if one.target.fake.dtype != example(node).dtype:
                match.kwargs.setdefault("dtype", example(node).dtype)
            yield match

    def _probabilities(self, node: Node, written: Written) -> Iterator[Match]:
        """The match of a loss of probabilities; none if its scale is not known."""
        counts = {"none": 1} if written.each else written.counts
        scaled = written.form.scale(counts, list(sources(written.args)))
        if scaled is None:
            return
        reduction, steps = scaled
        if written.each:
            reduction = "none"
        args = tuple(REDUCTIONS[reduction] if a == "reduction" else a for a in written.args)
        yield self._match(node, written.op, args, written.kwargs, [*written.last, *steps])

    def _calls(self, node: Node, form: NormalForm) -> Iterator[Match]:
        """A loss that is one call, without a reduction, and then reduced."""
        if bind(form.body.node) is None:
            return
        inner = next(self.candidates(form.body.node))
        if not isinstance(inner, Match):
            return
        names = [argument.name for argument in schema_of(inner.overload).arguments]
        place = names.index("reduction")
        if len(inner.args) <= place or inner.args[place] != REDUCTIONS["none"]:
            return
        scaled = form.scale({}, inner.inputs)
        if scaled is None:
            return
        args = list(inner.args)
        args[place], steps = REDUCTIONS["sum"], scaled[1]
        match = self._match(node, inner.op, tuple(args), inner.kwargs, steps)
        match.absorbed = inner.absorbed
        yield match

    def _likelihood(self, node: Node, loss: Loss, arguments: Arguments) -> Iterator[Match]:
        """nll_loss of log-probabilities that a softmax made: cross entropy of its logits."""
        log_probabilities = arguments["input"]
        if not isinstance(log_probabilities, Node) or not isinstance(arguments["target"], Node):
            return
        if not isinstance(example(log_probabilities), torch.Tensor):
            return
        found = self.algebra.logits(self.replay.of(log_probabilities), node)
        try:
            reduction = reduction_of(arguments)
        except UnsupportedError:
            return
        if found is not None and found[1] == min(found[0].fake.dim() - 1, 1):
            options = (arguments["weight"], reduction, arguments["ignore_index"], 0.0)
            args = (found[0].argument, arguments["target"], *options)
            yield self._match(node, "cross_entropy", args, {}, [])

    def _match(  # type: ignore[no-untyped-def]
        self, node, op, args, kwargs, steps, *, weighted=False
    ) -> Match:
        """A match of a node, with a dtype in which its steps do not overflow."""
        kwargs = dict(kwargs)
        result = example(node).dtype
        if result == torch.float16 and (steps or weighted or "weight" in kwargs):
            # A sum, or weights, may leave float16's range although the result does not.
            kwargs["dtype"] = torch.float32
            steps = [*steps, (aten.to.dtype, (result,))]
        match = Match(node, op, args, kwargs, steps=steps)
        match.interior = self._between(node, set(match.inputs))
        return match

    def _between(self, root: Node, inputs: set[Node]) -> list[Node]:
        """The nodes that the rewrite makes superfluous, the last one first."""
        before = ancestors(
            [root], until=inputs, past=lambda node: node is root or self._looked_into(node)
        )
        found = {node for node in before if node is not root and self._looked_into(node)}
        found |= {check for node in found for check in _size_checks(node)}
        return sorted(found, reverse=True)

    def _looked_into(self, node: Node) -> bool:
        return node.op in ("call_function", "call_method") and (
            self.replay.looked_at(node) or not isinstance(example(node), torch.Tensor)
        )


def _size_checks(node: Node) -> set[Node]:
    """The assertions about a size that depends on data, if nothing else reads that size."""
    value = example(node)
    if not isinstance(value, torch.Tensor) or not free_unbacked_symbols(value):
        return set()
    sizes = (user for user in node.users if user.target is aten.sym_size.int)
    checks = set(descendants(sizes))
    others = (check for check in checks if check.target not in SIZE_ASSERTIONS)
    if any(isinstance(example(other), torch.Tensor | type(None)) for other in others):
        return set()
    return checks


def _scaled(form: NormalForm, scale: float) -> NormalForm:
    return replace(form, constant=form.constant * scale)


def _product(weights: tuple[Value, ...]) -> Value | None:
    """The product of weights; None if torch refuses it."""
    product: Value | None = weights[0]
    for weight in weights[1:]:
        if product and product.fake.dtype == torch.float16:  # which may not hold it
            product = compute(aten.to.dtype, product, torch.float32)
        product = product and compute(aten.mul.Tensor, product, weight)
    return product


def _needs_gradient(value: Value | None) -> bool:
    if value is None or value.op is aten.new_full.default:  # of a number
        return False
    nodes = sources(value.argument)
    return any(getattr(example(node), "requires_grad", False) for node in nodes)


@cache
def _takes_weight(op: str) -> bool:
    schema = schema_of(getattr(torch.ops.fused, op).default)
    return any(argument.name == "weight" for argument in schema.arguments)
