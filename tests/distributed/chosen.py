"""Of the cases that share what processes compute, those that a run of pytest asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def chosen(test: Callable[..., Any], request: pytest.FixtureRequest) -> list[str]:
    """The names that a run asks of a test with a fixture: nothing else need be computed."""
    kind = getattr(request, "param", None)
    cases = [item for item in request.session.items if getattr(item, "obj", None) is test]
    given = [case.callspec.params for case in cases]
    return [of["name"] for of in given if of.get(request.fixturename) == kind]
