"""Dynamo. Importing this loads it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dynamo import config, eval_frame

# Runs a function while Dynamo traces the call of it. Without it the warnings of a compiled loss
# would break its graph.
from torch._dynamo.comptime import comptime as comptime

# By which Dynamo asks itself to trace a function anew. Taken for an error, it would cost a loss.
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis

# An error of a backend that reaches users as it is; any other is wrapped into one of Dynamo's.
from torch._dynamo.exc import ShortenTraceback as ShortenTraceback

# What Dynamo counts, its reasons for graph breaks among it. Without it a report has none of these.
from torch._dynamo.utils import counters as counters

#: From the name of a backend to the backend, for the option ``inner_backend``.
lookup_backend = torch._dynamo.lookup_backend


def without_recompile_limits() -> AbstractContextManager[Any]:
    """Compiles what was compiled often before; otherwise it would run uncompiled, unseen."""
    return config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """What was given to ``torch.compile``. The compiled one would run inside explain's own."""
    if isinstance(function, eval_frame.OptimizedModule):
        return function._orig_mod
    if isinstance(function, torch.nn.Module) and function._compiled_call_impl is not None:
        return function._call_impl
    return eval_frame.innermost_fn(function)
