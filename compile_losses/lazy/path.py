"""The way of a gradient from a tensor back to the head that it is made of."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from compile_losses.torch_internals.tensors import autograd_node, function_of_node, has_hooks


class HeadFunction(torch.autograd.Function):
    """What a function is whose result is the output of a head."""


class Path:
    """A tensor that is made of a head's output, and those that it is made of.

    Args:
        tensor: is not kept alive.
        before: the path of the tensor that it was made of; None for the head's output.
    """

    def __init__(self, tensor: Tensor, before: Path | None) -> None:
        self._tensor = ref(tensor)
        self._before = before
        self._is_touched = False

    def touch(self) -> None:
        """Notes that somebody may read or change this tensor's gradient."""
        self._is_touched = True

    def is_free(self) -> bool:
        """Whether nobody reads or changes a gradient on the way to the head.

        If somebody does, the gradient has to go through all of these tensors.
        """
        path: Path | None = self
        while path is not None:
            tensor = path._tensor()
            if path._is_touched or (tensor is not None and has_hooks(tensor)):
                return False
            path = path._before
        return True


def nodes_to_head(tensor: Tensor) -> list[Any] | None:
    """The autograd nodes from a tensor's to its head's; None if there is no way.

    Any other function on the way may do something else in its backward, such as to reverse the
    gradient.
    """
    found = []
    node = autograd_node(tensor)
    while node is not None:
        found.append(node)
        function = function_of_node(node)
        if function is not None:
            return found if issubclass(function, HeadFunction) else None
        following = [each for each, _ in node.next_functions if each is not None]
        node = following[0] if len(following) == 1 else None
    return None
