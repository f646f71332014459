"""``X_ahead`` and ``X_ahead_gradient``: a loss whose gradient may be computed with it.

Both are for a compiled graph whose caller keeps input, for all that the graph knows. Torch then
holds nothing of input's size from the forward to the backward, and a gradient would be one more
tensor of it. If several forwards come before the first backward, as in a pipeline's schedule, it
would be one more for each. So on each device one gradient at a time is computed with its loss. The
other forwards compute the loss alone, and their backwards the gradient.

``X_ahead(input, ..., grad_output=None)`` returns the loss, and a tensor of one element that stands
for the gradient. If the gradient was computed, the element is its first one, so that the gradient's
memory is freed with what the backward saved.
``X_ahead_gradient(factor, ahead, input, ..., grad_output=None)`` returns the gradient, times a
factor of one element on the device. If another forward's gradient is still held, it gives up that
one before it allocates: after all forwards there are no more bytes than torch's backward holds.

Either way the gradient is that of ``X_with_grad`` for the same arguments, and has the same bits.
The loss is that of ``X_with_grad`` or of ``X_forward``, whose kernels may round its last bit to
either side.
The element itself is never read. What tells a gradient is the identity of its memory, so that a
copy of the element, as hooks of saved tensors make it, only has the gradient computed anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compile_losses import library
from compile_losses.ops import checks
from compile_losses.ops.scale import scale, scale_
from compile_losses.torch_internals.eager import keeps_saved_tensors_elsewhere, retains_graph
from compile_losses.torch_internals.ops import OpOverload, schema_of
from compile_losses.torch_internals.tensors import StorageWeakRef, storage_behind, storage_id

Op = OpOverload[..., Any]

#: The memory of the gradient that was computed with its loss, by device. Entries are taken out and
#: then looked at: of two threads one has it.
_HELD: dict[torch.device, StorageWeakRef] = {}

#: The bytes of the largest element, a float64.
_ELEMENT = 8


def declare_ahead(
    name: str, arguments: str, forward: Op, with_grad: Op, forward_fake: Callable[..., Any]
) -> None:
    """Declares both ops of the loss ``name``.

    Args:
        arguments: what ``X_forward`` takes after input, as its schema spells it.
        forward, with_grad: the loss's ops.
        forward_fake: the fake of ``X_forward``, whose first result is the loss.
    """
    given = f"Tensor input, {arguments}, Tensor? grad_output=None"
    ahead = library.define(f"{name}_ahead({given}) -> (Tensor, Tensor)")
    gradient = library.define(
        f"{name}_ahead_gradient(Tensor factor, Tensor ahead, {given}) -> Tensor"
    )
    count = len(schema_of(forward).arguments)

    def compute(input: Tensor, *rest: Any, **grad_output: Tensor | None) -> tuple[Tensor, Tensor]:
        if _may_hold(input):
            loss, unit = with_grad(input, *rest, **grad_output)
            _HELD[unit.device] = StorageWeakRef(unit.untyped_storage())
            return loss, unit.as_strided((), ())
        result = forward(input, *rest[: count - 1])
        return result[0] if isinstance(result, tuple) else result, input.new_empty(())

    def fake(input: Tensor, *rest: Any, **grad_output: Tensor | None) -> tuple[Tensor, Tensor]:
        for number in (*grad_output.values(), *rest[count - 1 :]):
            checks.check_grad_output(name, input, number)
        result = forward_fake(input, *rest[: count - 1])
        return result[0] if isinstance(result, tuple) else result, input.new_empty(())

    def take(
        factor: Tensor, ahead: Tensor, input: Tensor, *rest: Any, **grad_output: Tensor | None
    ) -> Tensor:
        memory = _HELD.pop(ahead.device, None)
        if memory is None or memory.cdata != storage_id(ahead):
            _give_up(memory)
            _, unit = with_grad(input, *rest, **grad_output)
            scale_(unit, factor)
            return unit
        strides = torch.empty_like(input, device="meta").stride()
        unit = ahead.new_empty(0).set_(ahead.untyped_storage(), 0, input.shape, strides)
        if retains_graph():
            _HELD[ahead.device] = memory
            return scale(unit, factor)
        # The compiled backward may write to an argument that it has read for the last time.
        ahead.set_(ahead.clone().untyped_storage(), 0, (), ())
        scale_(unit, factor)
        return unit

    def take_fake(factor: Tensor, ahead: Tensor, input: Tensor, *rest: Any, **_: Any) -> Tensor:
        return torch.empty_like(input)

    library.compose(ahead, compute, fake)
    library.compose(gradient, take, take_fake)


def _may_hold(input: Tensor) -> bool:
    """Whether a gradient may be computed with its loss: if no other is held on the device, and no
    hook moves what is saved. It would move input, and leave the gradient."""
    held = _HELD.get(input.device)
    is_free = held is None or held.expired()
    return is_free and input.numel() > 0 and not keeps_saved_tensors_elsewhere()


def _give_up(memory: StorageWeakRef | None) -> None:
    """Frees a gradient, but for the element that stands for it."""
    storage = None if memory is None else storage_behind(memory)
    if storage is not None:
        storage.resize_(0)  # so that nothing is copied
        storage.resize_(_ELEMENT)
