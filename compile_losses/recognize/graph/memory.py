"""The memory of a Dynamo graph's tensors: which nodes mutate it, and when.

A Dynamo graph is not functional: ``labels[labels == -100] = 0`` is a node whose result nothing
reads. An op in the place of a loss reads its arguments where the loss stood, and again in the
backward. If a write comes before all reads of the loss from that memory, it is no reason to refuse.
A write between these reads is a reason. So is a write after the loss, if gradients are recorded.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from compile_losses.distributed import are_dtensors
from compile_losses.recognize.graph.symbolic_tensors import example
from compile_losses.torch_internals.eager import get_unwrapped, is_functorch_wrapped_tensor
from compile_losses.torch_internals.graphs import GRAPH_ARGUMENT
from compile_losses.torch_internals.ops import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    schema_of,
    tree_leaves,
)
from compile_losses.torch_internals.tensors import (
    FakeTensor,
    base_of,
    counter_of,
    shard_of,
    storage_id,
    version_of,
    writes_of_making,
)

aten = torch.ops.aten

#: Python's statements that may write a sum over its first term, and the functions of the sums.
_SUMS = {operator.iadd: operator.add, operator.isub: operator.sub}
#: Python's statements and operators that write to their first operand.
_OPERATORS = {operator.setitem, operator.delitem} | {
    getattr(operator, f"i{name}")
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("and", "or", "xor", "lshift", "rshift", "concat"),
    )
}
#: Methods that end in an underscore and write no elements.
_NOT_WRITES = {"requires_grad_", "share_memory_", "rename_"}
#: Functions that give their first argument other memory, which counts as a write to the old one.
_SWAPS = {"set_", Tensor.set_, *(getattr(aten.set_, name) for name in aten.set_.overloads())}
#: The classes of graph inputs that the kernels take as they are.
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
#: Modules whose functions write only to what their names and arguments say.
_TRANSPARENT = ("torch", "_operator", "operator", "math", "builtins", "itertools", "numpy")
#: Functions and methods that see where a tensor lies, or who else has its gradient.
_SEES = (
    *("as_strided", "stride", "storage_offset", "untyped_storage", "data_ptr", "is_contiguous"),
    *("register_hook", "retain_grad", "requires_grad_"),
)


#: Why a write is in the way that comes later than a loss.
_AFTER = "after the loss, whose backward may read it"


class Made:
    """What tracing made of a graph's inputs, and how often it wrote to them in making them.

    An input that is no view may share memory with another one, as parameters of one flat buffer do.
    Tracing gives such a tensor its memory by ``set_``, which counts as a write.

    Args:
        graph: as Dynamo captured it.
        outer: of the graph around it, some of whose tensors are its inputs.
    """

    def __init__(self, graph: Graph, outer: Made | None = None) -> None:
        self._writes: dict[int, int] = {} if outer is None else dict(outer._writes)
        counters, storages = set(), set()
        for node in graph.find_nodes(op="placeholder"):
            value, given = example(node), _given(node)
            if type(value) is not FakeTensor or type(given) not in _PLAIN:
                continue
            base = base_of(given)
            if (storage := storage_of(base)) is None or counter_of(base) in counters:
                continue
            if base.storage_offset() > 0 or storage in storages:
                self._writes[counter_of(value)] = writes_of_making()
            counters.add(counter_of(base))
            storages.add(storage)

    def is_written(self, value: Any) -> bool:
        """Whether something else wrote to it in tracing; ``tensor.data`` counts for itself."""
        while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
            value = get_unwrapped(value)
        if not isinstance(value, Tensor) or value.is_inference():  # which has no version
            return False
        return version_of(value) > self._writes.get(counter_of(value), 0)


def _given(placeholder: Node) -> Any:
    """What the user's function was called with, where Dynamo keeps it."""
    return getattr(placeholder.meta.get(GRAPH_ARGUMENT), "example", None)


