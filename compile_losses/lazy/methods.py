"""What a lazy tensor does where torch looks at a tensor without calling an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compile_losses.lazy.head import Step, apply
from compile_losses.lazy.memory import Memory
from compile_losses.lazy.path import Path
from compile_losses.torch_internals.eager import is_tracing, no_modes
from compile_losses.torch_internals.tensors import autograd_node, data_of, set_data


class Methods(Tensor):
    """Methods of torch.Tensor that are no ops: they need memory, or follow the gradient.

    Attributes:
        path: who reads gradients on the way from this tensor to its head.
        is_traced: whether it stands for a tensor in tracing, whose numbers nobody knows.
    """

    _memory: Memory
    #: The views that lead from the memory's tensor to this one.
    _views: tuple[Step, ...]
    path: Path
    is_traced: bool
    plain: Callable[[], Tensor]
    take_over: Callable[[Tensor], None]

    @property
    def numbers(self) -> Tensor:
        """The numbers, in a plain tensor of the same memory, without gradients."""
        with torch.no_grad():
            return apply(self._memory.share(), self._views)

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().numpy(force=force)

    def tolist(self) -> Any:
        return self.numbers.tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self.plain().__array__(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self.plain().__dlpack__(**options)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.plain().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __format__(self, specification: str) -> str:
        return self.plain().__format__(specification)

    # The memory itself. After a read torch finds it by itself, and before it calls these.

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def untyped_storage(self) -> Any:
        if self.is_traced:
            return super().untyped_storage()
        if is_tracing():
            # Its memory is that of its numbers too, which would confuse it.
            with no_modes():
                like = torch.empty_strided(
                    self.size(), self.stride(), dtype=self.dtype, device="meta"
                )
            return like.untyped_storage()
        self._memory.share()
        return super().untyped_storage()

    @property
    def data(self) -> Tensor:
        return data_of(self)

    @data.setter
    def data(self, other: Tensor) -> None:
        set_data(self, other)
        self.take_over(other)

    def _is_view(self) -> bool:
        # To tracing a view of logits is a tensor of its own, made of the head or of numbers. What
        # shares memory at run time is seen then. Torch's replay of views of subclasses crashes for
        # some that were changed in place.
        return super()._is_view() and (self.is_traced or not is_tracing())

    # Who calls these may read or change the gradient, which then has to be computed.

    def register_hook(self, hook: Any) -> Any:
        handle = super().register_hook(hook)
        self.path.touch()
        return handle

    def retain_grad(self) -> None:
        super().retain_grad()
        self.path.touch()

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        self.path.touch()
        return autograd_node(self)
