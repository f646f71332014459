"""Logits that a compiled model returns and that are computed when somebody reads them.

A model returns its logits beside the loss, and a training step reads the loss alone. With
``options={"lazy_logits": True}`` a compiled graph returns the hidden state in the logits' place
(``outputs``), and its caller gets a :class:`LazyLogits` (``tensor``). The numbers of that tensor
are computed from the ``head``, if nobody changed the head (``source``). A compiled graph that is
given a LazyLogits takes the hidden state and the head instead, and finds their loss (``inputs``).
"""

from compile_losses.lazy.inputs import open_lazy_inputs
from compile_losses.lazy.outputs import Compiled, LazyOutput, return_lazily
from compile_losses.lazy.tensor import LazyLogits, plain

__all__ = ["Compiled", "LazyLogits", "LazyOutput", "open_lazy_inputs", "plain", "return_lazily"]
