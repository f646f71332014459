"""Why a report has no loss, and what to do. For reports alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch.fx import Graph, Node

from compile_losses.sites import frames_of, library_of, shorten
from compile_losses.torch_internals.ops import HigherOrderOperator

#: Namespaces of ops that are torch's or ours.
_KNOWN = ("aten", "prims", "prim", "fused", "_c10d_functional", "c10d_functional", "higher_order")

NOTHING_COMPILED = (
    "no graph was compiled: Dynamo found no operation on tensors, or the function is skipped or "
    "disabled (torch.compiler.disable). Give explain the function that computes the loss; "
    "TORCH_LOGS=graph_breaks says what Dynamo skipped"
)
GIVEN_UP = (
    "no graph was compiled: Dynamo gives up a function whose graph breaks inside a loop, as that "
    "of gradient accumulation does at backward(). Compile what the loop calls, the model and its "
    "loss in one function, and leave backward() outside"
)
OUTSIDE = (
    "no compiled graph returns a number that needs a gradient: the loss is outside of the compiled "
    "function. Compile the function that computes the loss as well: the model and its loss in one "
    "function, or torch.compile(loss_function) beside the model"
)
UNKNOWN = (
    "what the graphs return is computed from lines that are no known loss; docs/patterns.md lists "
    "the spellings that are known"
)


def foreign_calls(graph: Graph) -> list[str]:
    """Calls of a graph into which torch.compile does not look, with their library and line."""
    return list(dict.fromkeys(_calls(graph.nodes)))


def broken_in(place: tuple[str, int]) -> str | None:
    """A graph break inside a library, with its line; None for a break in other code."""
    library = library_of(place[0])
    if library in (None, "torch"):
        return None
    return f"a call in {library} that ends the graph ({shorten(place[0])}:{place[1]})"


def _calls(nodes: Iterable[Node]) -> Iterator[str]:
    for node in nodes:
        target = node.target
        if isinstance(target, HigherOrderOperator):
            name = target.name()
            if name == "autograd_function_apply":
                what = "an autograd.Function"
            elif name.startswith("triton_kernel_wrapper"):
                what = "a Triton kernel"
            else:
                continue
        elif (namespace := getattr(target, "namespace", "aten")) not in _KNOWN:
            what = f"the op torch.ops.{namespace}.{target.__name__.split('.')[0]}"  # type: ignore[union-attr]
        else:
            continue
        frames = [frame for frame in frames_of(node) if library_of(frame[0]) != "torch"]
        file, line = frames[-1] if frames else ("<unknown>", 0)
        library = library_of(file)
        whose = f"in {library}" if library else "of your own"
        yield f"{what} {whose} ({shorten(file)}:{line})"


def why_none(graphs: int, breaks: int, results: int, foreign: Sequence[str]) -> list[str]:
    """The lines of a report of so many graphs without a loss.

    Args:
        breaks: how many reasons Dynamo gave for breaking a graph.
        results: how many numbers that need a gradient the graphs return.
        foreign: what :func:`foreign_calls` and :func:`broken_in` have found.
    """
    if graphs == 0:
        return [GIVEN_UP if breaks else NOTHING_COMPILED]
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        return [
            f"the loss may be inside of {', '.join(foreign[:3])}{more}, where recognition does not "
            "look: let torch's own functions compute it instead (a library may have an option for "
            "that, as use_liger_kernel=False of transformers)"
        ]
    return [UNKNOWN if results else OUTSIDE]
