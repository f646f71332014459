"""Loads the built kernels, and holds the one ``torch.library.Library`` that declares the ops."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

from compile_losses.eager import Leaf, below_autograd, shorten_calls_without_gradients
from compile_losses.torch_internals.eager import not_compiled
from compile_losses.torch_internals.ops import BelowAutograd, OpOverload, schema_of

PACKAGE = Path(__file__).parent
INSTALL_COMMAND = "pip install --no-build-isolation ."
INSTALL_CUDA = (
    "Install a wheel of compile_losses for this CUDA and GPU, or in the source tree run "
    f"`{INSTALL_COMMAND}` beside an nvcc, or `pip install . --config-settings cuda=pypi`, which "
    "takes nvcc from PyPI."
)

#: ``fused::`` as PyTorch knows it. Every op, fake and formula is registered through it. A fragment,
#: because other packages may have ops of this namespace.
LIBRARY = torch.library.Library("fused", "FRAGMENT")

#: The names of this package's ops, internal ones too, without the namespace.
DECLARED: set[str] = set()

#: Internal ops: parts that public ops are composed of. They may change in any release.
INTERNAL = re.compile(
    r".*_(forward|backward|with_grad|ahead|ahead_gradient|value|)|vocabulary_parallel_.*"
    r"|counted_rows|joined_heads|keep_gradient|linear_region|row_ones|scale|scale_saved"
    r"|softmax_sums|write_over"
)

#: The leaf ops that kernels compute, each with what computes it on other devices.
BODIES: dict[OpOverload[..., Any], Callable[..., Any]] = {}

#: The ops that functions of other ops compute.
COMPOSED: dict[OpOverload[..., Any], Callable[..., Any]] = {}

#: Device type -> the file its kernels were loaded from, or the reason why there are none.
kernels: dict[str, Path | str] = {}

#: The types of devices that kernels compute on; ``meta`` is handled by fakes.
DEVICES = {"meta"}


def define(schema: str) -> OpOverload[..., Any]:
    """Declares ``fused::schema`` and returns its overload.

    Raises:
        ImportError: another package has declared an op of this name; the message has the name.
    """
    name = schema.split("(", 1)[0]
    try:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    except RuntimeError as error:
        raise ImportError(
            f"compile_losses cannot declare torch.ops.fused.{name}, because this process has an op "
            "of that name already, of another package. Only one of both can be imported"
        ) from error
    DECLARED.add(name)
    op: OpOverload[..., Any] = getattr(torch.ops.fused, name).default
    if INTERNAL.fullmatch(name):
        shorten_calls_without_gradients(op)
    return op


def is_declared(op: OpOverload[..., Any]) -> bool:
    """Whether an op is this package's. Others may have ops in its namespace."""
    namespace, _, name = op.name().partition("::")
    return namespace == "fused" and name in DECLARED


def register_fake(op: OpOverload[..., Any], fake: Callable[..., Any]) -> None:
    """Registers an op's fake, for tracing and meta tensors. As the op's kernels do, it refuses
    tensors of different devices: with a meta tensor it would return uninitialised memory."""
    torch.library.register_fake(op.name(), on_one_device(op)(fake), lib=LIBRARY)


