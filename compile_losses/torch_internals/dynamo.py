"""Dynamo. Importing this loads it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, NoReturn, TypeVar

import torch
from torch._dynamo import compiled_autograd, config, eval_frame, symbolic_convert

# Runs a function while Dynamo traces the call of it. Without it the warnings of a compiled loss
# would break its graph.
from torch._dynamo.comptime import comptime as comptime

# Says that a size may change. Without it a function of chunks is compiled for each size of them.
from torch._dynamo.decorators import maybe_mark_dynamic as maybe_mark_dynamic

# By which Dynamo asks itself to trace a function anew. Taken for an error, it would cost a loss.
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis

# An error of a backend that reaches users as it is; any other is wrapped into one of Dynamo's.
from torch._dynamo.exc import ShortenTraceback as ShortenTraceback

# By which Dynamo ends a graph. Raised otherwise, it would be an error.
from torch._dynamo.exc import unimplemented

# How Dynamo names what it guards. An input of ours without a name would not be guarded.
from torch._dynamo.source import AttrSource

# What Dynamo counts, its reasons for graph breaks among it. Without it a report has none of these.
from torch._dynamo.utils import counters as counters

# Where Dynamo is while it traces.
from torch._guards import TracingContext

# The class of classes of autograd functions, by which Dynamo tells these: a class of another one is
# traced as any class, and so a known head's ``apply`` as a function.
from torch.autograd.function import FunctionMeta as FunctionMeta

_T = TypeVar("_T")
_reset_code: Callable[[CodeType], None] = torch._C._dynamo.eval_frame.reset_code

#: From the name of a backend to the backend, for the option ``inner_backend``.
lookup_backend = torch._dynamo.lookup_backend
#: The names of all backends, to say which one was meant.
list_backends = torch._dynamo.list_backends


def without_recompile_limits() -> AbstractContextManager[Any]:
    """Compiles what was compiled often before; otherwise it would run uncompiled, unseen."""
    return config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16)


def without_earlier_sizes() -> AbstractContextManager[Any]:
    """Compiles for the sizes that are given. Otherwise what was given others before, as by an
    earlier ``explain``, would have symbols in their place."""
    return config.patch(automatic_dynamic_shapes=False)


def source_of_input(placeholder: Any) -> Any:
    """How a graph's input is named in guards."""
    return placeholder._dynamo_source


def name_input(placeholder: Any, source: Any, attribute: str = "") -> None:
    """Names an input in guards: as another one, or as an attribute of that."""
    placeholder._dynamo_source = AttrSource(source, attribute) if attribute else source


def compiles_backwards() -> bool:
    """Whether backwards are compiled as a whole. Hooks of nodes don't run in them as elsewhere."""
    return bool(compiled_autograd.compiled_autograd_enabled)


def code_that_is_compiled() -> CodeType | None:
    """The code of the function that Dynamo traces. Without it nobody could compile it once more."""
    tracer = getattr(symbolic_convert.tls, "current_tx", None)
    return None if tracer is None else tracer.f_code


def leave_to_eager(what: str) -> NoReturn:
    """Ends the graph that Dynamo traces: eager code does what comes next."""
    unimplemented(
        gb_type="an op of a tensor of compile_losses",
        context=what,
        explanation=f"{what} has to run as it is.",
        hints=[],
    )


def may_compile() -> bool:
    """Whether a function that has to be compiled once more will be: ``torch.compiler.set_stance``
    may forbid it."""
    return bool(eval_frame._stance.stance == "default")


def forget_compiled(code: CodeType) -> None:
    """Lets Dynamo compile a function once more, when it is called the next time."""
    _reset_code(code)


def in_compiled_backward() -> bool:
    """Whether a backward runs that was compiled as a whole. It takes every gradient for defined,
    and does not say which of them it needs."""
    return compiled_autograd.in_compiled_autograd_region


def is_captured(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph is one that Dynamo captured, whole. A part of one hands its outputs to
    another, in which lazy logits would be taken for plain ones."""
    return "dynamo_flat_name_to_original_fqn" in gm.meta


def break_after(gm: torch.fx.GraphModule) -> tuple[str, int] | None:
    """The file and line of the graph break that ended a captured graph; None where the function
    ended. Without it a report does not say which break keeps a head from its loss."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return None
    frame = reason.user_stack[-1]
    return frame.filename, frame.lineno


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """What was given to ``torch.compile``. The compiled one would run inside explain's own."""
    if isinstance(function, eval_frame.OptimizedModule):
        return function._orig_mod
    if isinstance(function, torch.nn.Module) and function._compiled_call_impl is not None:
        return function._call_impl
    return eval_frame.innermost_fn(function)


def backend_of(function: Callable[..., Any]) -> Any:
    """The backend that a function or module is compiled for, as ``torch.compile`` has it, with its
    options; None if it is not compiled. Without it explain would not know these options."""
    callback: Any
    if isinstance(function, eval_frame.OptimizedModule):
        callback = function.dynamo_ctx.callback
    else:
        if isinstance(function, torch.nn.Module):
            function = function._compiled_call_impl  # type: ignore[assignment]
        if not hasattr(function, "_torchdynamo_orig_callable"):
            return None
        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        callback = {name: cell.cell_contents for name, cell in free}.get("callback")
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def constant_in_graphs(function: Callable[..., _T]) -> Callable[..., _T]:
    """A function that Dynamo calls while it traces, and whose result is a constant to it. Without
    it a graph would break where a known head asks whether it is wanted."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def traced_for() -> Any:
    """The backend for which Dynamo traces in this thread; None where it does not. Without it a head
    would be taken in the graphs of other backends.

    In a DistributedDataParallel that is Dynamo's optimizer for it, which splits graphs and hands
    the parts to the backend.
    """
    translator = getattr(symbolic_convert.tls, "current_tx", None)
    if translator is None:
        return None
    backend = translator.output.compiler_fn
    splits = getattr(backend, "__self__", None)
    backend = getattr(splits, "backend_compile_fn", backend)
    return getattr(backend, "_torchdynamo_orig_backend", backend)


def traced_lines() -> str:
    """Where Dynamo is in the program that it traces, as in a traceback. Without it a report does
    not say which call of a head was refused."""
    return "".join(TracingContext.extract_stack().format())
