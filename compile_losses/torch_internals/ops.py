"""Ops, their schemas and the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

# The classes of what a graph's node calls: without them ops can't be told from other functions.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket

# The strides of a pointwise op's result. If their rule changed, a fake would say other strides than
# the kernels, which torch's opcheck finds.
from torch._prims_common import (
    compute_elementwise_output_strides as compute_elementwise_output_strides,
)
from torch.fx import Node

# The reduction that the deprecated size_average and reduce ask for. If its rule changed, a call
# with these would be rewritten to another reduction than torch's.
from torch.nn._reduction import legacy_get_string as legacy_get_string

# For arguments that are nested in any way. A kind of nesting that they did not know would hide the
# nodes in it.
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

#: Torch's C functions of neural networks, as Dynamo's graphs hold them. A function that moved from
#: here would not be recognised where a model calls it by this name.
nn_functions: Any = torch._C._nn

#: The assertions about sizes that Dynamo records. Other ones would count as users of a loss's
#: parts, which then stays torch's.
SIZE_ASSERTIONS: tuple[Any, ...] = (
    torch.ops.aten._assert_scalar.default,
    torch._check,
    torch._check_is_size,
)

#: The dispatch key of autograd and what is above it. Excluding another one would record gradients.
AUTOGRAD_KEY = torch._C.DispatchKey.AutogradFunctionality

#: Runs an op by its handle, past Python's part of the dispatcher. Without it the short way of eager
#: calls is gone.
call_boxed = torch._C._dispatch_call_boxed
#: Whether this thread excludes a dispatch key, and its setter: as BelowAutograd, at less cost.
is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
#: The context below autograd. Without it ops that are not differentiable would call themselves.
BelowAutograd = torch._C._AutoDispatchBelowAutograd
#: The context below that and the tracking of views. Without it a function that an op compiles would
#: be compiled again when the op is called from elsewhere.
BelowViews = torch._C._AutoDispatchBelowADInplaceOrView
#: Whether an op has a kernel for a dispatch key, named; decides what a device is asked to do.
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
#: The name of a device type's dispatch key. A wrong one has no kernel, and its gradients stay in
#: the backward.
key_of_device = torch._C._dispatch_key_for_device


def call_of(op: OpOverload[..., Any]) -> Callable[..., Any]:
    """What a call of an overload ends in; it goes as :func:`replace_call` goes."""
    return op._op


def replace_call(op: OpOverload[..., Any], call: Callable[..., Any]) -> None:
    """Has a call of an overload end in a function. Without it compiled code would take the long way
    to each op. An overload's hash is that of what it calls, so this comes before any dict has it.

    Args:
        call: gets the arguments of the overload.
    """
    op._op = call


def take_back(library: torch.library.Library) -> None:
    """Removes what was registered through a library: kernels that it had replaced are called again.
    Without it they could be switched off, and never on."""
    library._destroy()


#: What Dynamo calls where an autocast begins and ends. Without them a layer would be taken for one
#: that torch refuses.
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast


def schema_of(op: Any) -> Any:
    """An overload's schema: names, defaults and aliases of its arguments. Without it no argument of
    a call is known by its name, and no write to one is seen."""
    return op._schema


def given_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call gives an overload, by the names in its schema."""
    names = [argument.name for argument in schema_of(op).arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def named_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call of an overload by the names in its schema; also those that tracing
    left out because they are the defaults."""
    arguments = schema_of(node.target).arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {**defaults, **given_arguments(node.target, node.args, node.kwargs)}


def with_defaults(op: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """The positional arguments of a call, with the defaults that the dispatcher leaves out.

    The multiple that an addition takes stays out: whatever it takes besides two operands is one.
    """
    rest = schema_of(op).arguments[len(args) :]
    given = takewhile(
        lambda a: a.has_default_value() and not a.kwarg_only and a.name != "alpha", rest
    )
    return (*args, *(argument.default_value for argument in given))


def draws_random_numbers(op: Any) -> bool:
    """Whether an op's results are others in each call."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


#: Of the ops of process groups, those that send nothing.
_SILENT = ("wait_tensor", "_wrap_tensor_autograd")


def communicates(op: Any) -> bool:
    """Whether an op is a collective, or sends to one process or receives from it."""
    is_op = isinstance(op, OpOverload)
    return is_op and "c10d" in op.namespace and op._opname not in _SILENT


def is_pure(op: Any) -> bool:
    """Whether an op's results depend on its arguments alone, to which it does not write."""
    is_op = isinstance(op, OpOverload) and not communicates(op)
    return is_op and not schema_of(op).is_mutable and not draws_random_numbers(op)


def packet_of(op: Any) -> Any:
    """The overloads of which an op is one. Recognition takes those of one name alike; without it
    losses that are written out in ops are not recognised."""
    return op._overloadpacket


def handle_of(op: Any) -> Any:
    """What :data:`call_boxed` takes for an op; it goes as that goes."""
    return op._handle
