"""From fused ops in AOTAutograd's graphs to fewer passes over memory.

``hoist`` works on the joint graph, ``in_place`` on the forward and backward graphs that it is cut
into.
"""

from compile_losses.lower.hoist import hoist
from compile_losses.lower.in_place import in_place

__all__ = ["hoist", "in_place"]
