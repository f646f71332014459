"""The options of the backend: their names, and their settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from compile_losses import switches
from compile_losses.recognize import rewrite
from compile_losses.recognize.returned_logits import Lazily
from compile_losses.report import Report
from compile_losses.torch_internals.dynamo import ShortenTraceback
from compile_losses.torch_internals.inductor import (
    InductorBackend,
    is_to_be_saved,
    uses_cuda_graphs,
)

#: The option that names another backend to compile the rewritten graph.
INNER_BACKEND = "inner_backend"
#: The option that compares every loss with its rewrite while compiling.
VERIFY = "verify"
#: The option that raises errors inside this package.
STRICT = "strict"
#: The option that uses linear cross entropy also if it saves memory and may cost time.
PREFER_MEMORY = "prefer_memory"
#: The options that name the losses to rewrite, and those to leave alone.
LOSSES, EXCEPT = "losses", "except"


class InvalidOptionError(ShortenTraceback):
    """An unknown mode or option; a RuntimeError, as in stock torch.compile."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


@dataclass(frozen=True)
class Settings:
    """The options of the backend; None is the environment's setting.

    Attributes:
        inductor: Inductor with its own options and the mode; None if another backend compiles.
        others: the options that are not this package's.
    """

    inner_backend: str
    verify: bool | None
    strict: bool | None
    prefer_memory: bool | None
    lazy_logits: bool | None
    losses: frozenset[str]
    inductor: Any
    others: dict[str, Any]

    @classmethod
    def of(cls, mode: str | None, options: dict[str, Any] | None) -> Settings:
        """
        Raises:
            InvalidOptionError: an unknown mode, option or loss.
        """
        others = dict(options or {})
        inner = others.pop(INNER_BACKEND, "inductor")
        verify, strict = others.pop(VERIFY, None), others.pop(STRICT, None)
        prefer_memory = others.pop(PREFER_MEMORY, None)
        lazy_logits = others.pop(switches.LAZY_LOGITS, None)
        only, excluded = others.pop(LOSSES, None), others.pop(EXCEPT, None)
        try:
            switches.check_environment()
            losses = switches.chosen(only, excluded)
            inductor = InductorBackend(mode, others, dynamic=None) if inner == "inductor" else None
        except RuntimeError as error:
            raise InvalidOptionError(str(error)) from None
        return cls(inner, verify, strict, prefer_memory, lazy_logits, losses, inductor, others)

    def lazily(self, gm: GraphModule) -> Lazily | None:
        """Makes logits that a Dynamo graph returns lazy; None if that is not requested."""
        if not switches.returns_lazy_logits(self.lazy_logits):
            return None
        if is_to_be_saved():
            return Lazily("the compiled graph is to be saved")
        if self.inductor is not None and uses_cuda_graphs(self.inductor.config):
            return Lazily("a CUDA graph uses the memory of what it returned anew")
        return Lazily()

    def rewrite(self, gm: GraphModule, lazily: Lazily | None = None) -> Report:
        """Rewrites a Dynamo graph."""
        rewrite(
            gm,
            verify=self.verify,
            strict=self.strict,
            prefer_memory=self.prefer_memory,
            losses=self.losses,
            lowers=self.inductor is not None and switches.runs(switches.PLAN),
            lazily=lazily,
        )
        report: Report = gm.meta["compile_losses"]
        return report
