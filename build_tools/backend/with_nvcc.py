"""setuptools' build backend. With ``--config-settings cuda=pypi`` pip installs nvcc for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

PROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"


def nvcc(config_settings: dict[str, Any] | None) -> list[str]:
    """The dependency group ``cuda`` of pyproject.toml if it is asked for, otherwise nothing."""
    wanted = (config_settings or {}).get("cuda")
    if wanted is None:
        return []
    if wanted != "pypi":
        raise SystemExit(f"expected the config setting cuda to be pypi, got {wanted!r}")
    from setuptools.compat.py310 import tomllib

    return list(tomllib.loads(PROJECT.read_text())["dependency-groups"]["cuda"])


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + nvcc(config_settings)


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + nvcc(config_settings)
