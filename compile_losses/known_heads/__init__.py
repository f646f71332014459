"""Heads that other libraries have fused already: a function there, and the same by our ops.

Their functions hide the loss from a compiler. Each file has the functions of a library, one a row
(:mod:`compile_losses.known_heads.head`): the releases that were tested, what a call becomes, and
what it refuses. :mod:`compile_losses.known_heads.doors` puts them in the place of the library's. No
library is imported here.
"""

from compile_losses.known_heads import liger, trl, verl
from compile_losses.known_heads.head import KnownHead

__all__ = ["HEADS", "KnownHead"]

HEADS: tuple[KnownHead, ...] = (*trl.HEADS, *liger.HEADS, *verl.HEADS)
