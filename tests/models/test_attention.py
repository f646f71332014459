"""docs/transformers.md: which attention a compiled model has, and what it says to do about it."""

from __future__ import annotations

import re

import pytest
import torch

from tests import ROOT

transformers = pytest.importorskip("transformers", reason="pip install .[models]")

PAGE = ROOT / "docs" / "transformers.md"
BATCH, LENGTH, CLASSES = 2, 16, 97
#: Since torch 2.13 `torch.compiler.is_exporting()` is false in a graph that is compiled.
TELLS_EXPORT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


@pytest.fixture(scope="module")
def remedy():
    """The page's own lines."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    exec(code, {})


def model(implementation="sdpa", *, use_cache=False):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=CLASSES,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=use_cache,
        attn_implementation=implementation,
    )
    return transformers.LlamaForCausalLM(config)


def tokens():
    return torch.randint(CLASSES, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def captured(model, **batch):
    """Whether the graph's attention is causal, and how many heads its keys have."""
    found = []

    def look(module, inputs):
        for node in module.graph.nodes:
            if getattr(node.target, "__name__", "") == "scaled_dot_product_attention":
                assert node.kwargs["is_causal"] == (node.kwargs["attn_mask"] is None)
                heads = node.args[1].meta["example_value"].shape[1]
                found.append((node.kwargs["is_causal"], heads))
        return module.forward

    torch.compiler.reset()
    torch.compile(model, backend=look)(input_ids=tokens(), labels=tokens(), **batch)
    return found


MASK, CAUSAL = [(False, 4)], [(True, 2)]
POSITIONS = torch.arange(LENGTH).repeat(BATCH, 1)
ONES = torch.ones(BATCH, LENGTH, dtype=torch.int64)


@pytest.mark.parametrize(
    ("use_cache", "batch", "expected"),
    [
        (False, {}, MASK),
        (True, {}, CAUSAL if TELLS_EXPORT else MASK),
        (False, {"attention_mask": ONES}, MASK),
        (False, {"position_ids": POSITIONS}, MASK),
    ],
    ids=["alone", "cache", "mask", "positions"],
)
def test_table(use_cache, batch, expected):
    assert captured(model(use_cache=use_cache), **batch) == expected


@pytest.mark.parametrize("batch", [{}, {"attention_mask": ONES}], ids=["alone", "mask"])
def test_remedy(batch, remedy):
    assert captured(model("causal_sdpa"), **batch) == CAUSAL


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(side, remedy):
    """On the right it changes nothing that counts; on the left it does."""
    mask, labels = ONES.clone(), tokens()
    padding = slice(LENGTH // 2, None) if side == "right" else slice(LENGTH // 2)
    mask[0, padding] = 0
    labels[0, padding] = -100
    results = []
    for implementation in ("sdpa", "causal_sdpa"):
        of_one = model(implementation)
        loss = of_one(input_ids=tokens(), attention_mask=mask, labels=labels).loss
        loss.backward()
        results.append((loss.detach(), of_one.model.layers[0].self_attn.q_proj.weight.grad))
    same = all(torch.allclose(*pair, atol=1e-6) for pair in zip(*results, strict=True))
    assert same == (side == "right")
