"""``lazy_logits="auto"``: logits that are lazy only as long as that is safe, and where it pays.

Such logits are computed before their head may change: when a backward begins that goes through any
call of such a function, and before an optimizer's step. If they are computed in two calls one after
the other, the function is compiled once more, and returns plain logits from then on.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from types import CodeType
from typing import Any

from torch import Tensor

from compile_losses.lazy.source import Source, head_changes
from compile_losses.torch_internals.dynamo import (
    compiles_backwards,
    forget_compiled,
    may_compile,
)
from compile_losses.torch_internals.eager import keeps_saved_tensors_elsewhere, not_compiled
from compile_losses.torch_internals.tensors import autograd_node, is_gathered_for_one_use

#: What logits were that were computed all the same.
KEPT, READ, AT_ONCE = "kept until the backward", "read", "needed at once"
#: Why functions return plain logits again, by where they begin.
_over: dict[tuple[str, int, str], str] = {}


def _place(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def forget() -> None:
    """Lets functions whose logits were computed return lazy ones again, once they are compiled."""
    _over.clear()


def why_over(code: CodeType) -> str | None:
    """Why a function returns plain logits again; None if it does not."""
    return _over.get(_place(code))


class Automatic:
    """A compiled function whose logits are lazy until they are computed in two calls running.

    Args:
        code: the function's code, as it was before it was compiled.
        always: how a user asks for lazy logits in any case.
    """

    def __init__(self, code: CodeType, always: str) -> None:
        self._code, self._always = code, always
        self._calls = 0
        #: The last call whose logits were computed.
        self._last = -1
        self._lock = threading.Lock()

    def call(self) -> Call:
        with self._lock:
            self._calls += 1
            return Call(self, self._calls)

    def note(self, call: int, how: str) -> None:
        """Notes that the logits of a call are computed, and what they were before."""
        with self._lock:
            if why_over(self._code) is not None or call == self._last:
                return
            follows, self._last = self._last == call - 1, call
            if not follows or not may_compile():
                return
            _over[_place(self._code)] = f"they were {how} in two calls one after the other"
        forget_compiled(self._code)
        if how == KEPT:
            name, line = self._code.co_name, self._code.co_firstlineno
            with suppress(Warning):  # where warnings are errors, a backward must not end by one
                warnings.warn(
                    f"the logits that {name} ({self._code.co_filename}:{line}) returns were kept "
                    "until the backward, and nobody had read them, in two calls one after the "
                    "other. They are computed with the loss from now on, as without "
                    "compile_losses. To save their memory, let go of them before the backward "
                    f"(`loss = outputs.loss; del outputs`), or set {self._always}",
                    stacklevel=2,
                )


class Call:
    """One call of such a function."""

    def __init__(self, function: Automatic, number: int) -> None:
        self._function, self._number = function, number
        self._how = READ
        # What a checkpoint computes once more must be what it was.
        self._counts = not keeps_saved_tensors_elsewhere()

    def computed(self) -> None:
        """Notes that its logits are computed."""
        if self._counts:
            self._function.note(self._number, self._how)

    def watch(self, source: Source, weight: Tensor) -> None:
        """Computes the logits of a head before it may change.

        Args:
            weight: the head's, as the user has it.
        """
        source.before_changes = self._compute
        # A compiled backward does not tell when it begins. Hooks of what a backward needs keep the
        # head a second time.
        if is_gathered_for_one_use(weight) or compiles_backwards() or not self._counts:
            self._compute(source, AT_ONCE)

    def watch_backward(self, results: Iterable[Any]) -> None:
        """Computes all logits that wait when a backward comes to one of the call's results."""
        nodes = [autograd_node(each) for each in results if isinstance(each, Tensor)]
        for node in dict.fromkeys(node for node in nodes if node is not None):
            node.register_prehook(_before_backward)

    def _compute(self, source: Source, how: str = KEPT) -> None:
        memory = source.unread_memory()
        # If the head has changed already, whoever reads the logits is told so.
        if memory is not None and source.is_intact():
            self._how = how
            memory.read()


@not_compiled
def _before_backward(*_: Any) -> None:
    head_changes()
