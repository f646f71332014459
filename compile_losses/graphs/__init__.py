"""Tools for graphs of torch.fx, which recognition and the passes on lower graphs share.

Every change of a graph goes through :mod:`compile_losses.graphs.change`, and so each is counted.
:mod:`compile_losses.graphs.reach` says which nodes are computed from which, and
:mod:`compile_losses.graphs.indexed` keeps answers about a graph until it changes.
"""

from compile_losses.graphs.change import (
    GIVEN_AS,
    annotate,
    change_input,
    copy_nodes,
    emit,
    emit_input,
    erase,
    erase_unused,
    forget,
    fresh_like,
    give,
    give_value,
    in_dtype,
    is_view,
    move_before,
    replace,
    replace_uses,
    retrace_views,
    straight_line,
    undone_if_it_fails,
    value_of,
    view_like,
)
from compile_losses.graphs.indexed import Indexed, changed, version_of
from compile_losses.graphs.reach import ancestors, between, descendants, is_movable, later_sources

__all__ = [
    "GIVEN_AS",
    "Indexed",
    "ancestors",
    "annotate",
    "between",
    "change_input",
    "changed",
    "copy_nodes",
    "descendants",
    "emit",
    "emit_input",
    "erase",
    "erase_unused",
    "forget",
    "fresh_like",
    "give",
    "give_value",
    "in_dtype",
    "is_movable",
    "is_view",
    "later_sources",
    "move_before",
    "replace",
    "replace_uses",
    "retrace_views",
    "straight_line",
    "undone_if_it_fails",
    "value_of",
    "version_of",
    "view_like",
]
