"""From fused ops in AOTAutograd's graphs to fewer passes over memory.

``plan`` works on the joint graph (or that of inference), ``in_place`` on the forward and backward
graphs that it is cut into.
"""

from compile_losses.lower.decision import Decision
from compile_losses.lower.in_place import in_place
from compile_losses.lower.plan import plan

__all__ = ["Decision", "in_place", "plan"]