class Memory:
    """The writes to the memory of one graph's tensors.

    Args:
        graph: as Dynamo captured it.
        outer, at: if the graph is the body of a higher-order op, the memory of the graph around it,
            and the op's node in that graph.
        made: what tracing made of the inputs of the graph around it, if there is one.
    """

    def __init__(
        self,
        graph: Graph,
        outer: Memory | None = None,
        at: Node | None = None,
        made: Made | None = None,
    ) -> None:
        self.at, self.made = at, Made(graph, made)
        #: For each piece of memory, the nodes that write to it, in order.
        self.writers: dict[int | None, list[Node]] = {}
        #: Those of them that are sums over their first term.
        self.sums = {node for node in graph.nodes if is_sum_over_term(node)}
        for node in graph.nodes:
            for written in {storage_of(value) for value in _written_by(node, self.made)} - {None}:
                self.writers.setdefault(written, []).append(node)
        #: Memory that was written to, by unknown nodes.
        self.unexplained = {
            storage
            for value in map(example, graph.nodes)
            if self.made.is_written(value)
            and (storage := storage_of(value)) not in (None, *self.writers)
        }
        #: Memory that the graphs around this one write to after it has run.
        self.later: dict[int | None, str] = {}
        #: The class of graph inputs, by name, if their example values hide it.
        self.classes: dict[int | None, str] = {}
        for node in graph.find_nodes(op="placeholder"):
            value, given = example(node), _given(node)
            is_hidden = type(value) is FakeTensor and isinstance(given, Tensor)
            if is_hidden and type(given) not in _PLAIN:
                self.classes[storage_of(value)] = type(given).__name__
        if outer is not None and at is not None:
            self.classes |= outer.classes
            self.unexplained |= outer.unexplained
            # The versions of this graph's inputs also count writes of the graph around it.
            self.unexplained -= outer.writers.keys()
            self.later |= outer.later
            for storage, writers in outer.writers.items():
                if any(at < writer for writer in writers):
                    self.later[storage] = next(w.name for w in writers if at < w)

    @property
    def written(self) -> bool:
        """Whether any of it is written to."""
        return bool(self.writers or self.unexplained or self.later)

    @property
    def storages(self) -> set[int | None]:
        return {*self.writers, *self.unexplained}

    def conflict(self, storage: int | None, first: Node, root: Node) -> str | None:
        """Why an op in the place of ``root`` may not read a piece of memory; None if it may.

        Args:
            storage: the memory, as :func:`storage_of` names it.
            first: the first node, up to root, that reads it or makes it.
            root: the node that holds the loss.
        """
        if storage is None or not self.written:
            return None
        if storage in self.unexplained:
            return "is changed in place in this graph"
        is_trained = getattr(example(root), "requires_grad", True)
        for writer in self.writers.get(storage, ()):
            if writer < first:
                continue
            if writer in self.sums and first < writer:
                continue  # of a term that was made for this sum, and is no argument
            if not root < writer:
                return f"is changed in place by {writer.name} while the loss is computed"
            if is_trained:
                return f"is changed in place by {writer.name} {_AFTER}"
        if is_trained and storage in self.later:
            return f"is changed in place by {self.later[storage]} {_AFTER}"
        return None


_found: WeakKeyDictionary[Graph, Memory] = WeakKeyDictionary()


def memory_of(graph: Graph) -> Memory:
    """The result of :func:`look_at` for a graph."""
    if graph not in _found:
        _found[graph] = Memory(graph)
    return _found[graph]


def is_written(node: Node) -> bool:
    """Whether a node writes to the memory that another one returns.

    What a rewrite puts in its place has to be no view: autograd's gradient of a write to a view
    goes through the memory of all that it is a view of.
    """
    return storage_of(example(node)) in memory_of(node.graph).writers


def look_at(graph: Graph, outer: Graph | None = None, at: Node | None = None) -> Memory:
    """Goes through a graph anew, before its losses are looked for; see :class:`Memory`.

    Nodes that a rewrite adds or removes write to nothing.
    """
    around = None if outer is None else memory_of(outer)
    _found[graph] = Memory(graph, around, at, None if around is None else around.made)
    return _found[graph]


def is_sum_over_term(node: Node) -> bool:
    """Whether a node is ``a += b`` or ``a -= b`` for a new tensor a that nothing else reads.

    The result is that of ``a + b`` or ``a - b``.
    """
    if node.op != "call_function" or node.target not in _SUMS or len(node.args) != 2:
        return False
    term = node.args[0]
    if not isinstance(term, Node) or len(term.users) != 1 or term in node.args[1:]:
        return False
    if is_sum_over_term(term):
        return True
    module = getattr(term.target, "__module__", None) or "torch"
    if term.op != "call_method" and (
        term.op != "call_function"
        or isinstance(term.target, HigherOrderOperator)
        or not module.startswith(_TRANSPARENT)
    ):
        return False
    storage = storage_of(example(term))
    return storage is not None and all(
        storage_of(source) != storage
        for argument in term.all_input_nodes
        for source in tree_leaves(example(argument))
    )


def may_be_left_out(node: Node, read: Iterable[Node]) -> bool:
    """Whether what reads a tensor may read what is made of others in its place: nobody returns it
    or sees where it lies, and the memory that is read before and after is not written to.

    Args:
        read: the nodes whose memory that is. They have to be plain tensors.
    """
    memory = memory_of(node.graph)
    tensors = [example(each) for each in read if isinstance(example(each), Tensor)]
    storages = set(map(storage_of, tensors))
    (output,) = node.graph.find_nodes(op="output")
    own = storage_of(example(node))
    if (
        not all(type(tensor) is FakeTensor for tensor in tensors)
        or None in (own, *storages)
        or storages & {*memory.storages, *memory.later}
        or own in {storage_of(example(n)) for n in output.all_input_nodes}
    ):
        return False
    views = [n for n in node.graph.nodes if storage_of(example(n)) == own]
    return not any(_sees_memory(user) for view in views for user in view.users)


