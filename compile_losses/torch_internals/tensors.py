"""Fake tensors, and what tells whether tensors share memory and were written to."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher

# What tracing computes with: the examples in a graph's nodes are of this class. Others are taken
# for a user's class, whose losses stay torch's.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# What AOTAutograd traces with, inside of a tensor's subclass too. Where a lazy tensor did not know
# it, it would promise lazy gradients.
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor

# What does not keep a storage, and knows when it is gone. As long as it is there, no other storage
# has that one's identity: where this was wrong, a gradient would be taken for another one.
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils._python_dispatch import return_and_correct_aliasing

#: Inside of it ops that are made of others take symbolic sizes. Without it torch 2.11 does not know
#: what a linear layer makes of such a tensor.
taking_symbols = enable_python_dispatcher

#: Where torch's attributes of a tensor are, past those of the same name in the tensor's class.
_BASE: Any = torch._C.TensorBase


def storage_id(tensor: Tensor) -> int:
    """The identity of a tensor's storage, a fake one's too. Where it was wrong, a gradient would be
    written over memory that something else reads."""
    return tensor.untyped_storage()._cdata


def storage_behind(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage that a weak reference is of; None if it is gone. Without it a gradient could not
    be given up for another one."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return found


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to. Without it writes that no schema tells would be missed."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor:
    """What a tensor is a view of; itself if it is none. Tracing makes both alike, so that where
    this was wrong, it would be wrong of what tracing wrote to."""
    return tensor if tensor._base is None else tensor._base


def counter_of(tensor: Tensor) -> int:
    """The identity of what counts a tensor's writes: a view shares that of its base. Where it was
    wrong, writes to another tensor would be taken for those of tracing itself."""
    return base_of(tensor)._cdata


@cache
def writes_of_making() -> int:
    """How often tracing writes to what it makes of an input that is no view and starts within its
    memory, or has memory that an earlier input has. Without it the parameters of one flat buffer
    would be taken for changed."""
    whole = torch.empty(2)
    part = torch.empty(0).set_(whole.untyped_storage(), 1, (1,), (1,))
    return version_of(FakeTensorMode().from_tensor(part))


def size_hint(size: Any) -> int | None:
    """A size; of a symbol the number that tracing met, if there was one. To ask a symbol for its
    value instead would make the graph one for that value alone."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return None if hint is None else int(hint)


def shard_of(tensor: Any) -> Any:
    """A rank's own part of a DTensor, not differentiably; any other tensor itself. DTensor.to_local
    is differentiable, and would record a node of its own."""
    return getattr(tensor, "_local_tensor", tensor)


def is_gathered_for_one_use(weight: Tensor) -> bool:
    """Whether a weight's memory may be given back after its use: DeepSpeed's (ZeRO-3) and FSDP's.
    Logits could not be computed of it later. FSDP's first version makes views of one tensor."""
    if hasattr(weight, "ds_id") or weight._is_view():
        return True
    # Whoever shards by FSDP's second version has imported this.
    states = sys.modules.get("torch.distributed._composable_state")
    return states is not None and any(
        "FSDP" in type(state()).__name__ for state in list(states._module_state_mapping.values())
    )


def make_wrapper(kind: type[Tensor], like: Tensor, device: torch.device) -> Any:
    """A tensor of a class that has a ``__torch_dispatch__``, and no memory."""
    return Tensor._make_wrapper_subclass(
        kind,
        like.size(),
        like.stride(),
        like.storage_offset(),
        dtype=like.dtype,
        layout=like.layout,
        device=device,
    )


def with_memory_of(args: Any, view: Tensor, op: Any, kwargs: dict[str, Any]) -> Tensor:
    """A view of an op's first argument, a wrapper, as which tracing knows it. Without it a graph
    would return a copy in its place."""
    made: Tensor = return_and_correct_aliasing(op, args, kwargs, view)
    return made


def without_dispatch() -> AbstractContextManager[Any]:
    """Ops on a wrapper act on what it says of itself: its sizes and strides."""
    return torch._C._DisableTorchDispatch()


def refuse_pointer(wrapper: Tensor) -> None:
    """Makes torch raise an error where something writes to the memory of a wrapper that has none.
    Without it a function of C++ would write to address 0."""
    torch._C._set_throw_on_mutable_data_ptr(wrapper)


def set_data(wrapper: Tensor, data: Tensor) -> None:
    """``wrapper.data = data`` of a wrapper as torch sees it, not its class: memory, sizes, strides.
    Without it torch's functions of C++ would not find what a wrapper has computed."""
    with without_dispatch():
        _BASE.data.__set__(wrapper, data)


def data_of(wrapper: Tensor) -> Tensor:
    """``wrapper.data`` as torch sees it, not its class."""
    data: Tensor = _BASE.data.__get__(wrapper)
    return data


def autograd_node(tensor: Tensor) -> Any:
    """``tensor.grad_fn`` as torch sees it, not the tensor's class, which may take note of it."""
    return _BASE.grad_fn.__get__(tensor)


def function_of_node(node: Any) -> Any:
    """The ``torch.autograd.Function`` whose backward an autograd node runs; None of torch's own
    nodes. Without it a reversed gradient would be taken for a view's."""
    return getattr(node, "_forward_cls", None)


def has_hooks(tensor: Tensor) -> bool:
    """Whether somebody reads the gradient of a tensor, which then has to be computed."""
    return bool(tensor._backward_hooks) or tensor.retains_grad
