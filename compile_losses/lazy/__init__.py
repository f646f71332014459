"""Logits that a compiled model returns and that are computed when somebody reads them.

A model returns its logits beside the loss, and a training step reads the loss alone. With
``options={"lazy_logits": True}`` a compiled graph returns the hidden state in the logits' place
(``outputs``), and its caller gets a :class:`LazyLogits` (``tensor``). Its numbers are computed of
the ``head``, if nobody changed that (``source``). A compiled graph that is given one takes its
hidden state and head instead, and finds the loss of them (``inputs``).
"""

from compile_losses.lazy.inputs import open_lazy_inputs
from compile_losses.lazy.outputs import Compiled, LazyOutput, return_lazily
from compile_losses.lazy.tensor import LazyLogits, plain

__all__ = ["Compiled", "LazyLogits", "LazyOutput", "open_lazy_inputs", "plain", "return_lazily"]
