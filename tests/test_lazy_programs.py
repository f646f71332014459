"""Programs that hand lazy logits from graph to graph do what they do without a compiler.

What may differ is what differs without lazy logits as well, or in stock torch.compile: hooks of
results see nothing of a loss in the same graph, and a loss keeps other tensors for its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import compile_losses
from compile_losses.lazy import automatic
from compile_losses.torch_internals.dynamo import without_recompile_limits
from tests.constants import set_constants
from tests.graphs import interpreted
from tests.lazy_programs import FIRST, WITH_LOSS, drawn, run

#: The errors that docs/heads.md names.
DOCUMENTED = (
    "these logits were not read yet, and can't be computed any more",
    "the gradient of logits was asked for which a compiled graph did not compute",
)
#: What torch says if what a backward needs was changed. Of a view of a subclass it looks for the
#: way of the gradient before that, and finds none if the subclass was detached in place.
CHANGED = ("modified by an inplace operation", "new_fn INTERNAL ASSERT FAILED")
#: Ways into torch.compile: the inner backend, or None for ``enable()``; and whether all sizes are
#: dynamic.
WAYS = (("eager", None), ("aot_eager", None), (None, None), ("aot_eager", True), ("eager", None))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    set_constants(monkeypatch, least_rows=2, least_elements=1, logits_bytes=1, part_of_weight=0)


def outcome(program: list[tuple[Any, ...]], compile: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    try:
        return run(program, compile)
    except Exception as error:
        return error


def difference(found: Any, *expected: Any) -> str | None:
    """Where an outcome has what none of the expected ones has there."""
    known = [each for each in expected if not isinstance(each, Exception)]
    if isinstance(found, Exception) or not known:
        return repr(found)
    return _difference(found, known, "")


def _difference(found: Any, expected: list[Any], place: str) -> str | None:
    if isinstance(found, dict | list):
        keys = found.keys() if isinstance(found, dict) else range(len(found))
        alike = [each for each in expected if type(each) is type(found) and len(each) == len(keys)]
        if not alike:
            return f"{place}: {len(keys)} items"
        parts = (
            _difference(found[k], [each[k] for each in alike], f"{place}[{k!r}]") for k in keys
        )
        return next(filter(None, parts), None)
    for each in expected:
        try:
            same(found, each)
            return None
        except AssertionError as error:
            told = f"{place}: {found} for {each} {error}"
    return told


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(
            found.detach() + 0, expected.detach(), rtol=1e-4, atol=1e-6, equal_nan=True
        )
    elif isinstance(expected, float | np.floating):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    else:
        assert found == expected


def verdict(seed: int, lazy: bool | str = True) -> str:
    """What came of a program: whether it is the same, or why it may differ.

    Args:
        lazy: the option; with "auto" no error of ours is right.

    Raises:
        AssertionError: it differs, and must not.
    """
    automatic.forget()
    program = drawn(seed, set(FIRST).intersection(WITH_LOSS) if lazy == "auto" else FIRST)
    inner, dynamic = WAYS[seed % len(WAYS)]

    def ours(lazy: bool | str) -> Any:
        if inner is None:
            with compile_losses.enable(lazy_logits=lazy):
                return outcome(program, partial(torch.compile, dynamic=dynamic))
        options = {"lazy_logits": lazy, "inner_backend": inner}
        compile = partial(torch.compile, backend="compile_losses", options=options, dynamic=dynamic)
        return outcome(program, compile)

    if program[-1][1] == "backward twice":  # not of a backward that was compiled to run once
        torch._dynamo.reset()
    expected = outcome(program, lambda function: function)
    found = ours(lazy)
    if difference(found, expected) is None:
        return "same"
    is_ours = isinstance(found, RuntimeError) and any(text in str(found) for text in DOCUMENTED)
    if is_ours and lazy is True:
        return "documented"
    if isinstance(found, RuntimeError) and any(text in str(found) for text in CHANGED):
        return "saved"  # a loss keeps its logits, where others keep results
    torch._dynamo.reset()
    plain = ours(False)
    if difference(found, expected, plain) is None:
        return "without lazy logits, too"
    torch._dynamo.reset()
    stock = outcome(program, partial(torch.compile, backend="aot_eager", dynamic=dynamic))
    known = [expected, plain, stock]
    if inner is None:  # Inductor saves views that count no writes, if sizes are dynamic
        torch._dynamo.reset()
        known.append(outcome(program, partial(torch.compile, dynamic=True)))
    differs = difference(found, *known)
    if isinstance(stock, Exception) or differs is None:
        return "stock"
    raise AssertionError(f"program {seed}: {differs}\n{program}")


def groups(count: int, size: int) -> list[Any]:
    """Seeds in groups, of which the first sixty always run."""
    return [
        pytest.param(range(at, at + size), marks=[] if at < 60 else pytest.mark.slow, id=str(at))
        for at in range(0, count, size)
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seeds", groups(1000, 10))
def test_programs(seeds, monkeypatch):
    """Graphs are not forgotten between the programs, so that guards tell them apart."""
    with interpreted(monkeypatch), without_recompile_limits():
        found = Counter(map(verdict, seeds))
    assert found["same"] >= 4, found
    assert found["documented"] + found["saved"] <= 4, found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seeds", groups(2000, 10))
def test_programs_that_ask_for_nothing(seeds, monkeypatch):
    with interpreted(monkeypatch), without_recompile_limits():
        found = Counter(verdict(seed, "auto") for seed in seeds)
    assert found["same"] >= 4, found
