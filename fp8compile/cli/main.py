"""The command line: ``fp8compile COMMAND [options]``. A command is one entry of ``COMMANDS``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from fp8compile import __version__
from fp8compile._messages import nearest
from fp8compile.cli.commands import COMMANDS, Command
from fp8compile.cli.ends import EXIT_CODES, INTERRUPTED, PIPE_CLOSED

SHELLS = ("bash", "zsh")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (see ``ends.EXIT_CODES``).

    Raises:
        SystemExit: with 0 after --help and --version, with 2 where the command line cannot be parsed.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at interpreter exit a closed pipe would print a traceback
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        return PIPE_CLOSED


def _run(arguments: list[str]) -> int:
    parser, parser_of = _parsers()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in parser_of:
        parser.error(f"there is no command {arguments[0]!r}.{nearest(arguments[0], parser_of)}")
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(parser_of[values.command], unknown[0])
    command = next(c for c in COMMANDS if c.name == values.command)
    try:
        return command.run(values)
    except KeyboardInterrupt:
        print(f"fp8compile {command.name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The whole parser, and that of each command."""
    parser = argparse.ArgumentParser(
        "fp8compile", description="Low-precision training without changing the model.", epilog=EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"fp8compile {__version__}")
    if importlib.util.find_spec("shtab") is not None:
        parser.add_argument(
            "--completion",
            action=_PrintCompletion,
            choices=SHELLS,
            help='print what completes this command in a shell, as in: eval "$(fp8compile --completion bash)"',
        )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    return parser, {command.name: _add(subparsers, command) for command in COMMANDS}


def _add(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], command: Command
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        command.name, help=command.help, description=command.help, epilog=EXIT_CODES, allow_abbrev=False
    )
    command.add_options(parser)
    return parser


class _PrintCompletion(argparse.Action):
    """Prints a shell's completion script, made by shtab, and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None
    ) -> None:
        import shtab

        print(shtab.complete(parser, values))
        parser.exit()


def _refuse(parser: argparse.ArgumentParser, argument: str) -> None:
    name = argument.split("=")[0]
    known = [text for text in parser._option_string_actions if text.startswith("--")]
    parser.error(f"no option {name!r}.{nearest(name, known)}" if name.startswith("-") else f"what is {argument!r}?")
