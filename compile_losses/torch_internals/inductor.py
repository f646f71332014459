"""AOTAutograd and Inductor. Importing this loads them."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._functorch.config

# What the partitioner takes for cheap, fusible and random: the costs are as good as these are.
from torch._functorch.partitioners import OpTypes as OpTypes
from torch._functorch.partitioners import get_default_op_list as get_default_op_list
from torch._guards import TracingContext

# Inductor's front, as a module, whose functions tests replace. Without its ``inner_compile``
# explain could not stop before code is generated, and reports would have no plans.
from torch._inductor import compile_fx as compile_fx

# Inductor's options, and the slots of its custom passes: without the slots no pass runs.
from torch._inductor import config as config

# The names of Inductor's options: without them a wrong one could not be told from those.
from torch._inductor import list_options as list_options

# The base class of a pass whose identity enters the keys of Inductor's caches. Of any other class,
# a pass would switch the caches off.
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass

# How Inductor writes ops in other ops; decomposed losses get the same.
from torch._inductor.decomposition import select_decomp_table as select_decomp_table

# What Inductor raises where it can't compile a graph. Without it one that Inductor can't compile
# with our ops would not be compiled without them.
from torch._inductor.exc import InductorError as InductorError

#: The default backend of torch.compile, with a mode and options, to which losses go rewritten.
InductorBackend = torch._TorchCompileInductorWrapper

_compile = InductorBackend.__call__


def compile_with_inductor(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """What the default backend does by itself."""
    return _compile(backend, *args, **kwargs)


def go_around_inductor(function: Any) -> None:
    """Has ``torch.compile`` call a function in the place of its default backend. Without it losses
    in graphs from Inductor's caches were not counted, and ``enable`` could not change what a
    compiled graph returns.

    Args:
        function: is called with what it replaces, and with the same arguments. It may be called
            again for a graph that it has passed on, if others replace the backend as well.
    """
    following = InductorBackend.__call__
    if getattr(following, "function", None) is function:
        return

    def around(*args: Any, **kwargs: Any) -> Any:
        return function(following, *args, **kwargs)

    around.function = function  # type: ignore[attr-defined]
    InductorBackend.__call__ = around  # type: ignore[method-assign]


#: The slots of the three passes. One of another name would be refused as an unknown option.
PRE_GRAD, JOINT, POST_GRAD = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "post_grad_custom_post_pass",
)


def activation_memory_budget() -> float:
    """Of what autograd saves, the part that may be kept; below 1 a forward may run twice."""
    budget: float = torch._functorch.config.activation_memory_budget
    return budget


def without_autograd_cache() -> AbstractContextManager[Any]:
    """AOTAutograd compiles anew, and a backward at once: explain is told of every pass."""
    return torch._functorch.config.patch(
        enable_autograd_cache=False, force_non_lazy_backward_lowering=True
    )


def store_in_place(op: Any) -> None:
    """Has Inductor compute the second argument of a call, which nothing else may read, into the
    memory of the first. Without it Inductor would call the op, for which it writes the second
    argument to memory of its own.

    Inductor first computes what reads the first argument, all of it: a buffer for each op, and so
    many that it no longer fuses them. Here it computes what a later call reads.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    if op in lowering.lowerings:
        return

    def store(buffer: Any, values: Any) -> None:
        graph = V.graph
        here = graph.current_node
        waiting = {
            id(value)
            for node, result in graph.env.items()
            if any(user is not here and user not in graph.env for user in node.users)
            for value in (result if isinstance(result, list | tuple) else [result])
        }
        buffer.realize()
        name = buffer.get_name()
        readers = graph.name_to_users.get(name, [])
        graph.name_to_users[name] = [reader for reader in readers if id(reader) in waiting]
        computed = values.data
        if not isinstance(computed, ir.StorageBox):
            computed = ir.Pointwise.create(
                device=buffer.get_device(),
                dtype=buffer.get_dtype(),
                inner_fn=values.make_loader(),
                ranges=buffer.get_size(),
            ).data
        ir.MutationLayoutSHOULDREMOVE.realize_into(computed, buffer.data)

    lowering.register_lowering(op, type_promotion_kind=None)(store)


def donated_inputs() -> tuple[int, ...]:
    """The places of the inputs that the backward being compiled may overwrite. Without them the
    gradient is scaled in a new buffer."""
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    return tuple(context.fw_metadata.bw_donated_idxs or ())


def uses_cuda_graphs(options: dict[str, Any]) -> bool:
    """Whether Inductor runs what it compiles with these options as CUDA graphs, whose results the
    next run overwrites. Where it was missed, late logits would be computed of other numbers."""
    cuda_graphs: bool = options.get("triton.cudagraphs", config.triton.cudagraphs)
    return cuda_graphs


def is_to_be_saved() -> bool:
    """Whether what is compiled will be written to a file. What is around it would be lost."""
    return bool(
        getattr(torch._functorch.config, "bundled_autograd_cache", False)
        or getattr(torch._dynamo.config, "caching_precompile", False)
    )


def inside_pre_grad_passes() -> bool:
    """Whether Inductor's passes before autograd run on a graph that is inside another."""
    return _calls_of("_recursive_pre_grad_passes") > 1


def inside_post_grad_passes() -> bool:
    """The same of its passes after autograd; taken for the outermost graph, such a graph would
    overwrite inputs that are not its own."""
    return _calls_of("_recursive_post_grad_passes") > 1


def _calls_of(function: str) -> int:
    """How many calls of a function of Inductor's this one is inside of."""
    frame, calls = sys._getframe(), 0
    while frame is not None:
        calls += frame.f_code.co_name == function
        frame = frame.f_back  # type: ignore[assignment]
    return calls
