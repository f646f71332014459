"""Models that return their logits beside the loss: a training step's time and peak memory.

``python -m benchmarks returned`` compiles a language model of transformers, or a step that returns
only the model's loss, with stock torch.compile and with this package, and the model once more with
``lazy_logits``. Each runs forward and backward. ``ours_lazy_read`` reads the logits after the
forward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import linear_steps, report
from benchmarks.clock import Call, make_clock
from benchmarks.models import TASKS, Size
from benchmarks.options import DTYPES, add_options, provenance
from compile_losses.lazy import plain

Step = Callable[..., Tensor]
MODELS = ("llama", "qwen3", "gemma2")


class Problem:
    """A model and a batch."""

    def __init__(self, name: str, size: Size, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        with torch.device(device):
            setup = TASKS[name].make(size, dtype)
            self.model, self.loss = setup.model, setup.loss
            self.batch = setup.batch(torch.Generator(device).manual_seed(0))
        self.expected = self.results(self.loss)

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def next_call(self, step: Step) -> Call:
        self.clear()
        return partial(self.run, step)

    def run(self, step: Step) -> Tensor:
        loss = step(*self.batch)
        loss.backward()
        return loss.detach()

    def errors(self, step: Step) -> list[float]:
        """The errors of the loss and of the gradients of the head and the first layers."""
        return [
            linear_steps.relative_error(ours, theirs)
            for ours, theirs in zip(self.results(step), self.expected, strict=True)
        ]

    def results(self, step: Step) -> list[Tensor]:
        self.clear()
        loss = self.run(step)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [loss.float(), *(g.float() for g in (gradients[0], gradients[1], gradients[-1]))]


def _step(problem: Problem, **options: Any) -> Step:
    return torch.compile(problem.loss, **options)


def _model(problem: Problem, *, reads: bool = False, **options: Any) -> Step:
    compiled = torch.compile(problem.model, **options)

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        out = compiled(input_ids=input_ids, labels=labels)
        if reads:
            plain(out.logits.detach())
        loss: Tensor = out.loss
        return loss

    return step


_OURS: dict[str, Any] = {"backend": "compile_losses"}
_LAZY: dict[str, Any] = {**_OURS, "options": {"lazy_logits": True}}
BUILDERS: dict[str, tuple[Callable[[Problem], Step], str]] = {
    "inductor": (_model, "torch"),
    "inductor_step": (_step, "torch"),
    "ours": (partial(_model, **_OURS), "compile_losses"),
    "ours_step": (partial(_step, **_OURS), "compile_losses"),
    "ours_lazy": (partial(_model, **_LAZY), "compile_losses"),
    "ours_lazy_read": (partial(_model, reads=True, **_LAZY), "compile_losses"),
}


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    clock = make_clock(device)
    output = arguments.output or report.default_output(device, "returned")
    results = linear_steps.Results(output, append=arguments.append)
    print(linear_steps.HEADER)
    for name in arguments.model:
        size = TASKS[name].reference if device.type == "cuda" else TASKS[name].small
        problem = Problem(name, size, DTYPES[arguments.dtype], device)
        shape = f"{name} {size.batch}x{size.length}x{size.width}x{size.classes}"
        common = {**provenance(arguments, device), "dtype": arguments.dtype, "shape": shape}
        ulps = 16 * linear_steps.ULPS * torch.finfo(DTYPES[arguments.dtype]).eps
        rows = linear_steps.measured(
            {
                each: (partial(build, problem), package)
                for each, (build, package) in BUILDERS.items()
                if each in arguments.contender
            },
            problem,
            [ulps] * len(problem.expected),
            clock,
            arguments.budget,
            common,
        )
        print(*rows, sep="\n", flush=True)
        results.add(rows)
    print(f"wrote {output}")
    return int(results.broken)


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    parser = commands.add_parser(
        "returned", help="models that return logits, with peak memory", description=__doc__
    )
    choose = partial(parser.add_argument, nargs="+", help="default: all")
    choose("--model", choices=MODELS, default=list(MODELS))
    choose("--contender", choices=BUILDERS, default=list(BUILDERS))
    cuda = torch.cuda.is_available()
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32")
    add_options(parser, 0.5, append=True)
