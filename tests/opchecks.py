"""torch.library.opcheck for many calls of the same ops, with no two traces of one kind of call."""

from __future__ import annotations

import torch
from torch._dynamo.utils import clone_input
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

TESTS = ["test_schema", "test_autograd_registration", "test_faketensor"]


class OpChecks:
    """opcheck, less what an earlier call of the same kind had.

    The schema, and the fake with known sizes, are checked in every call. The fake with symbolic
    sizes is checked once for each layout. AOTAutograd's traces take nearly all of the time, and are
    made once for each kind of call. A trace of another layout would run the same formulas, and
    fakes that are checked without it. With ``every``, nothing is left out.
    """

    def __init__(self, every=False):
        self.every = every
        self.passed = set()

    def __call__(self, op, args, kwargs=None, what=""):
        kwargs = kwargs or {}
        copied_args, copied_kwargs = tree_map_only(torch.Tensor, clone_input, (args, kwargs))
        results = op(*copied_args, **copied_kwargs)
        tests, passed = list(TESTS), set()
        kind = kind_of(op, args, kwargs)
        if (self.every or kind not in self.passed) and can_be_traced(op, args, results):
            tests.append("test_aot_dispatch_dynamic")
            passed.add(kind)
        layout = kind, layout_of(args, kwargs)
        try:
            torch.library.opcheck(op, args, kwargs, test_utils=tests)
            if self.every or layout not in self.passed:
                check_symbolic_fake(op, args, kwargs, results)
        except Exception as error:
            raise AssertionError(f"{op}, {what}") from error
        self.passed |= passed | {layout}


def can_be_traced(op, args, results):
    """Whether torch can compare a call with one under AOTAutograd.

    It holds nan for unequal to nan, torch's own decompositions divide by numel, and torch 2.11's
    cross_entropy of weighted probabilities cannot be traced with symbolic sizes.
    """
    named = dict(zip((a.name for a in op._schema.arguments), args, strict=False))
    weighted = "cross_entropy_probabilities" in op.name() and named.get("weight") is not None
    if weighted and torch.__version__ < (2, 13):
        return False
    empty = any(isinstance(a, torch.Tensor) and a.numel() == 0 for a in args)
    return not empty and not any(r.isnan().any() for r in tree_leaves(results) if r is not None)


def kind_of(op, args, kwargs):
    """What a graph of the op depends on, but for layouts: sizes and numbers are opaque."""
    named = {**dict(zip((a.name for a in op._schema.arguments), args, strict=False)), **kwargs}
    tensors = {k: v for k, v in named.items() if isinstance(v, torch.Tensor)}
    operands = [v for k, v in tensors.items() if k in ("input", "target") or k.endswith("weight")]
    shapes = [operand.shape for operand in operands]
    return repr(
        (
            op,
            {
                k: v == 0 if type(v) in (int, float) else v
                for k, v in named.items()
                if k not in tensors
            },
            {k: (v.device.type, v.dtype, v.requires_grad) for k, v in tensors.items()},
            [shapes.index(shape) for shape in shapes],  # which of them are broadcast
        )
    )


def layout_of(args, kwargs):
    """What a fake with symbolic sizes can tell calls of one kind apart by."""

    def told_by(tensor):
        order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__)
        special = [
            (size == 1, min(stride, 2))
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        return order, special, tensor.is_contiguous()

    return repr([told_by(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)])


def check_symbolic_fake(op, args, kwargs, results):
    """With symbols for sizes and strides, the fake's results are like the op's."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        fakes = op(*fake_args, **fake_kwargs)
    found, expected = ([described(r) for r in tree_leaves(each)] for each in (fakes, results))
    assert found == expected, f"with symbolic sizes, the fake gave {found} and the op {expected}"


def described(result):
    if not isinstance(result, torch.Tensor):
        return result
    shape = [int(size) for size in result.shape]
    # A stride that is never taken says nothing.
    strides = [
        int(stride) if size > 1 and 0 not in shape else None
        for size, stride in zip(shape, result.stride(), strict=True)
    ]
    return shape, strides, result.dtype, result.device, result.requires_grad
