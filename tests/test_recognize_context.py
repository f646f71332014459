"""Recognition under what a graph was traced in: autocast, grad modes, writes, torch.func."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.results import compile_with, run


def test_rewriting_keeps_in_place_operations():
    """Nodes without users may have effects; only the match's own nodes go away."""

    def step(a, b, buffer):
        buffer.add_(1)
        loss = ((a - b) ** 2).mean()
        buffer.mul_(2)
        return loss

    a, b = torch.rand(3), torch.rand(3)
    buffers = [torch.zeros(3), torch.zeros(3)]
    expected = step(a, b, buffers[0])
    actual = compile_with(step, "aot_eager", False)(a, b, buffers[1])
    torch.testing.assert_close((actual, buffers[1]), (expected, buffers[0]))


def _doubled(tensors):
    torch._foreach_mul_(tensors, 2.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "write",
    [
        _doubled,
        lambda tensors: _doubled([tensor.view(-1) for tensor in tensors]),
        lambda tensors: torch.ops.aten._foreach_mul_(tensors, 2.0),
        lambda tensors: torch.ops.aten._foreach_mul_.Scalar(tensors, 2.0),
        lambda tensors: torch.split_copy(torch.ones(4, 7), 7, dim=1, out=tensors),
        lambda tensors: tensors[0].data.mul_(2.0),
    ],
    ids=["foreach", "views", "packet", "overload", "out", "data"],
)
def test_writes_without_a_version(write):
    """To a difference, to what a cast read, and to a weight's number."""

    def difference(a, b):
        d = a - b
        write([d])
        return (d**2).mean()

    def cast(a, b):
        half = a.bfloat16()
        wide = half.float()
        write([half])
        return F.mse_loss(wide, b)

    def constant(a, b):
        beta = torch.tensor(0.2)
        _doubled([beta])
        log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
        log_m = torch.logaddexp(log_p + torch.log1p(-beta), log_q + torch.log(beta))
        of_q = F.kl_div(log_m, log_q, reduction="none", log_target=True)
        of_p = F.kl_div(log_m, log_p, reduction="none", log_target=True)
        return (beta * of_q + (1 - beta) * of_p).sum()

    for function in (difference, cast, constant):
        torch._dynamo.reset()
        inputs = (torch.randn(4, 7, requires_grad=True), torch.randn(4, 7))
        with torch.no_grad():
            expected = function(*inputs)
            actual = compile_with(function, "aot_eager", False)(*inputs)
        torch.testing.assert_close(actual, expected)


def test_autocast_region():
    """Inside torch.autocast losses run in float32; the rewritten op says so itself."""

    def step(a, b, weight):
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(a @ weight, b) + ((a @ weight - b) ** 2).mean()

    inputs = (torch.rand(4, 5), torch.rand(4, 3), torch.rand(5, 3, requires_grad=True))
    for region in (False, True):

        def function(*args, region=region):
            return step(*args) if region else F.mse_loss(args[0] @ args[2], args[1])

        with torch.autocast("cpu", torch.bfloat16, enabled=not region):
            torch._dynamo.reset()
            actual = run(compile_with(function, "aot_eager", False), inputs)
            expected = run(function, inputs)
        assert actual[0].dtype == expected[0].dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-3)


def test_no_grad_and_inference():
    def step(a, b):
        with torch.no_grad():
            validation = F.mse_loss(a, b)
        return validation + ((a - b) ** 2).mean()

    inputs = (torch.rand(3, requires_grad=True), torch.rand(3))
    torch.testing.assert_close(
        run(compile_with(step, "aot_eager", False), inputs), run(step, inputs)
    )
    with torch.inference_mode():
        torch._dynamo.reset()
        compiled = compile_with(step, "aot_eager", False)
        torch.testing.assert_close(compiled(*inputs), step(*inputs))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_mutation_without_autograd(context):
    """Versions count without gradients, too; where they don't exist nothing is assumed."""

    def difference(a, b):
        with context():
            d = a * 2 - b
            d.add_(1)
            return (d * d).mean()

    def absorbed(p, q):
        with context():
            log_p = (p * 2).log()
            log_p.mul_(2)
            return F.kl_div(log_p, q, reduction="sum")

    inputs = (torch.rand(3), torch.rand(3))
    for function in (difference, absorbed):
        torch._dynamo.reset()
        torch.testing.assert_close(
            compile_with(function, "aot_eager", False)(*inputs), function(*inputs)
        )
        with context():
            torch._dynamo.reset()
            compiled = compile_with(function, "aot_eager", False)
            torch.testing.assert_close(compiled(*inputs), function(*inputs))


def test_functorch_inside_compiled_functions():
    def loss(w, x, y):
        return F.mse_loss(x @ w, y)

    def step(w, x, y):
        return torch.func.grad(loss)(w, x, y), torch.func.vmap(F.mse_loss)(x, x + 1)

    inputs = (torch.rand(5, 3), torch.rand(4, 5), torch.rand(4, 3))
    compiled = compile_with(step, "aot_eager", False)
    torch.testing.assert_close(compiled(*inputs), step(*inputs))


HALVES = {
    "squares": lambda p, q: ((p - q) ** 2).mean(),
    "scaled": lambda p, q: ((p - q) ** 2).sum() / 7,
    "log_softmax": lambda p, q: -p.log_softmax(-1).gather(1, q.argmax(1)[:, None]).mean(),
    "probabilities": lambda p, q: (q.exp() * (q.exp().log() - p.exp().log())).sum(),
    "reduced by hand": lambda p, q: F.mse_loss(p, q, reduction="none").sum(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", HALVES)
def test_autocast_of_losses_written_out(case, dtype):
    """On the CPU it casts no operand of theirs: they keep their dtype, as the op would not."""

    def function(p, q):
        with torch.autocast("cpu", torch.bfloat16):
            return HALVES[case](p, q)

    inputs = torch.rand(6, 10, dtype=dtype, requires_grad=True), torch.rand(6, 10, dtype=dtype)
    results = [run(f, inputs) for f in (compile_with(function, "eager", False), function)]
    torch.testing.assert_close(*results, rtol=3e-2, atol=3e-2)  # dtypes are compared, too


def test_logarithms_without_gradients():
    """The op would send the gradients of the probabilities through them, where they end."""

    def function(x, z):
        with torch.no_grad():
            log_q = z.log_softmax(-1)
        return (z.softmax(-1) * (log_q - x.log_softmax(-1))).sum(-1).mean()

    inputs = torch.randn(6, 10, requires_grad=True), torch.randn(6, 10, requires_grad=True)
    results = [run(f, inputs) for f in (compile_with(function, "eager", False), function)]
    torch.testing.assert_close(*results)
