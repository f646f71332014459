"""Loads the built kernels, and holds the one ``torch.library.Library`` that declares the ops."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

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
    torch.library.register_fake(op.name(), fake, lib=LIBRARY)


def register_autograd(
    op: torch._ops.OpOverload[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., Any],
) -> Callable[..., Any]:
    """Registers a formula with an op.

    Returns:
        The op with a shorter way in eager code: on plain tensors, outside of any mode or transform,
        it enters the formula, or the kernel where no gradient is asked for, without the general
        machinery in between, which costs several times a small kernel. Takes positional arguments.
    """
    torch.library.register_autograd(op.name(), backward, setup_context=setup_context, lib=LIBRARY)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = op(*inputs)
            setup_context(ctx, inputs, output)
            ctx.set_materialize_grads(False)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if all(grad is None for grad in grads):
                return (None,) * len(ctx.needs_input_grad)
            return backward(ctx, *grads)

    # As Function.apply, which first looks for functorch's levels and its dead wrappers.
    apply = super(torch.autograd.Function, Direct).apply

    def call(*inputs: Any) -> Any:
        if _in_a_mode():
            return op(*inputs)
        differentiable = False
        for value in inputs:
            if isinstance(value, torch.Tensor):
                if type(value) not in _PLAIN or is_functorch_wrapped_tensor(value):
                    return op(*inputs)
                differentiable = differentiable or value.requires_grad
        if differentiable and torch.is_grad_enabled():
            return apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    return call


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _in_a_mode() -> bool:
    """Whether calls are intercepted: by dispatch modes, functorch, dual numbers or tracing."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def register_not_differentiable(op: torch._ops.OpOverload[..., Any]) -> None:
    """For ops that only compiled graphs call, below autograd."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError(
                f"{op.name()} is not differentiable: it is for graphs whose gradients are already "
                "explicit. Detach its arguments, or call the public op"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    implement(op, kernel, "Autograd")


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


@cache
def fingerprint() -> str:
    """A hash of the package's sources and built kernels, for the keys of torch.compile's caches.

    AOTAutograd's key has neither the autograd formulas of an op nor its kernels in it: without this
    a changed formula would be answered from the cache with the old gradient.
    """
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.glob("*.so")]):
        digest.update(str(path.relative_to(PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


load_kernels()
