"""Dynamo. Importing this loads it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dynamo import config, eval_frame

# Runs a function while Dynamo traces the call of it, for warnings about what is traced.
from torch._dynamo.comptime import comptime as comptime

# By which Dynamo asks itself to trace a function anew: not an error, to be passed on.
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis

# An error in which users see no frames of Dynamo; where it is not one, they see them.
from torch._dynamo.exc import ShortenTraceback as ShortenTraceback

# What Dynamo counts; of it, its reasons for graph breaks.
from torch._dynamo.utils import counters as counters

#: From the name of a backend to the backend.
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
