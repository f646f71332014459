"""Attention of transformers' models in compiled training steps: what makes it slow, what helps.

``python -m benchmarks attention`` trains a Llama with causal attention in each way that a user can
choose, and notes the time of the kernels of attention. Under torch.compile transformers can't read
the values of a mask or of positions, so it builds a mask of all pairs of tokens, and attention with
a mask computes the pairs that are masked, too. ``call`` is what the captured graph has. With
``--alone`` attention itself is measured, without a model, and without transformers.

The ways: ``mask`` gets a mask of ones, as collators make it; ``cached`` has ``use_cache``;
``static`` compiles with ``dynamic=False``; ``causal`` registers torch's function without a mask;
``causal_flash`` and ``causal_cudnn`` choose its kernel; the others are of transformers. Liger's
contender, all its kernels in eager mode, needs a process of its own: it patches transformers.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.attention import sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks import linear_steps, report
from benchmarks.attention_alone import BACKENDS, CallProblem
from benchmarks.clock import Call, NextCall, make_clock
from benchmarks.contenders import UnavailableError
from benchmarks.models import Size
from benchmarks.options import DTYPES, add_options, provenance

Step = Callable[..., Tensor]
#: Names of kernels of attention: of torch, cuDNN, flash-attn and Inductor's templates; of a CPU.
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|triton_tem|scaled_dot_product", re.IGNORECASE)


@dataclass(frozen=True)
class Way:
    """A way to attend that a user chooses.

    Attributes:
        implementation: the configuration's; "causal_sdpa" and what follows are registered here.
        mask: whether the batch has a mask, of ones.
        options: of torch.compile.
    """

    implementation: str = "sdpa"
    mask: bool = False
    use_cache: bool = False
    options: dict[str, Any] = field(default_factory=dict)


WAYS = {
    "": Way(),
    "mask": Way(mask=True),
    "cached": Way(use_cache=True),
    "static": Way(options={"dynamic": False}),
    "causal": Way("causal_sdpa"),
    "causal_flash": Way("causal_sdpa_fa"),
    "causal_cudnn": Way("causal_sdpa_cudnn"),
    "flex": Way("flex_attention"),
    "flash_attention_2": Way("flash_attention_2"),
}
_OURS: dict[str, Any] = {"backend": "compile_losses", "options": {"lazy_logits": "auto"}}
#: Whether a contender compiles, and how; its ways.
SIDES: dict[str, tuple[dict[str, Any] | None, tuple[str, ...]]] = {
    "eager": (None, ("", "flash_attention_2")),
    "liger": (None, ("",)),
    "inductor": ({}, tuple(WAYS)),
    "ours": (_OURS, ("", "mask", "causal", "flash_attention_2")),
}


@dataclass(frozen=True, kw_only=True)
class Row(linear_steps.Row):
    """``attention_ms``: the time of the kernels of attention in one step.

    ``call``: the shape of the mask, if there is one, or "causal"; and the heads of keys and of
    queries. ``kernels``: the longest two.
    """

    attention_ms: str = ""
    call: str = ""
    kernels: str = ""

    def __str__(self) -> str:
        return f"{super().__str__():<95}{self.attention_ms:>8}  {self.call:<36} {self.kernels}"


def _register() -> None:
    """Torch's attention under names that have no function that makes a mask: the mask is None."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def flash(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(BACKENDS["flash"]):
            return sdpa_attention_forward(*args, **kwargs)

    def cudnn(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(BACKENDS["cudnn"]):
            return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    # A name with "flash" in it would be looked for in packages.
    AttentionInterface.register("causal_sdpa_fa", flash)
    AttentionInterface.register("causal_sdpa_cudnn", cudnn)


def causal_lm(size: Size, way: Way) -> nn.Module:
    """A Llama with random weights, on torch's default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _register()
    config = LlamaConfig(
        vocab_size=size.classes,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        max_position_embeddings=size.length,
        use_cache=way.use_cache,
        tie_word_embeddings=True,
        attn_implementation=way.implementation,
        **size.attention,
    )
    return LlamaForCausalLM(config).train()


def batch_of(way: Way, tokens: Tensor) -> dict[str, Tensor]:
    mask = {"attention_mask": torch.ones_like(tokens)} if way.mask else {}
    return {"input_ids": tokens, "labels": tokens, **mask}


def captured_call(way: Way, device: torch.device) -> str:
    """What Dynamo's graph of a small model has: the mask, and the heads."""
    found: list[str] = []

    def look(module: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        for node in module.graph.nodes:
            if getattr(node.target, "__name__", "") == "scaled_dot_product_attention":
                query, key = (arg.meta["example_value"].shape for arg in node.args[:2])
                mask = node.kwargs["attn_mask"]
                causal = "causal" if node.kwargs["is_causal"] else "neither mask nor causal"
                how = causal if mask is None else f"mask {_size(mask.meta['example_value'])}"
                found.append(f"{how}, {key[1]} of {query[1]} heads")
        return module.forward

    with device:
        model = causal_lm(Size(2, 16, 256, 1, 97), way)
        tokens = torch.randint(97, (2, 16))
    torch.compile(model, backend=look, dynamic=False)(**batch_of(way, tokens))
    return found[0] if found else ""


def _size(mask: Tensor) -> str:
    return "x".join(f"{n}" for n in mask.shape)


class ModelProblem:
    """Models that share their weights, a batch, and an optimizer with a learning rate of 0."""

    CONTENDERS: ClassVar = {
        "_".join(filter(None, (side, way))): (side, way)
        for side, (_, ways) in SIDES.items()
        for way in ways
    }

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.size, self.shape = size, f"llama {size}"
        with torch.device(device):
            self.model = causal_lm(size, WAYS[""]).to(dtype)
            self.tokens = torch.randint(size.classes, (size.batch, size.length))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.expected = self.results(partial(_loss_of, self.model, WAYS[""]))

    def build(self, side: str, name: str) -> Step:
        way, options = WAYS[name], SIDES[side][0]
        if "sdpa" not in way.implementation and self.tokens.device.type != "cuda":
            raise UnavailableError("it needs a CUDA device")
        with torch.device("meta"):
            model = causal_lm(self.size, way)
        for own, shared in zip(model.modules(), self.model.modules(), strict=True):
            own._parameters, own._buffers = shared._parameters, shared._buffers
        if side == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(model=model)
        call = model if options is None else torch.compile(model, **options, **way.options)
        return partial(_loss_of, call, way)

    def run(self, step: Step) -> Tensor:
        loss = step(self.tokens)
        loss.backward()
        return loss.detach()

    def next_call(self, step: Step) -> Call:
        def call() -> None:
            self.run(step)
            self.optimizer.step()
            self.optimizer.zero_grad()

        return call

    def results(self, step: Step) -> list[Tensor]:
        self.optimizer.zero_grad()
        loss = self.run(step)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return [loss.float(), *(gradients[i].float() for i in (0, 1, -1))]

    def errors(self, step: Step) -> list[float]:
        pairs = zip(self.results(step), self.expected, strict=True)
        return [linear_steps.relative_error(ours, theirs) for ours, theirs in pairs]

    def call_of(self, name: str) -> str:
        side, way = self.CONTENDERS[name]
        compiled = SIDES[side][0] is not None and "sdpa" in WAYS[way].implementation
        return captured_call(WAYS[way], self.tokens.device) if compiled else ""


def _loss_of(model: Callable[..., Any], way: Way, tokens: Tensor) -> Tensor:
    loss: Tensor = model(**batch_of(way, tokens)).loss
    return loss


def kernels_of(next_call: NextCall, device: torch.device) -> dict[str, str]:
    """The columns of a step's kernels of attention."""
    cuda = device.type == "cuda"
    call = next_call()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        call()
        if cuda:
            torch.cuda.synchronize()
    times = {
        event.key: event.self_device_time_total if cuda else event.self_cpu_time_total
        for event in seen.key_averages()
        if _ATTENTION.search(event.key)
    }
    longest = sorted(times, key=lambda name: -times[name])[:2]
    return {
        "attention_ms": f"{sum(times.values()) / 1e3:.3g}",
        "kernels": "; ".join(name[:60] for name in longest),
    }


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    clock = make_clock(device)
    output = arguments.output or report.default_output(device, "attention")
    kept = report.kept(output, Row, append=arguments.append)
    dtype = DTYPES[arguments.dtype]
    sizes = (arguments.batch, arguments.length, arguments.width, arguments.layers)
    size = Size(*sizes, arguments.classes)
    kind = CallProblem if arguments.alone else ModelProblem
    problem: Any = kind(size, dtype, device)
    common = {**provenance(arguments, device), "dtype": arguments.dtype, "shape": problem.shape}
    allowed = [16 * linear_steps.ULPS * torch.finfo(dtype).eps] * len(problem.expected)
    steps: dict[str, Step] = {}

    def build(name: str) -> Step:
        steps[name] = problem.build(*problem.CONTENDERS[name])
        return steps[name]

    chosen = arguments.contender or [name for name in problem.CONTENDERS if name != "liger"]
    unknown = set(chosen) - set(problem.CONTENDERS)
    if unknown:
        raise SystemExit(f"attention: no contender {unknown}; there are {[*problem.CONTENDERS]}")
    builders = {name: (partial(build, name), "torch") for name in chosen}
    print(linear_steps.HEADER)
    limit = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}  # one class, many models
    with torch._dynamo.config.patch(limit):
        measured = linear_steps.measured(
            builders, problem, allowed, clock, arguments.budget, common
        )
        rows = [Row(**asdict(row)) for row in measured]
        for index, row in enumerate(rows):
            if row.ms:
                step = partial(problem.next_call, steps[row.contender])
                call = problem.call_of(row.contender)
                rows[index] = replace(row, call=call, **kernels_of(step, device))
            print(rows[index], flush=True)
    kept |= {row.key: row for row in rows if not row.reason.startswith("not run")}
    report.write(output, Row, kept.values())
    print(f"wrote {output}")
    return int(any(row.reason.startswith(("failed", "wrong")) for row in rows))


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    parser = commands.add_parser(
        "attention",
        help="attention in compiled models of transformers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--alone", action="store_true", help="attention without a model")
    parser.add_argument("--contender", nargs="+", help="default: all but liger")
    # Those of a Llama with 1.2 billion parameters.
    sizes = {"batch": 8, "length": 2048, "width": 2048, "layers": 16, "classes": 128_256}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"({value})")
    cuda = torch.cuda.is_available()
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32")
    add_options(parser, 2.0, append=True)
