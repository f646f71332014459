"""Loads the built kernels, and holds the one ``torch.library.Library`` that declares the ops."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

from compile_losses.eager import Leaf, below_autograd

PACKAGE = Path(__file__).parent
INSTALL_COMMAND = "pip install --no-build-isolation ."

#: ``fused::`` as PyTorch knows it. Every op, fake and formula is registered through it.
LIBRARY = torch.library.Library("fused", "DEF")

#: Device type -> the file its kernels were loaded from, or the reason why there are none.
kernels: dict[str, Path | str] = {}


def define(schema: str) -> torch._ops.OpOverload[..., Any]:
    """Declares ``fused::schema`` and returns its overload."""
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.split("(", 1)[0]
    return getattr(torch.ops.fused, name).default


def register_fake(op: torch._ops.OpOverload[..., Any], fake: Callable[..., Any]) -> None:
    """Registers what tracing and meta tensors see of an op, which refuses tensors of different
    devices as its kernels do: beside a meta tensor a fake would return uninitialised memory."""

    @wraps(fake)
    def on_one_device(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        for tensor in tensors[1:]:
            if tensor.device != tensors[0].device:
                raise RuntimeError(
                    f"{op.name()}: expected all tensors to be on the same device, got "
                    f"{tensors[0].device} and {tensor.device}"
                )
        return fake(*args, **kwargs)

    torch.library.register_fake(op.name(), on_one_device, lib=LIBRARY)


def register_autograd(
    op: torch._ops.OpOverload[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., Any],
) -> Leaf:
    """Registers a formula with an op, and returns the op with a shorter way in eager code."""
    torch.library.register_autograd(op.name(), backward, setup_context=setup_context, lib=LIBRARY)
    return Leaf(op, backward, setup_context)


def register_not_differentiable(op: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    """For ops of calls that record no gradient. Returns the op below autograd, a shorter way."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError(
                f"{op.name()} is not differentiable: it is for calls that record no gradient. "
                "Detach its arguments, or call the public op"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    implement(op, kernel, "Autograd")
    return below_autograd(op)


def implement(op: torch._ops.OpOverload[..., Any], kernel: Callable[..., Any], key: str) -> None:
    LIBRARY.impl(op.name(), kernel, key)


def implement_public(op: torch._ops.OpOverload[..., Any], kernel: Callable[..., Any]) -> None:
    """A public op is made of other ops. It sees the tensors of ``vmap`` and DTensors as they are.

    Its kernel asks for their mesh first: ``compile_losses.distributed.mesh_of``.
    """
    implement(op, kernel, "CompositeImplicitAutograd")
    implement(op, kernel, "FuncTorchBatched")


def _cpu_candidates() -> list[Path]:
    """The CPU libraries that this processor can run, the best first (ATEN_CPU_CAPABILITY holds)."""
    ranked = ["default", "avx2", "avx512"]
    capability = torch.backends.cpu.get_cpu_capability().lower()
    best = ranked.index(capability) if capability in ranked else 0
    names = (f"_cpu_{name}.so" for name in reversed(ranked[: best + 1]))
    return [PACKAGE / name for name in names]


def load_kernels() -> None:
    """Loads the libraries built from ``csrc/``.

    Raises:
        ImportError: when no CPU library is there, saying what to run.
    """
    built = [path for path in _cpu_candidates() if path.exists()]
    if not built:
        raise ImportError(
            f"compile_losses has no built kernels in {PACKAGE}. Build them with "
            f"`{INSTALL_COMMAND}` in the source tree."
        )
    torch.ops.load_library(built[0])
    kernels["cpu"] = built[0]
    kernels["cuda"] = _load_cuda()


def _load_cuda() -> Path | str:
    library = PACKAGE / "_cuda.so"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not library.exists():
        return f"not built: nvcc was not found when `{INSTALL_COMMAND}` ran"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"failed to load {library.name}: {error}"
    return library


def loaded() -> tuple[tuple[str, str], ...]:
    """For each device type the file that its kernels are from, or why there are none."""
    return tuple(
        (device, file.name if isinstance(file, Path) else file) for device, file in kernels.items()
    )


@cache
def fingerprint() -> str:
    """A hash of the package's sources and built kernels, for the keys of torch.compile's caches.

    AOTAutograd's key has neither the autograd formulas of an op nor its kernels in it: without this
    a changed formula would be answered from the cache with the old gradient.
    """
    return hash_of([*PACKAGE.rglob("*.py"), *PACKAGE.glob("*.so")], PACKAGE)


def hash_of(files: Iterable[Path], folder: Path) -> str:
    """A hash of what files hold, and of their names in a folder."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


load_kernels()