def on_one_device(op: OpOverload[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has a function of an op's arguments refuse tensors of different devices."""

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def on_their_device(*args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            for tensor in tensors[1:]:
                if tensor.device != tensors[0].device:
                    raise RuntimeError(
                        f"{op.name()}: expected all tensors to be on the same device, got "
                        f"{tensors[0].device} and {tensor.device}"
                    )
            return function(*args, **kwargs)

        return on_their_device

    return checked


def register_body(
    op: OpOverload[..., Any], fake: Callable[..., Any], body: Callable[..., None]
) -> None:
    """Registers a leaf op's fake, and what the op computes on devices without kernels.

    Args:
        body: writes the results. It is called with what the fake returns, None for no result, and
            with all arguments of the op, by their places.
    """
    given = schema_of(op).arguments
    defaults = {a.name: a.default_value for a in given if a.has_default_value()}
    tensors = {i: a.name for i, a in enumerate(given) if isinstance(a.type, torch.TensorType)}

    @on_one_device(op)
    def computed(*args: Any, **kwargs: Any) -> Any:
        rest = (
            kwargs[a.name] if a.name in kwargs else defaults[a.name] for a in given[len(args) :]
        )
        complete = (*args, *rest)
        for place, name in tensors.items():
            if complete[place] is None:
                raise RuntimeError(f"{op.name()}: {name} is None, where a tensor was expected")
        results = fake(*complete)
        body(results, *complete)
        return results

    register_fake(op, fake)
    implement(op, computed, "CompositeExplicitAutograd")
    BODIES[op] = computed


def register_autograd(
    op: OpOverload[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., Any],
) -> Leaf:
    """Registers an op's autograd formula. Returns the op with a shorter way in eager code.

    In a compiled step that calls ``loss.backward()`` itself, torch 2.11 compiles the formula as if
    it were the user's, and stops at torch's own names in it. Dynamo is kept out of it there.
    """
    if torch.__version__ < "2.13":
        backward = not_compiled(partial(backward))  # a method has no place for what is noted there
    torch.library.register_autograd(op.name(), backward, setup_context=setup_context, lib=LIBRARY)
    return Leaf(op, backward, setup_context)


def register_not_differentiable(op: OpOverload[..., Any]) -> Callable[..., Any]:
    """For ops of calls that record no gradient. Returns a shorter way to the op below autograd."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError(
                f"{op.name()} is not differentiable: it is for calls that record no gradient. "
                "Detach its arguments, or call the public op"
            )
        with BelowAutograd():
            return op(*args, **kwargs)

    implement(op, kernel, "Autograd")
    return below_autograd(op)


def implement(op: OpOverload[..., Any], kernel: Callable[..., Any], key: str) -> None:
    LIBRARY.impl(op.name(), kernel, key)


def compose(
    op: OpOverload[..., Any], kernel: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Registers an op that a function of other ops computes, for calls that record no gradient.
    Returns what :func:`register_not_differentiable` does."""
    implement(op, kernel, "CompositeExplicitAutograd")
    register_fake(op, fake)
    COMPOSED[op] = kernel
    return register_not_differentiable(op)


def implement_public(op: OpOverload[..., Any], kernel: Callable[..., Any]) -> None:
    """Registers the kernel of a public op, which is composed of other ops.

    The kernel gets tensors of ``vmap`` and DTensors unchanged. So it first asks for their mesh:
    ``compile_losses.distributed.mesh_of``.
    """
    implement(op, kernel, "CompositeImplicitAutograd")
    implement(op, kernel, "FuncTorchBatched")


@cache
def public_ops() -> list[str]:
    """The losses under ``torch.ops.fused``, without the ops that they are composed of."""
    return sorted(name for name in DECLARED if f"{name}_forward" in DECLARED)


def documented_ops() -> list[str]:
    """The ops that are public: the losses, and what computes no loss but numbers of rows."""
    return sorted(name for name in DECLARED if not INTERNAL.fullmatch(name))


def document(name: str, text: str | None) -> None:
    """What ``help(torch.ops.fused.name)`` prints."""
    packet = getattr(torch.ops.fused, name)
    packet.__doc__ = packet.default.__doc__ = text


def _cpu_candidates() -> list[Path]:
    """The CPU libraries that this processor can run, the best first (ATEN_CPU_CAPABILITY holds)."""
    ranked = ["default", "avx2", "avx512"]
    capability = torch.backends.cpu.get_cpu_capability().lower()
    best = ranked.index(capability) if capability in ranked else 0
    names = (f"_cpu_{name}.so" for name in reversed(ranked[: best + 1]))
    return [PACKAGE / name for name in names]


def load_kernels() -> None:
    """Loads the libraries built from ``csrc/``, as far as there are any that load."""
    report_kernels("cpu", _load_cpu())
    report_kernels("cuda", _load_cuda())


def report_kernels(device: str, file: Path | str) -> None:
    """Notes the file that a device's kernels were loaded from, or the reason why there are none."""
    kernels[device] = file
    if isinstance(file, Path):
        DEVICES.add(device)
    else:
        DEVICES.discard(device)


def _load_cpu() -> Path | str:
    built = [path for path in _cpu_candidates() if path.exists()]
    if not built:
        others = ", ".join(sorted(path.name for path in PACKAGE.glob("_cpu_*.so")))
        if others:
            return f"not built for this processor or ATEN_CPU_CAPABILITY, only {others}"
        return build_record("cpu").get("missing", f"not built: there are none in {PACKAGE}")
    return _load(built[0])


def _load(library: Path) -> Path | str:
    """Loads a library that is there. If that fails, a warning says so: somebody has built it."""
    try:
        torch.ops.load_library(library)
    except OSError as error:
        reason = f"failed to load {library.name}: {error}"
        warnings.warn(
            f"compile_losses: {reason}. Its ops are computed in torch's. Build it anew with "
            f"`{INSTALL_COMMAND}` in the source tree, or install a wheel for this torch.",
            stacklevel=2,
        )
        return reason
    return library


def _load_cuda() -> Path | str:
    library = PACKAGE / "_cuda.so"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    built = cuda_build()
    if not library.exists():
        return f"not built: {built.get('missing', f'{library.name} is not in {PACKAGE}')}"
    version, torchs = built.get("version"), torch.version.cuda
    if version is not None and version.split(".")[0] != torchs.split(".")[0]:
        return f"built for CUDA {version}, this torch is of CUDA {torchs}"
    present = _capabilities()
    if present and not any(runs_on(capability) for capability in present):
        return _built_for(present[0])
    return _load(library)


def loaded() -> tuple[tuple[str, str], ...]:
    """For each device type the file of its kernels, or the reason why there are none."""
    return tuple(
        (device, file.name if isinstance(file, Path) else file) for device, file in kernels.items()
    )


@cache
def cuda_build() -> dict[str, Any]:
    """The build's record of the CUDA kernels: their ``version`` of CUDA and the ``architectures``
    that they are compiled for, or why they are ``missing``. Empty if there is no record."""
    return build_record("cuda")


def build_record(device: str) -> dict[str, Any]:
    """What the build has noted about the kernels of a device. Empty if there is no record."""
    try:
        return dict(json.loads((PACKAGE / "kernels.json").read_text()).get(device, {}))
    except FileNotFoundError:
        return {}


def no_kernels(device: torch.device) -> str | None:
    """Why the ops can't compute on a device; None if they can."""
    built = kernels.get(device.type, "compile_losses has none for it")
    if isinstance(built, str):
        return built
    # One of a machine's GPUs may be older than the others. If CUDA is not in use, a tensor on this
    # device is a fake one.
    if device.type == "cuda" and torch.cuda.is_initialized():
        capability = torch.cuda.get_device_capability(device)
        return None if runs_on(capability) else _built_for(capability)
    return None


@cache
def runs_on(capability: tuple[int, int]) -> bool:
    """Whether the CUDA kernels run on GPUs of a compute capability."""
    architectures = cuda_build().get("architectures")
    return architectures is None or any(_runs(name, capability) for name in architectures)


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """``9.0`` is code for 9.0 and later 9.x, ``9.0a`` for 9.0, ``9.0+PTX`` for all from 9.0."""
    number = architecture.removesuffix("+PTX")
    major, minor = (int(part) for part in number.rstrip(ascii_lowercase).split("."))
    if number[-1].isalpha():
        return (major, minor) == capability
    newest = (99, 0) if architecture.endswith("+PTX") else (major, 99)
    return (major, minor) <= capability <= newest


def _built_for(capability: tuple[int, int]) -> str:
    return (
        f"built for GPUs of compute capability {', '.join(cuda_build()['architectures'])}, "
        "not {}.{}".format(*capability)
    )


def _capabilities() -> list[tuple[int, int]]:
    """The capabilities of this machine's GPUs, from NVIDIA's management library; empty if unknown.

    Unlike CUDA, the library may be used in a process that forks afterwards."""
    found = []
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return []
        count, device = ctypes.c_uint(), ctypes.c_void_p()
        major, minor = ctypes.c_int(), ctypes.c_int()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for i in range(count.value):
            ask = nvml.nvmlDeviceGetCudaComputeCapability
            if nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(device)) == 0 and (
                ask(device, ctypes.byref(major), ctypes.byref(minor)) == 0
            ):
                found.append((major.value, minor.value))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return []
    return found


@cache
def warn_of_no_kernels(device_type: str, reason: str) -> None:
    """Warns once that there are no kernels for a device that has some, and says what to install."""
    warnings.warn(
        f"compile_losses has no kernels for {device_type}, and uses torch's ops: {reason}. "
        f"{INSTALL_CUDA}",
        stacklevel=2,
    )


@cache
def fingerprint() -> str:
    """A hash of the package's sources and built kernels, for the keys of torch.compile's caches.

    AOTAutograd's key contains neither the autograd formulas of an op nor its kernels. Without this
    hash the cache would return the old gradient after a formula changes.
    """
    return hash_of([*PACKAGE.rglob("*.py"), *PACKAGE.glob("*.so")], PACKAGE)


def hash_of(files: Iterable[Path], folder: Path) -> str:
    """A hash of files' contents and of their names in a folder."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
