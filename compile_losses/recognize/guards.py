"""Reasons not to rewrite a match: a flat list of refusals. Each returns its reason, or None."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node

from compile_losses import implementations, library
from compile_losses.distributed import are_dtensors
from compile_losses.graphs import ancestors
from compile_losses.recognize.graph.aten_replay import expanded_source
from compile_losses.recognize.graph.memory import memory_of, storage_of
from compile_losses.recognize.graph.symbolic_tensors import Value, examples, fake_mode
from compile_losses.recognize.match import UNASKED, Match, example
from compile_losses.request import Request
from compile_losses.torch_internals.eager import is_functorch_wrapped_tensor
from compile_losses.torch_internals.ops import tree_leaves
from compile_losses.torch_internals.tensors import FakeTensor


def _tensors(match: Match) -> list[Tensor]:
    return [value for value in map(example, match.inputs) if isinstance(value, Tensor)]


def unknown_values(match: Match) -> str | None:
    if all(example(node) is not None for node in (match.root, *match.inputs)):
        return None
    return "the graph does not say what the loss's arguments are"


def symbols(match: Match) -> str | None:
    """A symbolic size belongs to a node. An argument that the rewrite computes can't hold one."""
    waiting = [match.args, match.kwargs]
    while waiting:
        for argument in tree_leaves(waiting.pop()):
            if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
                return "what feeds it depends on a size that the graph has no node for"
            if isinstance(argument, Value) and not argument.whole:
                waiting += [argument.args, argument.kwargs]
    return None


def inside_functorch(match: Match) -> str | None:
    if any(is_functorch_wrapped_tensor(t) for t in _tensors(match)):
        return "inside torch.func, where custom ops have no rules"
    return None


def tensor_subclass(match: Match) -> str | None:
    """The op would lose what a class of its own does with a tensor."""
    for tensor in _tensors(match):
        if type(tensor) not in (FakeTensor, Tensor, torch.nn.Parameter) and not (
            are_dtensors(tensor)
        ):
            return f"{type(tensor).__name__} arguments are not supported: plain tensors are"
    # Tracing does not see a class without a __torch_dispatch__ of its own; the ops would get it.
    classes = memory_of(match.root.graph).classes
    for tensor in _tensors(match):
        storage = storage_of(tensor)
        name = None if storage is None else classes.get(storage)
        if name is not None:
            return f"{name} arguments are not supported: call .as_subclass(torch.Tensor) before"
    return None


def not_strided(match: Match) -> str | None:
    for tensor in _tensors(match):
        if tensor.layout != torch.strided or tensor.is_nested:
            return f"{tensor.layout} tensors are not supported: dense ones are"
    return None


def nothing_computes(match: Match) -> str | None:
    """Neither kernels nor torch's ops compute the loss on the device of an argument. If kernels
    could be built, the user is told how."""
    for device in dict.fromkeys(tensor.device for tensor in _tensors(match)):
        if not implementations.has_kernels(device):
            reason = library.no_kernels(device)
            if device.type in library.kernels and reason not in (None, implementations.OFF):
                library.warn_of_no_kernels(device.type, str(reason))
        reason = implementations.none_on(device)
        if reason is not None:
            return f"nothing computes it on {device.type}: {reason}"
    return None


def better_left_to_torch(match: Match, request: Request) -> str | None:
    """Why a loss of held logits, or of elements, is torch's where there are no kernels.

    In torch's ops an op of ours is slower than what Inductor makes of the same ops. So the plan
    decomposes such losses, if there will be one; a loss with its linear layer saves memory with any
    ops, and of DTensors torch refuses some losses.
    """
    without = [t.device for t in _tensors(match) if not implementations.has_kernels(t.device)]
    if not without or match.op.startswith("linear_"):
        return None
    if are_dtensors(*_tensors(match)):
        return None
    if request.lowers:
        if not match.inputs[0].users.keys() - match.span:
            return None
        return "there are no kernels, and Inductor shares what other readers of its input compute"
    reason = " and ".join(implementations.choose(without[0]).reasons)
    return f"no kernels on {without[0].type} ({reason}): the op would be slower than torch's"


def mutated(match: Match) -> str | None:
    """The graph writes to memory that the loss reads, so that the op would read other values.

    A write before all reads of the loss from that memory is no reason. A write after the loss is a
    reason if gradients are recorded: the op's backward reads the op's arguments, and torch's
    backward reads results of torch's forward.
    """
    span, memory = match.span, memory_of(match.root.graph)
    if match.interior and any(
        isinstance(value, Tensor) and value.is_inference()
        for value in map(example, (*match.inputs, *match.interior))
    ):
        return "tensors of inference mode keep no record of being changed in place"
    if not memory.written:
        return None
    #: For each piece of memory, the first node of the loss that reads or makes it.
    first: dict[int, Node] = {}
    for node in sorted(span):
        for touched in (*node.all_input_nodes, node):
            first.setdefault(storage_of(example(touched)) or 0, node)
    for node in dict.fromkeys([*match.inputs, *sorted(span)]):
        storage = storage_of(example(node))
        if storage is None or storage not in first or node is match.root:
            continue  # the loss itself is nobody's argument
        reason = memory.conflict(storage, first[storage], match.root)
        if reason is not None:
            return f"{node.name} {reason}"
    return None


