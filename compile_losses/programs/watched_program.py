"""One side of ``run --compare``, in its own process.

A step is what happens between two steps of the program's first optimizer. After each of them the
program waits for the word of the process that compares. It is started as
``python -m compile_losses.programs.watched_program``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.optim.optimizer import register_optimizer_step_post_hook

from compile_losses.lower.decision import Decision
from compile_losses.programs.measuring import PeakMemory, synchronize
from compile_losses.programs.running import run
from compile_losses.report import Report, log_line
from compile_losses.report.explanation import add_graph

#: The words: another step, another one whose memory is measured, or no more.
STEP, MEMORY, END = "step", "memory", "end"
#: So many numbers of the gradients are compared, at most.
_MOST_NUMBERS = 2**28


class Watch:
    """What a program does, step by step.

    Args:
        words: where the other process says how to go on.
        told: where each step is told.
        path: where the gradients of the first step are left.
    """

    def __init__(self, words: IO[str], told: IO[str], path: str) -> None:
        self.words = words
        self.told = told
        self.path = path
        self.report = Report()
        self.losses: list[Tensor] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.start = time.perf_counter()
        self.memory: PeakMemory | None = None

    def install(self) -> None:
        register_optimizer_step_post_hook(self.stepped)
        log_line.collectors.append(self.compiled)
        backward = Tensor.backward

        def noted(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if loss.numel() == 1:
                self.losses.append(loss.detach())
            backward(loss, *args, **kwargs)

        Tensor.backward = torch.compiler.disable(noted)  # type: ignore[method-assign]

    def compiled(self, gm: GraphModule) -> Callable[[Sequence[Decision]], None]:
        """Adds a graph to the report, once it is compiled."""
        graph, found = Graph(), gm.meta["compile_losses"]
        graph.output(graph.graph_copy(gm.graph, {}))  # before Inductor's passes change it
        return lambda decisions: add_graph(self.report, graph, found, decisions)

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Tells a step of the first optimizer, and waits."""
        if self.optimizer is None:
            self.optimizer = optimizer
            _save_gradients(optimizer, self.path)
        if optimizer is not self.optimizer:
            return
        device = _device(optimizer)
        synchronize(device)
        step = {"time": time.perf_counter() - self.start}
        if self.memory is not None:
            step["memory"] = self.memory.stop()
            self.memory = None
        if self.losses:  # those of parts of a batch are parts of its mean
            step["loss"] = float(sum(loss.double().reshape(()) for loss in self.losses))
            self.losses.clear()
        self.tell(step)
        word = self.words.readline().strip()
        if word in ("", END):
            self.end()
        if word == MEMORY:
            self.memory = PeakMemory(device)
            self.memory.start()
        self.start = time.perf_counter()

    def tell(self, step: dict[str, Any]) -> None:
        self.told.write(json.dumps(step) + "\n")
        self.told.flush()

    def end(self) -> None:
        """Leaves the report, and waits for the end of the process: the program must not go on, and
        save what it did not train."""
        torch.save(self.report, f"{self.path}.report")
        self.tell({})
        self.words.read()


def _device(optimizer: torch.optim.Optimizer) -> torch.device:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return parameter.device
    return torch.device("cpu")


def _save_gradients(optimizer: torch.optim.Optimizer, path: str) -> None:
    """Saves the gradients; of many numbers some."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    numbers = sum(g.numel() for g in gradients if g is not None)
    every = -(-numbers // _MOST_NUMBERS) or 1
    kept = [None if g is None else g.detach().flatten()[::every].cpu() for g in gradients]
    torch.save(kept, path)


def main(request: str, program: Sequence[str]) -> None:
    """Runs a program until it is told to end.

    Args:
        request: in JSON the file descriptors, the path of the gradients, and options.
    """
    given = json.loads(request)
    random.seed(0)
    torch.manual_seed(0)
    watch = Watch(os.fdopen(given["words"]), os.fdopen(given["told"], "w"), given["path"])
    watch.install()
    run(program, given["options"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
