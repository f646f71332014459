"""From fused ops in AOTAutograd's graphs to fewer passes over memory.

``inline`` and ``hoist`` work on the joint graph, ``in_place`` on the forward and backward graphs
that it is cut into.
"""

from compile_losses.lower.hoist import hoist
from compile_losses.lower.in_place import in_place
from compile_losses.lower.inline import inline

__all__ = ["hoist", "in_place", "inline"]
