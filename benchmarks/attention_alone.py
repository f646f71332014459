"""Attention alone, as transformers calls it: ``python -m benchmarks attention --alone``.

``mask`` is what transformers makes in a compiled model: a mask of all pairs of tokens, and keys
repeated to the number of query heads. ``causal`` is what it makes in eager mode if nothing is
padded. Each also runs with one of torch's backends chosen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import linear_steps
from benchmarks.clock import Call
from benchmarks.models import Size

Step = Callable[[], Tensor]
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_CALLS = ("mask", "causal", "causal_repeated")
_WAYS = [
    *_CALLS,
    *(f"{call}_{backend}" for call in ("mask", "causal") for backend in BACKENDS),
    "flex",
]


class CallProblem:
    """Queries, keys, values, the gradient of the output, and a causal mask."""

    #: ``inductor`` is what is compared with.
    CONTENDERS: ClassVar = {
        "inductor": ("inductor", "mask"),
        **{f"{side}_{way}": (side, way) for side in ("inductor", "eager") for way in _WAYS},
    }
    del CONTENDERS["inductor_mask"], CONTENDERS["eager_flex"]

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        heads = size.attention
        self.heads, self.groups = heads["num_attention_heads"], heads["num_key_value_heads"]
        batch, length, features = size.batch, size.length, heads["head_dim"]
        self.shape = f"{batch}x{self.heads}/{self.groups}x{length}x{features}"

        def drawn(heads: int) -> Tensor:
            return torch.randn(batch, heads, length, features, device=device).to(dtype)

        self.query = drawn(self.heads).requires_grad_()
        self.key, self.value = (drawn(self.groups).requires_grad_() for _ in range(2))
        self.gradient = drawn(self.heads)
        places = torch.arange(length, device=device)
        self.mask = (places <= places[:, None]).expand(batch, 1, length, length)
        self.blocks = partial(
            create_block_mask, _is_before, None, None, length, length, device=device
        )
        self.expected = self.results(self.build("eager", "mask"))

    def call_of(self, name: str) -> str:
        return ""

    def build(self, side: str, way: str) -> Step:
        call, _, backend = way.partition("_")
        chosen = BACKENDS.get(backend)
        repeats = call == "mask" or backend == "repeated"
        blocks = self.blocks() if call == "flex" else None

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            if blocks is not None:
                return flex_attention(query, key, value, block_mask=blocks, enable_gqa=True)
            if repeats:
                key, value = (_repeated(each, self.heads // self.groups) for each in (key, value))
            # Around the compiled function it would not count, if a graph without it is cached.
            with sdpa_kernel(chosen) if chosen else contextlib.nullcontext():
                return F.scaled_dot_product_attention(
                    query, key, value, mask, is_causal=mask is None, enable_gqa=not repeats
                )

        function = attend if side == "eager" else torch.compile(attend)

        mask = self.mask if call == "mask" else None
        return lambda: function(self.query, self.key, self.value, mask)

    def run(self, step: Step) -> Tensor:
        output = step()
        output.backward(self.gradient)
        return output.detach()

    def clear(self) -> None:
        self.query.grad = self.key.grad = self.value.grad = None

    def next_call(self, step: Step) -> Call:
        self.clear()
        return partial(self.run, step)

    def results(self, step: Step) -> list[Tensor]:
        self.clear()
        output = self.run(step)
        gradients = [each.grad for each in (self.query, self.key, self.value)]
        return [each.float() for each in (output, *gradients) if each is not None]

    def errors(self, step: Step) -> list[float]:
        pairs = zip(self.results(step), self.expected, strict=True)
        return [linear_steps.relative_error(ours, theirs) for ours, theirs in pairs]


def _repeated(heads: Tensor, times: int) -> Tensor:
    batch, groups, length, features = heads.shape
    wide = heads[:, :, None].expand(batch, groups, times, length, features)
    return wide.reshape(batch, groups * times, length, features)


def _is_before(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
