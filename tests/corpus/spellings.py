"""The spellings and near misses of the specs."""

from __future__ import annotations

import torch

from tests.corpus.program import Program
from tests.specs import SPECS

PROGRAMS = [
    Program(
        f"spellings: {spec.name}, {kind} {i}, {spelling.name}", spelling.function, spelling.inputs
    )
    for spec in SPECS.values()
    for kind, spellings in (("match", spec.matches), ("near miss", spec.near_misses))
    for i, spelling in enumerate(spellings)
    if torch.__version__ >= spelling.since
]
