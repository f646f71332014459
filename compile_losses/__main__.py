"""``python -m compile_losses info | explain | compare | bisect | run | demo``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from compile_losses.facts import gather, in_words
from compile_losses.programs.running import load
from compile_losses.terminal import say


def info(arguments: argparse.Namespace, _: list[str]) -> int:
    """Versions, devices, and which kernels are loaded."""
    facts = gather()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    for line in in_words(facts):
        say(line)
    return 0


def explain(arguments: argparse.Namespace, _: list[str]) -> int:
    """Calls the function without arguments and prints what would be rewritten."""
    from compile_losses.options import InvalidOptionError
    from compile_losses.report.explanation import explain_call

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


def bisect(arguments: argparse.Namespace, _: list[str]) -> int:
    """Finds the loss and the pass that a problem comes from, and the smallest switch against it."""
    from compile_losses.programs.bisection import RefusedError
    from compile_losses.programs.bisection import bisect as find

    try:
        found = find(
            arguments.target,
            arguments.check,
            mode=arguments.mode,
            options=arguments.options,
            steps=arguments.steps,
            tolerance=arguments.tolerance,
            say=(lambda _: None) if arguments.json else say,
        )
    except RefusedError as error:
        raise SystemExit(f"bisect: {error}") from None
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        say()
        say(found)
    return 0


def run(arguments: argparse.Namespace, program: list[str]) -> int:
    """Runs a training script, or -m MODULE, as it is: torch.compile rewrites its losses."""
    from compile_losses.options import InvalidOptionError
    from compile_losses.programs.running import run as run_program

    if not program:
        raise SystemExit("run: expected a script, or -m and a module")
    try:
        if arguments.compare is not None:
            _compare_program(arguments, program)
        else:
            run_program(program, arguments.options or {})
    except InvalidOptionError as error:
        raise SystemExit(str(error)) from None
    return 0


def _compare_program(arguments: argparse.Namespace, program: list[str]) -> None:
    from compile_losses.programs.program_comparison import ProgramError, compare_program

    try:
        found = compare_program(program, arguments.compare, arguments.options)
    except ProgramError as error:
        raise SystemExit(f"run --compare: {error}") from None
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        say(found)


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
        end += 1 if "=" in argv[end] or argv[end] in ("--help", "--json") else 2
    return argv[:end], argv[end:]


def demo(_: argparse.Namespace, rest: list[str]) -> int:
    """Trains models with stock torch.compile and with this package, side by side."""
    from compile_losses.demo import main as run_demo

    return run_demo(rest)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compile_losses", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (info, explain, compare, bisect, run, demo):
        summary = (command.__doc__ or "").splitlines()[0]
        sub = commands.add_parser(
            command.__name__, help=summary, description=summary, add_help=command is not demo
        )
        sub.set_defaults(command=command)
        if command in (explain, compare, bisect):
            sub.add_argument("target", metavar="SCRIPT_OR_MODULE:FUNCTION")
            sub.add_argument("--mode", help="as for torch.compile")
            sub.add_argument(
                "--options", type=options_of, metavar="JSON", help="as for torch.compile"
            )
            sub.add_argument("--json", action="store_true", help="for programs to read")
        if command is compare:
            sub.add_argument("--steps", type=int, default=10, help="measured steps of each side")
        if command is bisect:
            sub.add_argument(
                "--check",
                choices=("loss", "crash", "time"),
                required=True,
                help="what is wrong: other numbers, an error, or a step slower than stock's",
            )
            sub.add_argument("--steps", type=int, help="steps of each trial")
            sub.add_argument(
                "--tolerance",
                type=float,
                help="the relative difference from which a loss is wrong, or a time is long",
            )
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
            sub.usage = (
                "python -m compile_losses run [--options JSON] [--compare N [--json]] "
                "SCRIPT | -m MODULE [ARG ...]"
            )
            sub.add_argument(
                "--options", type=options_of, metavar="JSON", help="as for compile_losses.enable"
            )
            sub.add_argument(
                "--compare",
                type=int,
                metavar="N",
                help="measures N steps of the program by stock torch.compile and with this package",
            )
            sub.add_argument("--json", action="store_true", help="of --compare, for programs")
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
