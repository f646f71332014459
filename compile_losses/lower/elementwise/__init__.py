"""The gradient of any sum of elementwise functions, computed with the sum.

In a joint graph such a loss reads its operands twice, for its value and for its gradient::

    loss = sum(f(x, y))                 grad_x = grad_loss * df_dx(x, y)

Both are torch's own ops, so no kernel of ours is needed to read the operands once::

    loss, unit = sum(f(x, y)), df_dx(x, y)                 grad_x = scale(unit, grad_loss)

``find`` looks for what is computed of a tangent by ops that are linear in it and work element by
element, ``refuse`` says why it stays, ``move`` computes it in the forward for a tangent of 1,
``rows`` gives the sum a shape which Inductor computes in one loop with the gradient, and ``over``
has it written over what the forward made.
"""

from compile_losses.lower.elementwise.find import scalar_tangents
from compile_losses.lower.elementwise.move import move_gradients
from compile_losses.lower.elementwise.over import drop_markers

__all__ = ["drop_markers", "move_gradients", "scalar_tangents"]
