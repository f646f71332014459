"""The contenders. Each turns a case into a step: inputs in, loss and gradient out.

Other libraries are imported only when their steps are built. cut-cross-entropy starts from
hidden states and a classifier's weight, so it takes no part in these cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import BETA, TEMPERATURE, Case, Pass

Step = Callable[..., tuple[Tensor, Tensor | None]]


class UnavailableError(Exception):
    """A contender cannot run here, or does not have this loss; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One implementation of the losses.

    Attributes:
        name: its name in results.
        build: makes the step of a case and pass. ``fwd`` steps run without autograd; ``fwd_bwd``
            steps expect the first input to require grad and to hold no gradient, leave none there,
            and take grad_output as 1. Raises ``UnavailableError`` or ``ImportError``.
        distribution: the package whose version is reported.
        overwrites_input: whether the backward overwrites the first input, so that it needs a copy.
    """

    name: str
    build: Callable[[Case, Pass], Step]
    distribution: str
    overwrites_input: bool = False

    @property
    def version(self) -> str:
        return version_of(self.distribution)


def failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def reason_of(error: Exception) -> str:
    """Why a contender has no figures: it does not run here, or failed."""
    absent = isinstance(error, ImportError | UnavailableError)
    return f"not run: {error}" if absent else failure(error)


def version_of(distribution: str) -> str:
    if distribution == "torch":
        return torch.__version__
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def _step(loss: Callable[..., Tensor], which: Pass) -> Step:
    """A step of a loss that autograd differentiates."""

    def forward(*inputs: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            return loss(*inputs), None

    def forward_and_backward(*inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        result = loss(*inputs)
        result.backward()
        gradient, inputs[0].grad = inputs[0].grad, None
        return result, gradient

    return forward if which == "fwd" else forward_and_backward


def _eager(case: Case, which: Pass) -> Step:
    return _step(case.expression, which)


def _inductor(case: Case, which: Pass) -> Step:
    return _step(torch.compile(case.expression), which)


def _inductor_max_autotune(case: Case, which: Pass) -> Step:
    return _step(torch.compile(case.expression, mode="max-autotune-no-cudagraphs"), which)


def _ours_kernel(case: Case, which: Pass) -> Step:
    import compile_losses.ops  # noqa: F401

    def forward(*inputs: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            return case.forward_kernel(*inputs), None

    factors: dict[torch.device, Tensor] = {}

    def loss_and_gradient(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            loss, gradient = case.gradient_kernel(*inputs)
            if loss.device not in factors:
                factors[loss.device] = torch.ones_like(loss)
            torch.ops.fused.scale_(gradient, factors[loss.device])
            return loss, gradient

    return forward if which == "fwd" else loss_and_gradient


def _ours_eager(case: Case, which: Pass) -> Step:
    import compile_losses.ops  # noqa: F401

    return _step(case.fused, which)


def _ours_compiled(case: Case, which: Pass) -> Step:
    # The function and not its name, because a build in place has no entry point with the name.
    from compile_losses.backend import compile_losses

    return _step(torch.compile(case.expression, backend=compile_losses), which)


def _quack(case: Case, which: Pass) -> Step:
    if case.op != "cross_entropy":
        raise UnavailableError(f"has no {case.op}")
    if not torch.cuda.is_available():
        raise UnavailableError("needs a CUDA device")
    from quack.cross_entropy import cross_entropy

    return _step(cross_entropy, which)


def _liger(case: Case, which: Pass) -> Step:
    if case.op not in ("cross_entropy", "kl_div", "softmax_kl_div", "softmax_js_div"):
        raise UnavailableError(f"has no {case.op}")
    if not torch.cuda.is_available():
        raise UnavailableError("needs a CUDA device")
    from liger_kernel.transformers import functional

    def kl_div(predictions: Tensor, targets: Tensor) -> Tensor:
        return functional.liger_kl_div(torch.log(predictions), targets, reduction="batchmean")

    def distillation(student: Tensor, teacher: Tensor) -> Tensor:
        log_p = F.log_softmax(student / TEMPERATURE, -1)
        q = F.softmax(teacher / TEMPERATURE, -1)
        return functional.liger_kl_div(log_p, q, reduction="batchmean") * TEMPERATURE**2

    def jensen_shannon(student: Tensor, teacher: Tensor) -> Tensor:
        log_p = F.log_softmax(student / TEMPERATURE, -1)
        return functional.liger_jsd(log_p, F.log_softmax(teacher / TEMPERATURE, -1), beta=BETA)

    losses = {
        "cross_entropy": functional.liger_cross_entropy,
        "kl_div": kl_div,
        "softmax_kl_div": distillation,
        "softmax_js_div": jensen_shannon,
    }
    return _step(losses[case.op], which)


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("eager", _eager, "torch"),
        Contender("inductor", _inductor, "torch"),
        Contender("inductor_max_autotune", _inductor_max_autotune, "torch"),
        Contender("ours_kernel", _ours_kernel, "compile_losses"),
        Contender("ours_eager", _ours_eager, "compile_losses"),
        Contender("ours_compiled", _ours_compiled, "compile_losses"),
        Contender("quack", _quack, "quack-kernels"),
        Contender("liger", _liger, "liger-kernel", overwrites_input=True),
    )
}
