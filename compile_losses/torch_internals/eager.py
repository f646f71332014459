"""What is in force around an eager call: modes, transforms, autocast, a running backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch

# The tensors of torch.func and of old-style vmap, for which custom ops have no rules. Where they
# were not told apart, a loss would be computed on what is inside of them.
from torch._C._functorch import get_unwrapped as get_unwrapped
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._C._functorch import is_legacy_batchedtensor as is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

# The mode of ``with torch.device(...)``, which changes no loss. Taken for another mode, it would
# send losses inside of it to torch.
from torch.utils._device import DeviceContext as DeviceContext

# The base class of dispatch modes. Recognition sees by one which ops a function is made of; without
# it only calls of whole losses are recognised.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

#: Whether autocast is on for any device. Where it was wrong, an eager loss would miss its dtype.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled

#: Whether the backward that runs retains its graph. Where this was wrong, a second backward would
#: read gradients that the first has scaled.
retains_graph = torch._C._autograd._get_current_graph_task_keep_graph

#: The number of the backward that runs; -1 outside. Without it a gradient that belongs to one
#: backward would be taken for another's.
backward_number = torch._C._current_graph_task_id

#: Whether the backward that runs comes past a node that is no leaf's. Without it nobody would
#: notice that the gradient of logits was asked for that are never computed.
is_on_the_way = torch._C._will_engine_execute_node

#: Calls a function at the end of the backward that runs, before its results are returned. Without
#: it somebody could be given a gradient that can't be computed any more when it is read.
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback


def keeps_saved_tensors_elsewhere() -> bool:
    """Whether hooks take what a backward needs, as checkpoints and offloading to a host do. What is
    saved for lazy logits would be kept in addition, and gradients that are computed in a forward
    would be computed by each."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def without_saved_tensors_hooks() -> AbstractContextManager[Any]:
    """Saves what a backward needs as it is. Of all hooks the last are called. Without it a
    checkpoint would count what was saved while a graph was compiled inside of it."""
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


#: The active modes that see torch's functions. One that was missed would not see a loss.
function_modes = torch.overrides._get_current_function_mode_stack

#: How many of them there are. Without it they would have to be listed at each call.
count_function_modes = torch._C._len_torch_function_stack

#: Keeps Dynamo out of a function, without loading Dynamo. Without it Dynamo would compile the
#: dispatch of a lazy tensor that is read in eager mode behind a graph break, as a function.
not_compiled = torch._compile._disable_dynamo

#: The way out of all active dispatch modes. Without it verification would compute with fakes.
no_modes = _python_dispatch._disable_current_modes

#: The ``__torch_function__`` of a class that has none of its own. Taken for one, it would send the
#: losses of parameters to torch.
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl


def is_tracing() -> bool:
    """Whether torch.compile looks at tensors, and wants nothing computed."""
    return torch._guards.TracingContext.try_get() is not None


@contextmanager
def recording() -> Iterator[None]:
    """Lets autograd record, also inside of a ``__torch_dispatch__``."""
    with ExitStack() as stack:
        with suppress(RuntimeError):  # outside of one there is nothing to do
            stack.enter_context(torch.overrides.enable_reentrant_dispatch())
        yield


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is on, for which custom ops have no rules: where this
    was wrong, a tangent would be lost."""
    return forward_ad._current_level >= 0


def in_a_mode() -> bool:
    """Whether calls are intercepted: by dispatch modes, functorch, dual numbers or tracing. Where
    this was wrong, the short way of eager calls would go past them."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )
