"""The graphs that the passes on AOTAutograd's graphs leave, as text."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.virtualized import V

from compile_losses import backend, inductor_passes
from compile_losses.lower.decision import Decision
from compile_losses.report import planned_sites
from compile_losses.sites import Site


class Head(nn.Module):
    """A linear layer and a loss of what it returns."""

    def __init__(self, loss: Callable[..., torch.Tensor], prepare=lambda x: x):
        super().__init__()
        self.linear = nn.Linear(16, 12)
        self.loss = loss
        self.prepare = prepare

    def forward(self, x, target, *others):
        return self.loss(self.prepare(self.linear(x)), target, *others)


def real(rows=8):
    return torch.randn(rows, 16), torch.randn(rows, 12)


def classes(rows=8):
    return torch.randn(rows, 16), torch.randint(12, (rows,))


def distributions(rows=8):
    return torch.randn(rows, 16), torch.rand(rows, 12).softmax(-1)


def listing(graph: torch.fx.Graph) -> str:
    calls = (node for node in graph.nodes if node.op in ("call_function", "call_method"))
    lines = (str(node.format_node()) for node in calls)
    return "\n".join(
        re.sub(r" : \[.*?\]|: \"[^\"]*\"|\[num_users=\d+\]", "", line) for line in lines
    )


def writes(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The calls that write to an argument, but for AOTAutograd's own copies into graph inputs."""
    return [
        node
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and node.target is not torch.ops.aten.copy_.default
    ]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[str]]]:
    """The joint and the forward and backward graphs, before and after our passes."""
    found: dict[str, list[str]] = {"before": [], "joint": [], "post": []}

    def record(kind, function):
        def wrapped(lowering_pass, graph):
            if kind == "joint":
                found["before"].append(listing(graph))
            function(lowering_pass, graph)
            if kind == "joint":
                assert not (written := writes(graph)), f"Inductor takes this for pure: {written}"
            found[kind].append(listing(graph))

        return wrapped

    for kind, lowering in (
        ("joint", inductor_passes.PlanPass),
        ("post", inductor_passes.InPlacePass),
    ):
        monkeypatch.setattr(lowering, "run", record(kind, lowering.run))
    with torch._inductor.config.patch(force_disable_caches=True):
        yield found


def interpret(gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable:
    """For compile_fx_inner: the graph as it is after Inductor's last passes, run op by op."""
    view_to_reshape(gm)  # as Inductor does first: its views take tensors of any strides
    with V.set_fake_mode(detect_fake_mode(inputs)):
        compile_fx._recursive_post_grad_passes(gm, options.get("is_inference", False))

    def run(*args: Any) -> list[Any]:
        given = set(map(id, args))
        return [each if id(each) in given else _no_view(each) for each in gm.forward(*args)]

    return make_boxed_func(run)


def _no_view(result: Any) -> Any:
    """A result as Inductor's code returns it. Autograd refuses some writes to its views.

    An input is returned as it is: autograd looks whether what it saves of it is written to.
    """
    if not isinstance(result, torch.Tensor) or not result._is_view():
        return result
    sizes, strides = tuple(result.size()), tuple(result.stride())
    return torch._C._dynamo.guards._reinterpret_tensor(result, sizes, strides)


@contextmanager
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor's passes without its code, which takes most of the time of a small test."""
    inner = partial(compile_fx.compile_fx, inner_compile=interpret)
    with monkeypatch.context() as patched:
        patched.setattr(compile_fx, "compile_fx", inner)
        yield


class Compiled:
    """A compiled function that can tell what ``explain`` would tell of it.

    Args:
        fullgraph, dynamic: as for ``torch.compile``.
        options: as for the backend.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        self._options = options
        self._compiled = torch.compile(
            function, backend=self._compile, fullgraph=fullgraph, dynamic=dynamic
        )
        self._graphs: list[tuple[list[Site], list[Decision]]] = []

    def _compile(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        decisions: list[Decision] = []  # those about a backward come when it is first called
        kinds = {
            slot: partial(kind, decisions=decisions)
            for slot, kind in inductor_passes.LOWERING.items()
        }
        with (
            patch.dict(inductor_passes.LOWERING, kinds),
            torch._inductor.config.patch(force_disable_caches=True),
        ):
            compiled = backend.compile_losses(gm, inputs, options=self._options)
        self._graphs.append((gm.meta["compile_losses"].sites, decisions))
        return compiled

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)

    @property
    def sites(self) -> list[Site]:
        """The losses in what was compiled so far."""
        return [
            site
            for found, decisions in self._graphs
            for site in planned_sites.planned(found, decisions)
        ]

    @property
    def choices(self) -> list[str]:
        """What was chosen for these losses, in the plans' order."""
        return [choice for site in self.sites for choice in site.plan]


def step(model, function, inputs, factor=1.0):
    model.zero_grad()
    loss = function(*inputs)
    (loss * factor).backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def compare(model, inputs, factors=(1.0, 3.0, -0.5), rtol=1e-4, **options):
    compiled = torch.compile(copy.deepcopy(model), backend=backend.compile_losses, **options)
    for factor in factors:
        expected = step(model, model, inputs, factor)
        actual = step(compiled, compiled, inputs, factor)
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol / 100)
