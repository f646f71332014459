"""``python -m compile_losses info | explain | compare | run | demo``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compile_losses import library
from compile_losses.terminal import say


def info(arguments: argparse.Namespace, _: list[str]) -> int:
    """Versions, devices, and which kernels are loaded."""
    facts = gather()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    say(f"compile_losses {facts['compile_losses']}")
    say(f"torch          {facts['torch']} (CUDA {facts['cuda'] or 'not built in'})")
    say(f"python         {facts['python']} on {facts['platform']}")
    say(f"cpu            {facts['cpu']['threads']} threads, {facts['cpu']['capability']}")
    for i, gpu in enumerate(facts["gpus"]):
        say(f"cuda:{i}         {gpu['name']}, capability {gpu['capability']}")
    for device, kernels in facts["kernels"].items():
        name = kernels.get("loaded")
        state = f"loaded from {name}" if name else f"none: {kernels['missing']}"
        say(f"{device + ' kernels':<14} {state}")
    say("ops            " + ", ".join(facts["ops"]))
    return 0


def gather() -> dict[str, Any]:
    """The facts that :func:`info` prints."""
    from importlib.metadata import version

    return {
        "compile_losses": version("compile_losses"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "gpus": [
            {
                "name": torch.cuda.get_device_name(i),
                "capability": ".".join(map(str, torch.cuda.get_device_capability(i))),
            }
            for i in range(torch.cuda.device_count())
        ],
        "kernels": {
            device: {"loaded": kernels.name} if isinstance(kernels, Path) else {"missing": kernels}
            for device, kernels in library.kernels.items()
        },
        "cuda_build": library.cuda_build(),
        "ops": library.public_ops(),
    }


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
    from compile_losses.explanation import explain_call
    from compile_losses.options import InvalidOptionError

    function = load(arguments.target)
    try:
        report = explain_call(function, mode=arguments.mode, options=arguments.options)
    except InvalidOptionError as error:
        raise SystemExit(str(error)) from None
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        say(report)
    if arguments.html is not None:
        arguments.html.write_text(report.to_html())
    return int(any(site.status in arguments.fail_on for site in report.sites))


def compare(arguments: argparse.Namespace, _: list[str]) -> int:
    """Runs a step by stock torch.compile and with this package, in turns: time, memory, numbers."""
    from compile_losses.comparison import compare_call
    from compile_losses.options import InvalidOptionError

    function = load(arguments.target)
    try:
        found = compare_call(
            function, mode=arguments.mode, options=arguments.options, steps=arguments.steps
        )
    except (InvalidOptionError, ValueError) as error:
        raise SystemExit(str(error)) from None
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        say(found)
    return 0


def run(arguments: argparse.Namespace, program: list[str]) -> int:
    """Runs a training script, or -m MODULE, as it is: torch.compile rewrites its losses."""
    from compile_losses.options import InvalidOptionError
    from compile_losses.running import run as run_program

    if not program:
        raise SystemExit("run: expected a script, or -m and a module")
    try:
        run_program(program, arguments.options or {})
    except InvalidOptionError as error:
        raise SystemExit(str(error)) from None
    return 0


def options_of(text: str) -> dict[str, Any]:
    """The backend's options, written as JSON."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected JSON, got {text!r}: {error}") from None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return options


def before_program(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and the program that ``run`` is given, whose arguments look like ours."""
    if argv[:1] != ["run"]:
        return argv, []
    end = 1
    while end < len(argv) and argv[end].startswith("--"):
        end += 1 if "=" in argv[end] or argv[end] == "--help" else 2
    return argv[:end], argv[end:]


def demo(_: argparse.Namespace, rest: list[str]) -> int:
    """Trains models with stock torch.compile and with this package, side by side."""
    from compile_losses.demo import main as run_demo

    return run_demo(rest)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compile_losses", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (info, explain, compare, run, demo):
        summary = (command.__doc__ or "").splitlines()[0]
        sub = commands.add_parser(
            command.__name__, help=summary, description=summary, add_help=command is not demo
        )
        sub.set_defaults(command=command)
        if command in (explain, compare):
            sub.add_argument("target", metavar="SCRIPT_OR_MODULE:FUNCTION")
            sub.add_argument("--mode", help="as for torch.compile")
            sub.add_argument(
                "--options", type=options_of, metavar="JSON", help="as for torch.compile"
            )
            sub.add_argument("--json", action="store_true", help="for programs to read")
        if command is compare:
            sub.add_argument("--steps", type=int, default=10, help="measured steps of each side")
        if command is explain:
            sub.add_argument("--html", type=Path, metavar="FILE", help="writes a page as well")
            sub.add_argument(
                "--fail-on",
                action="append",
                default=[],
                choices=("declined", "unrecognised"),
                help="exits with 1 if there is such a loss; may be given twice",
            )
        if command is run:
            sub.usage = "python -m compile_losses run [--options JSON] SCRIPT | -m MODULE [ARG ...]"
            sub.add_argument(
                "--options", type=options_of, metavar="JSON", help="as for compile_losses.enable"
            )
        if command is info:
            sub.add_argument("--json", action="store_true", help="for programs to read")
    given = sys.argv[1:] if argv is None else argv
    given, program = before_program(given)
    arguments, rest = parser.parse_known_args(given)
    rest += program
    if rest and arguments.command not in (run, demo):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments.command(arguments, rest)


if __name__ == "__main__":
    sys.exit(main())
