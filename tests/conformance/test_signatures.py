"""The functions by their signatures: whoever changes the import changes nothing else."""

from __future__ import annotations

import inspect

import torch.nn.functional as F

from compile_losses import functional
from tests.conformance.compare import losses


@losses
def test_signature_is_torchs(loss):
    ours = inspect.signature(getattr(functional, loss))
    theirs = inspect.signature(getattr(F, loss))

    def shape(signature: inspect.Signature):
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert shape(ours) == shape(theirs)


@losses
def test_documented(loss):
    assert f"torch.nn.functional.{loss}" in inspect.getdoc(getattr(functional, loss))
