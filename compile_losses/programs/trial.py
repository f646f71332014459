"""One run of a user's step for ``bisect``, in its own process.

So each run begins with the same weights and random numbers, and may crash or hang. It is started
as ``python -m compile_losses.programs.trial``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from compile_losses.backend import compile_losses, given_to
from compile_losses.comparison import compare_call
from compile_losses.guard import is_restart
from compile_losses.options import InvalidOptionError, Settings
from compile_losses.programs.running import load
from compile_losses.programs.user_step import Runner
from compile_losses.recognize.match import example
from compile_losses.recognize.steps import Graphs
from compile_losses.report.explanation import explain_call
from compile_losses.sites import first_line, shorten
from compile_losses.torch_internals.dynamo import (
    lookup_backend,
    uncompiled,
    without_earlier_sizes,
    without_recompile_limits,
)
from compile_losses.torch_internals.ops import HigherOrderOperator, tree_leaves

#: What a trial is asked for: to run the step, to measure it beside stock's, where its losses are,
#: and what ``explain`` says of it.
STEP, TIME, SITES, REPORT = "step", "time", "sites", "report"


def step(
    function: Callable[..., Any], mode: str | None, options: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Runs the compiled step so often.

    Returns:
        The losses, and the gradients of the last step: of a step that clears them, the change of
        the weights.
    """
    backend = partial(compile_losses, mode=mode, options=options)
    runner = Runner(torch.compile(uncompiled(function), backend=backend), {})
    losses: list[float | None] = []
    for number in range(steps):
        torch.manual_seed(number)
        if runner.has_differentiated:
            for leaf in runner.leaves:
                leaf.grad = None
        before = [leaf.detach().clone() for leaf in runner.leaves]
        loss = runner.step()
        losses.append(None if loss is None else float(loss))
    tensors = [leaf.grad for leaf in runner.leaves]
    if len(before) == len(tensors) and all(gradient is None for gradient in tensors):
        pairs = zip(runner.leaves, before, strict=True)
        tensors = [leaf.detach() - earlier for leaf, earlier in pairs]
    return {"losses": losses, "tensors": [None if t is None else t.cpu() for t in tensors]}


def measured(
    function: Callable[..., Any], mode: str | None, options: dict[str, Any], steps: int
) -> dict[str, Any]:
    """How long the step takes, by stock's time."""
    found = compare_call(function, mode=mode, options=options, steps=steps)
    return {"ratio": found.to_dict()["time_ratio"]}


def sites(
    function: Callable[..., Any], mode: str | None, options: dict[str, Any], _: int
) -> dict[str, Any]:
    """The places of the losses; the graphs run without a compiler as torch has them.

    Returns:
        The places as in the option ``except`` with their losses, and the least exact dtype's eps.
    """
    settings = Settings.of(mode, options)
    found: dict[str, str] = {}
    dtypes: set[torch.dtype] = set()

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for node in gm.graph.nodes:
            values = tree_leaves(example(node))
            dtypes.update(v.dtype for v in values if isinstance(v, torch.Tensor))
        graphs = Graphs(gm.graph, gm)
        for site in settings.rewrite_graph(gm.graph, module=gm).losses:
            found.setdefault(f"{shorten(site.file)}:{site.line}", site.op)
        graphs.restore()
        if any(isinstance(node.target, HigherOrderOperator) for node in gm.graph.nodes):
            return lookup_backend("aot_eager")(gm, example_inputs)
        return gm.forward

    with without_recompile_limits(), without_earlier_sizes():
        torch.compile(uncompiled(function), backend=backend)()
    eps = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
    return {"places": found, "eps": max(eps, default=torch.finfo(torch.float32).eps)}


def told(
    function: Callable[..., Any], mode: str | None, options: dict[str, Any], _: int
) -> dict[str, Any]:
    """The report of ``explain``."""
    return {"report": str(explain_call(function, mode=mode, options=options))}


KINDS = {STEP: step, TIME: measured, SITES: sites, REPORT: told}


def attempted(
    function: Callable[..., Any], what: str, mode: str | None, options: dict[str, Any], steps: int
) -> dict[str, Any]:
    """The result of a trial, or the error that it ends with, or why it can't be tried."""
    own_mode, own = given_to(function)
    try:
        return KINDS[what](function, mode or own_mode, {**(own or {}), **options}, steps)
    except InvalidOptionError as error:
        return {"refused": str(error)}
    except Exception as error:
        if is_restart(error):
            raise
        return {"error": _in_words(error)}


def _in_words(error: Exception) -> str:
    """The first line of an error; of one of a backend the line of the error inside."""
    line, _, inside = str(error).partition("\n")
    if inside and line.startswith("backend=") and line.endswith("raised:"):
        return first_line(inside)
    return f"{type(error).__name__}: {first_line(line)}"


def main(request: str) -> None:
    """Does what a request in JSON asks for, and leaves the result in a file."""
    given = json.loads(request)
    torch.manual_seed(0)
    try:
        function = load(given["target"])
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, SystemExit) else f"{type(error).__name__}: "
        result: dict[str, Any] = {"refused": f"{kind}{error}"}
    else:
        torch.manual_seed(0)
        result = attempted(function, *(given[k] for k in ("what", "mode", "options", "steps")))
    torch.save(result, given["result"])


if __name__ == "__main__":
    main(sys.argv[1])
