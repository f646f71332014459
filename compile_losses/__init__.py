"""Fused losses for torch.compile: unmodified models get ``torch.ops.fused.*`` by themselves.

Importing the package declares the ops and loads nothing of Dynamo or Inductor: names that need
Dynamo or Inductor are imported when they are first used.

Public names:

``enable``, ``disable``     make plain ``torch.compile`` rewrite losses, or stop it
``explain``                 runs a call and reports its losses, as a ``Report`` of ``Site``
``compare``                 a step by stock torch.compile and with this package, side by side
``counters``                counts of the losses rewritten in this process
``rewrite``                 the first pass alone, for other backends
``functional``              torch's loss functions over the ops, for eager code
``linear_cross_entropy``    cross entropy of a linear layer, without its logits
``LinearCrossEntropyLoss``  the same as a module
``linear_log_probs``        log-probabilities and entropies by a linear layer, without its logits
``linear_softmax_kl_div``   distillation into a linear layer, without its logits or the teacher's
``linear_softmax_js_div``   the same with a Jensen-Shannon divergence
``linear_top_k_kl_div``     distillation from a teacher's likeliest classes, without the logits
``global_mean``             a loss's mean over the ranks of DDP or FSDP
``__version__``             the package's version
"""

import gc
import importlib
import importlib.metadata
import os
from typing import TYPE_CHECKING, Any

# During these imports the garbage collector would go through all of torch's objects, which takes as
# long as the imports.
_collects = gc.isenabled()
gc.disable()
try:
    from compile_losses import functional
    from compile_losses.linear import (
        LinearCrossEntropyLoss,
        linear_cross_entropy,
        linear_log_probs,
        linear_softmax_js_div,
        linear_softmax_kl_div,
        linear_top_k_kl_div,
    )
finally:
    if _collects:
        gc.enable()

if os.environ.get("COMPILE_LOSSES_ENABLE"):
    # By torch's entry point it is done already, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.
    import _compile_losses_autoload

    _compile_losses_autoload.autoload()

if TYPE_CHECKING:
    from compile_losses.comparison import Comparison, compare
    from compile_losses.default_backend import disable, enable
    from compile_losses.distributed.data_parallel import global_mean
    from compile_losses.recognize import rewrite
    from compile_losses.report import Report
    from compile_losses.report.explanation import explain
    from compile_losses.sites import Site
    from compile_losses.switches import counters

__all__ = [
    "Comparison",
    "LinearCrossEntropyLoss",
    "Report",
    "Site",
    "compare",
    "counters",
    "disable",
    "enable",
    "explain",
    "functional",
    "global_mean",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_softmax_js_div",
    "linear_softmax_kl_div",
    "linear_top_k_kl_div",
    "rewrite",
]

#: The names that are imported when they are first used, and their modules.
_LAZY = {
    "Report": "report",
    "Site": "sites",
    "Comparison": "comparison",
    "compare": "comparison",
    "counters": "switches",
    "disable": "default_backend",
    "enable": "default_backend",
    "explain": "report.explanation",
    "global_mean": "distributed.data_parallel",
    "rewrite": "recognize",
}
#: Modules that are attributes of the package without being imported by name.
_MODULES = {"backend", "lower", "recognize", "report"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name == "__version__":
        value = importlib.metadata.version(__name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
