"""The place of a loss in a user's program, and the mark that identifies the loss in lower graphs.

Recognition, the passes on lower graphs and the report share this module.
"""

from __future__ import annotations

import itertools
import os
import re
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from compile_losses import switches
from compile_losses.graphs import annotate
from compile_losses.torch_internals.graphs import CUSTOM

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(, in (?P<function>\w+))?')
_TORCH = os.path.join(os.path.realpath(os.path.dirname(torch.__file__)), "")
_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {
        os.path.dirname(torch.__file__),
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
        sysconfig.get_paths()["stdlib"],
    }
)

_OURS = os.path.join(os.path.realpath(os.path.dirname(__file__)), "")
#: Its models are as a user's.
_DEMO = os.path.join(_OURS, "demo", "")

UNRECOGNISED = "unrecognised"

#: Where packages are installed.
_PACKAGES = tuple(
    os.path.join(os.path.realpath(sysconfig.get_paths()[name]), "")
    for name in ("purelib", "platlib")
)

GAINED, AS_STOCK = "gained", "as stock"
#: The part of torch's bytes of which fewer are a gain.
LEAST_GAIN = 0.99

#: Tracing copies ``meta[CUSTOM]`` from a Dynamo node to all nodes that it becomes, and AOTAutograd
#: copies it from a forward node to its backward. This is our entry in it.
_SITE = "compile_losses"
#: Beside it, for a loss that never has all of its logits, even without this package.
_WITHOUT_LOGITS = "compile_losses_without_logits"
_numbers = itertools.count()


@dataclass(frozen=True)
class Site:
    """One loss in a user's program.

    Attributes:
        op: the fused op, or the torch function that was left alone; ``"elementwise"`` for a loss
            without either, whose gradient may be computed together with it; for an unrecognised
            number, the function that reduces a tensor to it.
        status: ``"rewritten"``; ``"declined"``; or ``"unrecognised"``, for a reduction in a number
            that the function returns or differentiates: it may be a loss that is not known.
        reason: why it was declined, or which ops were absorbed into the op; may be empty.
        file, line: the innermost frame of the user's own code, outside installed libraries; if
            there is none, a frame of a library's model.
        graph: the index of its graph, counted from 0.
        plan: the steps in which Inductor's graphs compute a rewritten loss; empty if they are not
            known for certain.
        details: the reasons for the plan.
        bytes_moved, bytes_held: an estimate of the bytes that the loss's forward and backward move,
            and of the most that are held for it at a time; None if unknown.
        stock_bytes_moved, stock_bytes_held: the same for torch's own ops.
        mark: the loss's number in the process; it identifies the loss in lower graphs.
    """

    op: str
    status: str
    reason: str
    file: str
    line: int
    graph: int = 0
    plan: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    bytes_moved: int | None = None
    bytes_held: int | None = None
    stock_bytes_moved: int | None = None
    stock_bytes_held: int | None = None
    mark: int | None = field(default=None, repr=False, compare=False)

    @property
    def gain(self) -> str:
        """``"gained"`` if the plan of a rewritten loss moves or holds fewer bytes than torch's own
        ops; ``"as stock"`` if not, and for other losses; empty if it is not known."""
        if self.status == "declined":
            return AS_STOCK
        if self.bytes_moved is None or self.stock_bytes_moved is None:
            return ""
        moves_less = self.bytes_moved < LEAST_GAIN * self.stock_bytes_moved
        return GAINED if moves_less or self.bytes_saved else AS_STOCK

    @property
    def bytes_saved(self) -> int:
        """How many bytes less than for torch's own ops are held at a time."""
        if self.bytes_held is None or self.stock_bytes_held is None:
            return 0
        less = self.bytes_held < LEAST_GAIN * self.stock_bytes_held
        return self.stock_bytes_held - self.bytes_held if less else 0

    @property
    def traffic(self) -> str:
        """The bytes moved, and those that torch's own ops move."""
        if self.bytes_moved is None or self.stock_bytes_moved is None:
            return ""
        return f"{megabytes(self.bytes_moved)} / {megabytes(self.stock_bytes_moved)}"

    @property
    def notes(self) -> str:
        return "; ".join(note for note in (self.reason, *self.details) if note)


