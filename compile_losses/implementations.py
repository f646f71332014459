"""Which implementation of the ops computes on a device, in one table, and why not another.

``kernels`` are those of the built libraries. ``torch's ops`` are the bodies of
:mod:`compile_losses.bodies`, which the dispatcher takes where a device has no kernel.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from compile_losses import library, switches
from compile_losses.torch_internals.eager import no_modes
from compile_losses.torch_internals.ops import has_kernel, key_of_device, take_back

#: The reason of kernels that are switched off.
OFF = "switched off, by COMPILE_LOSSES_KERNELS=0 or the option kernels"


@dataclass(frozen=True)
class Implementation:
    """A way to compute the ops.

    Attributes:
        name: in words.
        refuses: why it does not compute on a device; None if it does.
    """

    name: str
    refuses: Callable[[torch.device], str | None]


@dataclass(frozen=True)
class Choice:
    """What computes on a device.

    Attributes:
        implementation: the first that does not refuse; None if all do.
        reasons: why those before it refuse.
    """

    implementation: Implementation | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        name = "left to torch" if self.implementation is None else self.implementation.name
        return ": ".join([name, *self.reasons])


def _failed_self_test(device: torch.device) -> str | None:
    """Why torch's ops can't take the place of kernels; None if they were tested on the device."""
    if device.type == "meta":
        return "a meta tensor has no numbers"
    if isinstance(library.kernels.get(device.type), Path):
        return "the dispatcher would call the kernels that are there for other devices of its type"
    return _tested(device.type, device.index)


@functools.cache
def _tested(type: str, index: int | None) -> str | None:
    from compile_losses import self_test

    with no_modes():
        return self_test.failure(torch.device(type if index is None else f"{type}:{index}"))


KERNELS = Implementation("kernels", library.no_kernels)
BODIES = Implementation("torch's ops", _failed_self_test)

#: For each device type its implementations, the best first.
TABLE = {"cpu": (KERNELS, BODIES), "cuda": (KERNELS, BODIES)}
#: Those of a device type that the table does not name.
OTHERS = (BODIES,)


def choose(device: torch.device) -> Choice:
    """What computes on a device. If it is not known yet, torch's ops are tested on it."""
    reasons: list[str] = []
    for each in TABLE.get(device.type, OTHERS):
        reason = each.refuses(device)
        if reason is None:
            return Choice(each, tuple(reasons))
        reasons.append(reason)
    return Choice(None, tuple(reasons))


def has_kernels(device: torch.device) -> bool:
    """Whether kernels compute on a device. Nothing is tested."""
    return KERNELS in TABLE.get(device.type, OTHERS) and KERNELS.refuses(device) is None


def none_on(device: torch.device) -> str | None:
    """Why nothing computes on a device; None if something does."""
    choice = choose(device)
    return None if choice.implementation is not None else ", and ".join(choice.reasons)


#: Holds the bodies in the place of kernels that are loaded, while these are switched off.
_in_place_of_kernels: torch.library.Library | None = None
#: What was loaded, while it is switched off.
_loaded: dict[str, Path | str] = {}


def use_kernels(wanted: bool) -> None:
    """Switches the kernels on or off, for all calls of this process, compiled or not."""
    if wanted == (OFF not in library.kernels.values()):
        return
    if wanted:
        _switch_on()
    else:
        _switch_off()


def _switch_off() -> None:
    global _in_place_of_kernels
    _loaded.update(library.kernels)
    devices = [device for device, file in _loaded.items() if isinstance(file, Path)]
    if devices:
        _in_place_of_kernels = torch.library.Library("fused", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for op, body in library.BODIES.items():
                for device in devices:
                    key = key_of_device(device)
                    _in_place_of_kernels.impl(op.name(), body, key, allow_override=True)
    for device in ("cpu", "cuda"):
        library.report_kernels(device, OFF)


def _switch_on() -> None:
    global _in_place_of_kernels
    if _in_place_of_kernels is not None:
        take_back(_in_place_of_kernels)
        _in_place_of_kernels = None
    if not _loaded:
        load()
    for device, file in _loaded.items():
        library.report_kernels(device, file)
    _loaded.clear()


def load() -> None:
    """Loads the kernels, and says so if they are older than the ops."""
    library.load_kernels()
    for device, file in library.kernels.items():
        if not isinstance(file, Path):
            continue
        missing = [
            op.name() for op in library.BODIES if not has_kernel(op.name(), key_of_device(device))
        ]
        if missing:
            warnings.warn(
                f"compile_losses: {file.name} was built from older sources, without "
                f"{', '.join(sorted(missing))}, which torch's ops compute instead. Build it anew "
                f"with `{library.INSTALL_COMMAND}` in the source tree.",
                stacklevel=2,
            )


def begin() -> None:
    """At the import of the ops: what the environment asks for."""
    if switches.uses_kernels():
        load()
    else:
        _switch_off()
