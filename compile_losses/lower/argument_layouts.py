"""The strides in which Inductor passes arguments to a call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from compile_losses.graphs import annotate, forget
from compile_losses.lower.dead_buffers import ROW_VIEWS
from compile_losses.op_traits import MATMULS
from compile_losses.torch_internals.graphs import DISLIKES_PADDING, EAGER_VALUES
from compile_losses.torch_internals.ops import tree_leaves
from compile_losses.torch_internals.tensors import FakeTensor

aten = torch.ops.aten


def accept_layouts(node: Node) -> None:
    """Lets a call take its arguments in the layout that Inductor gives them.

    Inductor brings the arguments of a custom op to their strides in eager mode. If an argument is
    laid out otherwise, as a matrix product with padded rows, that takes a copy. The kernels take
    any strides, and gaps between rows do not change the strides of their results.
    """
    if EAGER_VALUES not in node.meta:
        return
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    (first, *_) = (value for value in args if isinstance(value, FakeTensor))
    with first.fake_mode:
        value = node.target(*args, **kwargs)  # type: ignore[operator]
    results, expected = (
        [t.stride() for t in tree_leaves(tree) if isinstance(t, Tensor)]
        for tree in (value, node.meta["val"])
    )
    if not all(isinstance(s, int) for s in tree_leaves((results, expected))):
        return
    if results == expected and all(map(_has_rows, node.all_input_nodes)):
        forget(node, EAGER_VALUES)


def _row_views(node: Node) -> list[Node]:
    """A tensor, the tensor that it is a view of by rows, and so on to the first."""
    views = [node]
    while views[-1].target in ROW_VIEWS:
        views.append(views[-1].args[0])  # type: ignore[arg-type]
    return views


def _has_rows(node: Node) -> bool:
    """Whether a tensor has its layout already, or rows that Inductor may pad but not permute."""
    source = _row_views(node)[-1]
    return source.op == "placeholder" or source.target in MATMULS


def leave_unpadded(node: Node) -> None:
    """Makes Inductor lay out a product with a bias without gaps, if a call reads a slice of it.

    If rows are padded, a GPU's library does not add the bias as it writes the product. It first
    copies the bias over all of the result, which takes as long as the loss itself.
    """
    for source in node.all_input_nodes:
        views = _row_views(source)
        if views[-1].target is aten.addmm.default:
            for each in views:
                annotate(each, DISLIKES_PADDING, True)  # which Inductor asks for