def mark(node: Node, *, without_logits: bool = False) -> int:
    """Gives a Dynamo node a number. The nodes that it becomes after autograd have it as well.

    Args:
        without_logits: whether the loss that the node takes the place of never held all logits.
    """
    number = next(_numbers)
    more = {_WITHOUT_LOGITS: True} if without_logits else {}
    annotate(node, CUSTOM, {**node.meta.get(CUSTOM, {}), _SITE: number, **more})
    return number


def is_without_logits(node: Node) -> bool:
    """Whether a node takes the place of a loss that never held all logits."""
    custom: dict[str, Any] = node.meta.get(CUSTOM) or {}
    return _WITHOUT_LOGITS in custom


def site_of(node: Node) -> int | None:
    custom: dict[str, Any] = node.meta.get(CUSTOM) or {}
    return custom.get(_SITE)


def source_of(node: Node) -> tuple[str, int]:
    """The file and line of the user's code that made a node, as Dynamo recorded it.

    If a library's model is compiled by itself, no line is the user's. Then the line is in the
    ``forward`` of that model, and not in the functions that the model calls for its loss.
    """
    return line_in(node.meta.get("stack_trace") or "")


def left_out(node: Node) -> str | None:
    """Why options leave the loss of a node to torch by its place; None if they don't."""
    places = switches.left_out()
    if not places:
        return None
    source, own_line = source_of(node)
    folders = Path(os.path.realpath(source)).parts
    for name in places:
        place = switches.place_of(name)
        if place is not None and place[1] == own_line:
            named = Path(os.path.normpath(place[0])).parts
            if folders[-len(named) :] == named:
                return f"options leave out {name}"
    return None


def line_in(trace: str) -> tuple[str, int]:
    """The file and line of the user's code in a stack trace, as for :func:`source_of`."""
    frames = [f for f in _FRAME.finditer(trace) if not _is_ours(f["file"])]
    if not frames:
        return "<unknown>", 0
    paths = [os.path.realpath(frame["file"]) for frame in frames]
    own = [f for f, path in zip(frames, paths, strict=True) if not path.startswith(_LIBRARIES)]
    models = [
        frame
        for frame, path in zip(frames, paths, strict=True)
        if frame["function"] == "forward" and not path.startswith(_TORCH)
    ]
    frame = (own or models or frames)[-1]
    return frame["file"], int(frame["line"])


def _is_ours(file: str) -> bool:
    path = os.path.realpath(file)
    return path.startswith(_OURS) and not path.startswith(_DEMO)


def functions_of(node: Node) -> list[tuple[str, str]]:
    """The files and names of the functions whose calls made a node."""
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return [(frame["file"], frame["function"]) for frame in frames]


def function_of(node: Node) -> str:
    """The name of the function, method or op that a node calls."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return str(name).partition(".")[0] or node.name


def in_words(node: Node) -> str:
    """A node in words: what it calls, and the user's line."""
    file, line = source_of(node)
    name = function_of(node)
    return f"{name} ({shorten(file)}:{line})" if line > 0 else name


def frames_of(node: Node) -> list[tuple[str, int]]:
    """The files and lines of the calls that made a node, the innermost last."""
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return [(frame["file"], int(frame["line"])) for frame in frames]


def library_of(file: str) -> str | None:
    """The installed package that a file belongs to; None for a user's own file, and Python's."""
    path = os.path.realpath(file)
    for place in _PACKAGES:
        if path.startswith(place):
            return path.removeprefix(place).split(os.sep)[0].removesuffix(".py")
    return None


def shorten(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def megabytes(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"


def first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "unknown"


def number_of(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
