"""``python -m compile_losses info | explain | demo``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import compile_losses
from compile_losses import library


def info(_: argparse.Namespace, __: list[str]) -> int:
    """Versions, devices, and which kernels are loaded."""
    from importlib.metadata import version

    print(f"compile_losses {version('compile_losses')}")
    print(f"torch          {torch.__version__} (CUDA {torch.version.cuda or 'not built in'})")
    print(f"python         {platform.python_version()} on {platform.platform()}")
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"cpu            {torch.get_num_threads()} threads, {capability}")
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        print(f"cuda:{i}         {torch.cuda.get_device_name(i)}, capability {major}.{minor}")
    for device, kernels in library.kernels.items():
        state = f"loaded from {kernels.name}" if isinstance(kernels, Path) else f"none: {kernels}"
        print(f"{device + ' kernels':<14} {state}")
    print("ops            " + ", ".join(public_ops()))
    return 0


def public_ops() -> list[str]:
    """The losses under ``torch.ops.fused``, without the ops that they are made of."""
    names = {
        name.removeprefix("fused::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fused::")
    }
    return sorted(name for name in names if f"{name}_forward" in names)


def load(target: str) -> Callable[..., Any]:
    """``path/to/script.py:function`` or ``package.module:function``, dots allowed in the latter."""
    source, separator, name = target.rpartition(":")
    if not separator or not source or not name:
        raise SystemExit(f"expected SCRIPT_OR_MODULE:FUNCTION, got {target!r}")
    if source.endswith(".py"):
        path = Path(source).resolve()
        if not path.is_file():
            raise SystemExit(f"there is no file {source}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        module = importlib.import_module(source)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise SystemExit(f"{source} has no {name}")
        value = getattr(value, part)
    return value


def explain(arguments: argparse.Namespace, _: list[str]) -> int:
    """Calls the function without arguments and prints what would be rewritten."""
    print(compile_losses.explain(load(arguments.target)))
    return 0


def demo(_: argparse.Namespace, rest: list[str]) -> int:
    """Trains models with stock torch.compile and with this package, side by side."""
    from compile_losses.demo import main as run_demo

    return run_demo(rest)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compile_losses", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (info, explain, demo):
        summary = (command.__doc__ or "").splitlines()[0]
        sub = commands.add_parser(
            command.__name__, help=summary, description=summary, add_help=command is not demo
        )
        sub.set_defaults(command=command)
        if command is explain:
            sub.add_argument("target", metavar="SCRIPT_OR_MODULE:FUNCTION")
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command is not demo:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments.command(arguments, rest)


if __name__ == "__main__":
    sys.exit(main())
