"""What stands between the tangent of the whole and the gradient of a loss."""

from __future__ import annotations

import pytest
import torch

from compile_losses.lower.known_factors import factor_of, has_one_element, is_one_number, product_of
from compile_losses.lower.node_relations import depends_on_tangents
from tests.passes.graphs import of_aten, returned


def graph_of(function):
    return of_aten(function, torch.tensor(1.0), torch.tensor(3.0), torch.tensor(7))


def factor(function):
    gm = graph_of(function)
    (node,) = returned(gm.graph)
    return gm, factor_of(node, depends_on_tangents(gm.graph))


#: The constant, and which numbers are above and below.
FACTORS = {
    "constant": (lambda tangents, a, n: tangents * 0.5, 0.5, [], []),
    "divisor": (lambda tangents, a, n: tangents / 4, 0.25, [], []),
    "negative": (lambda tangents, a, n: -(tangents * 2), -2.0, [], []),
    "number": (lambda tangents, a, n: tangents * a, 1.0, ["a_1"], []),
    "number ahead": (lambda tangents, a, n: a * tangents, 1.0, ["a_1"], []),
    "quotient": (lambda tangents, a, n: tangents / n, 1.0, [], ["n_1"]),
    "all": (
        lambda tangents, a, n: (3 * tangents).view(1) / n * a.view(1),
        3.0,
        ["view_1"],
        ["n_1"],
    ),
    "cast": (lambda tangents, a, n: (tangents * a).double().clone(), 1.0, ["a_1"], []),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors(name):
    function, constant, above, below = FACTORS[name]
    _, found = factor(function)
    assert found.tangent.name.startswith("tangents")
    assert found.constant == constant
    assert [n.name for n in found.numerators] == above
    assert [n.name for n in found.denominators] == below
    assert found.nodes == [*found.numerators, *found.denominators]


NONE = {
    "nothing": lambda tangents, a, n: tangents.view(1),
    "of the tangent": lambda tangents, a, n: tangents * tangents,
    "divided by it": lambda tangents, a, n: a / tangents,
    "a sum": lambda tangents, a, n: tangents + 1,
    "zero": lambda tangents, a, n: tangents / 0,
    "tiny": lambda tangents, a, n: tangents * 1e-60,
    "rounded": lambda tangents, a, n: torch.div(tangents, a, rounding_mode="floor"),
    "no tangent": lambda tangents, a, n: a * 2,
    "a function": lambda tangents, a, n: tangents.exp() * 2,
}


@pytest.mark.parametrize("name", NONE)
def test_no_factor(name):
    assert factor(NONE[name])[1] is None


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_computed(name, dtype):
    gm, found = factor(FACTORS[name][0])
    (output,) = gm.graph.find_nodes(op="output")
    like = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
    (whole,) = output.args
    number = product_of(found, dtype, like, whole)
    assert number.meta["val"].dtype == dtype
    output.args = ((whole, number),)
    gm.recompile()
    expected, result = gm(torch.tensor(1.0), torch.tensor(3.0), torch.tensor(7))
    torch.testing.assert_close(result.view(()), expected.view(()).to(dtype))


def test_one_number():
    gm = of_aten(
        lambda x, n, y: (x * 1, n * 1, y * 1), torch.ones(1, 1), torch.ones(1).long(), torch.ones(2)
    )
    x, n, y = returned(gm.graph)
    assert is_one_number(x)
    assert not is_one_number(n)
    assert not is_one_number(y)
    assert has_one_element(n.meta["val"])
    assert not has_one_element(y.meta["val"])