def _sees_memory(node: Node) -> bool:
    """Whether a node may see more of a tensor than its numbers."""
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return isinstance(target, HigherOrderOperator) or name.partition(".")[0] in _SEES


def function_of(node: Node) -> Any:
    """The function that a node calls; of a sum over its first term, the one that writes nothing."""
    target: Any = node.target
    return _SUMS[target] if is_sum_over_term(node) else target


def storage_of(value: Any) -> int | None:
    """The identity of a tensor's memory; None if it has no memory that can be told apart."""
    while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    if are_dtensors(value):
        value = shard_of(value)
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested:
        return None
    try:
        return storage_id(value)
    except NotImplementedError:  # a subclass without memory of its own
        return None


def bodies(node: Node) -> Iterator[tuple[str, GraphModule]]:
    """The graphs that a higher-order op runs, with their names in the module around them."""
    module = node.graph.owning_module
    for source in node.all_input_nodes:
        if source.op == "get_attr" and module is not None:
            body = getattr(module, str(source.target), None)
            if isinstance(body, GraphModule):
                yield str(source.target), body


def _written_by(node: Node, made: Made) -> list[Any]:
    """The example values of the tensors that a node may write to."""
    return [example(argument) for argument in tree_leaves(list(_written_arguments(node, made)))]


def _written_arguments(node: Node, made: Made) -> Iterator[Any]:
    """The arguments that a node may write to, None among them."""
    if node.target in _SWAPS:
        yield from _before_swap(node)
    if node.op == "call_method":
        if _is_in_place(str(node.target)) or str(node.target).startswith("__i"):
            yield node.args[0]
    elif node.op == "call_module":
        yield from (n for n in node.all_input_nodes if made.is_written(example(n)))
    elif node.op == "call_function":
        target: Any = node.target
        yield node.kwargs.get("out")
        if isinstance(target, OpOverload):
            yield from _by_schema(node, [target])
        elif isinstance(target, OpOverloadPacket):
            yield from _by_schema(node, [getattr(target, name) for name in target.overloads()])
        elif isinstance(target, HigherOrderOperator):
            yield from _by_bodies(node, made)
        elif getattr(target, "__module__", None) == "_operator":  # and_, or_, not_ write nothing
            yield node.args[0] if target in _OPERATORS else None
        elif _is_in_place(getattr(target, "__name__", "")):
            is_method = isinstance(target, types.MethodDescriptorType)
            yield from node.args[:1] if is_method else node.all_input_nodes
        elif not (getattr(target, "__module__", None) or "torch").startswith(_TRANSPARENT):
            # A function that Dynamo was told to leave whole.
            yield from (n for n in node.all_input_nodes if made.is_written(example(n)))
        elif _says_in_place(node):
            yield from node.all_input_nodes[:1]


def _before_swap(node: Node) -> Iterator[Any]:
    """The tensors that share the old memory, and version, of a tensor that is given other memory.

    The tensor's example already has the new memory.
    """
    for tensor in node.all_input_nodes[:1]:
        yield from tensor.all_input_nodes


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITES


def _says_in_place(node: Node) -> bool:
    """``relu(x, inplace=True)``, by keyword or by position."""
    if node.kwargs.get("inplace"):
        return True
    if True not in node.args:
        return False
    assert callable(node.target)
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False
    return bool(bound.arguments.get("inplace"))


def _by_schema(node: Node, overloads: Iterable[Any]) -> Iterator[Any]:
    """The node's arguments that one of some overloads would write to."""
    for overload in overloads:
        for place, argument in enumerate(schema_of(overload).arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if argument.name in node.kwargs:
                yield node.kwargs[argument.name]
            elif not argument.kwarg_only and place < len(node.args):
                yield node.args[place]


def _by_bodies(node: Node, made: Made) -> Iterator[Any]:
    """The tensors that a higher-order op's graphs write to; all of its inputs without a graph."""
    found = [body for _, body in bodies(node)]
    if not found:
        yield from node.all_input_nodes
        return
    written = {storage for body in found for storage in Memory(body.graph, made=made).storages}
    yield from (n for n in node.all_input_nodes if storage_of(example(n)) in written)
    # A body may write to a view of an input, and may return a tensor that it writes to.
    if storage_of(example(node)) in written:
        yield node