def gradient_cut(match: Match) -> str | None:
    """An intermediate computed under no_grad stops gradients, which the op would let through.

    The op runs in the grad mode of the root. If no node between an intermediate and the root
    changes that mode, the root is under no_grad as well, and so is the op.
    """
    for node in match.interior:
        value = example(node)
        if not isinstance(value, Tensor) or value.dtype == torch.bool:  # which no gradient passes
            continue
        expanded = expanded_source(node)
        read = node.all_input_nodes if expanded is None else [expanded]
        sources = tree_leaves([example(source) for source in read])
        needed = any(isinstance(s, Tensor) and s.requires_grad for s in sources)
        if needed == value.requires_grad:
            continue
        if not needed or changes_grad_mode(node, match.root):
            return f"{node.name} is computed without gradients"
    return None


def gradient_lost(match: Match) -> str | None:
    """Torch also sends gradients to tensors that the match reads besides the op's arguments.

    Through the op, such a tensor gets its gradient only from arguments that are made of it. If one
    of these has no gradient, the tensor's is lost.
    """
    inputs, inside = set(match.inputs), {match.root, *match.interior}
    for source in {s for node in inside for s in node.all_input_nodes} - inside - inputs:
        if not getattr(example(source), "requires_grad", False):
            continue
        for argument in inputs:
            tensor = example(argument)
            cut = isinstance(tensor, Tensor) and tensor.is_floating_point()
            if cut and not tensor.requires_grad and _made_from(argument, source):
                return f"{argument.name} is computed without gradients"
    return None


def _made_from(node: Node, source: Node) -> bool:
    return source in ancestors([node], past=lambda each: not each < source)


def changes_grad_mode(first: Node, last: Node) -> bool:
    """Whether a node from the first on and before the last one switches gradients on or off."""
    node = first
    while node is not last:
        name = getattr(node.target, "__name__", "")
        if "grad_enabled" in name or "inference_mode" in name:
            return True
        node = node.next
    return False


def different_result(match: Match) -> str | None:
    """Runs the op on the traced values: it must accept them and return what the root holds."""
    expected = example(match.root)
    try:
        result = _evaluate(match)
    except Exception as error:
        return " ".join(str(error).split())
    for name in ("dtype", "shape", "device"):
        ours, torchs = getattr(result, name), getattr(expected, name)
        if ours != torchs:
            return f"the loss would change its {name} from {torchs} to {ours}"
    if result.stride() != expected.stride():
        return f"the loss would change its strides from {expected.stride()} to {result.stride()}"
    # The same loss may be a DTensor of other placements, whose part on a rank is another.
    is_read = any("local" in str(user.target) for user in match.root.users)
    ours, torchs = (getattr(tensor, "placements", None) for tensor in (result, expected))
    if is_read and ours != torchs:
        return f"a rank's part of it is read, which would be {ours} instead of {torchs}"
    return None


#: What compares two tensors bit by bit, and what leaves numbers as they are, or turns their sign.
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
_SAME_NUMBERS = ("neg", "unsqueeze", "squeeze", "view", "reshape", "getitem", "to", "float")


def compared(match: Match) -> str | None:
    """A rank counts the log-probabilities of a row that are as large as one of them, that one
    included, which the op may round otherwise."""
    inside, waiting = set(match.interior), [match.root]
    while waiting:
        for user in waiting.pop().users:
            name = getattr(user.target, "__name__", user.target)
            if name in _COMPARISONS and inside.intersection(user.all_input_nodes):
                return f"{user.name} compares it with what it is picked from"
            waiting += [user] * (name in _SAME_NUMBERS)
    return None


def _evaluate(match: Match) -> Tensor:
    """The fake that the op and the steps after it return."""
    args, kwargs = examples((match.args, match.kwargs))
    modes = map(fake_mode, (*args, *kwargs.values()))
    with next(mode for mode in modes if mode is not None), torch.no_grad():
        result: Tensor = match.overload(*args, **kwargs)
        for function, rest in match.steps:
            result = function(result, *examples(rest))
    return result


#: Each says why a match may not be rewritten; None if it knows no reason.
GUARDS: list[Callable[[Match], str | None]] = [
    unknown_values,
    symbols,
    inside_functorch,
    tensor_subclass,
    not_strided,
    nothing_computes,
    mutated,
    gradient_cut,
    gradient_lost,
    different_result,
    compared,
]


def refusal(match: Match) -> str | None:
    """The first guard's reason, or None when the match may be rewritten.

    The guards are asked once; whoever asks again gets the same answer.
    """
    if match.refusal is UNASKED:
        reasons = (guard(match) for guard in GUARDS)
        match.refusal = next((reason for reason in reasons if reason is not None), None)
    return match.refusal
