"""A device of its own in Python, whose tensors lie on the CPU; run as a program.

``python -m tests.python_device`` prints what computes on it before it has any ops of torch's, and
then the largest errors of our ops on it, by their kinds.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from compile_losses import implementations, self_test

NAME = "pydevice"


class OnDevice(torch.Tensor):
    """A tensor of the device."""

    @staticmethod
    def __new__(cls, held):
        result = torch._C._acc.create_empty_tensor(tuple(held.shape), held.dtype)
        result.__class__ = OnDevice
        result.held = held
        return result


def run(op, *args, **kwargs):
    """Any op, on the CPU."""
    given = {}

    def inside(value):
        if isinstance(value, OnDevice):
            given[id(value.held)] = value
            return value.held
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def outside(value):
        if not isinstance(value, torch.Tensor):
            return value
        return given[id(value)] if id(value) in given else OnDevice(value)

    with torch._C._AutoDispatchBelowAutograd():
        found = op(*tree_map(inside, args), **tree_map(inside, kwargs))
    if op.overloadpacket is torch.ops.aten._to_copy and kwargs.get("device") == torch.device("cpu"):
        return found
    return tree_map(outside, found)


def copy_(target, source, non_blocking=False):
    held = source.held if isinstance(source, OnDevice) else source
    (target.held if isinstance(target, OnDevice) else target).copy_(held)
    return target


def main():
    _setup_privateuseone_for_python_backend(NAME)
    device = torch.device(NAME)
    print(implementations.choose(device))
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_copy_from", lambda source, target, _=False: copy_(target, source), "PrivateUse1")
    for name in ("cross entropy", "statistics of rows", "a divergence"):
        with torch.no_grad():
            pairs = self_test.TESTS[name](device)
            errors = [(ours.cpu().double() - exact).abs().max().item() for ours, exact in pairs]
        print(f"{name}: {max(errors):.1g}")


if __name__ == "__main__":
    main()
