"""The command line: ``fp8compile COMMAND [options]``. A command is one entry of ``COMMANDS``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8compile import __version__
from fp8compile._messages import nearest
from fp8compile.cli import bench, explain
from fp8compile.cli.explain import WRONG, Wrong, fields_from, recipe_from
from fp8compile.demo.arms import ARMS, FP16_ARMS
from fp8compile.recipe.recipe import PRESETS

FAILED, INTERRUPTED = 1, 130


@dataclass(frozen=True)
class Command:
    """A subcommand: ``add_options`` declares options, ``run`` takes the values, returns the exit code."""

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (2: the command line is wrong, as everywhere)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser("fp8compile", description="Low-precision training without changing the model.")
    parser.add_argument("--version", action="version", version=f"fp8compile {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    options_of = {command.name: _add(subparsers, command) for command in COMMANDS}
    if arguments and not arguments[0].startswith("-") and arguments[0] not in options_of:
        parser.error(f"there is no command {arguments[0]!r}.{nearest(arguments[0], options_of)}")
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(options_of[values.command], unknown[0])
    command = next(c for c in COMMANDS if c.name == values.command)
    try:
        return command.run(values)
    except KeyboardInterrupt:
        print(f"fp8compile {command.name}: interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("demo-output"), metavar="DIR", help="folder for the results")
    parser.add_argument("--steps", type=_at_least(1), metavar="N", help="optimizer steps per run")
    parser.add_argument(
        "--seeds", type=_at_least(1), default=1, metavar="N", help="seeds per arm; the gap is their mean"
    )
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="the first seed")
    parser.add_argument(
        "--arms",
        type=_arms,
        metavar="A,B",
        help=f"which of {', '.join(ARMS)}; with --precision fp16, which of {', '.join(FP16_ARMS)}",
    )
    parser.add_argument(
        "--preset",
        type=_one_of("preset", PRESETS),
        default="default",
        help=f"of fp8compile: {', '.join(PRESETS)}",
    )
    parser.add_argument(
        "-o", dest="fields", action="append", default=[], metavar="FIELD=VALUE", help="a field of fp8compile's recipe"
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp32", "fp16"),
        default="auto",
        help="of matmuls; auto: what is fast here; fp16: of everything, to compare ways to scale the loss",
    )
    parser.add_argument("--tiny", action="store_true", help="a toy model for seconds, to try the machinery")
    parser.add_argument("--threads", type=_at_least(1), metavar="N", help="CPU threads")
    parser.add_argument("--slow", action="store_true", help="train in FP16 even where this CPU takes hours for it")


def run_demo(values: argparse.Namespace) -> int:
    from fp8compile.demo import run as demo
    from fp8compile.demo.data import NoSource
    from fp8compile.demo.extras import MissingExtra
    from fp8compile.demo.fp16_cost import TooSlow

    try:
        recipe_from(values.preset, values.fields)
        _check_arms(values.arms or (), FP16_ARMS if values.precision == "fp16" else ARMS, values.precision)
    except Wrong as error:
        print(f"fp8compile demo: error: {error}", file=sys.stderr)
        return WRONG
    options = demo.Options(
        out=values.out,
        steps=values.steps,
        seeds=values.seeds,
        seed=values.seed,
        arms=values.arms,
        preset=values.preset,
        fields=fields_from(values.fields),
        precision=values.precision,
        tiny=values.tiny,
        threads=values.threads,
        slow=values.slow,
    )
    try:
        return demo.run_demo(options)
    except (MissingExtra, NoSource, TooSlow, OSError) as error:
        print(f"fp8compile demo: error: {error}", file=sys.stderr)
        return FAILED


COMMANDS: tuple[Command, ...] = (
    Command("demo", "train a small Llama with and without fp8compile, and compare", add_demo_options, run_demo),
    Command(
        "explain",
        "tell what fp8compile does to a model, without training it",
        explain.add_explain_options,
        explain.run_explain,
    ),
    Command(
        "dump",
        "explain, and write the graphs before and after each pass to files",
        explain.add_dump_options,
        explain.run_dump,
    ),
    Command(
        "bench",
        "measure kernels, layers and whole steps beside other systems, in a checkout",
        bench.add_bench_options,
        bench.run_bench,
    ),
)


def _add(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], command: Command
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(command.name, help=command.help, description=command.help, allow_abbrev=False)
    command.add_options(parser)
    return parser


def _refuse(parser: argparse.ArgumentParser, argument: str) -> None:
    name = argument.split("=")[0]
    known = [text for text in parser._option_string_actions if text.startswith("--")]
    parser.error(f"no option {name!r}.{nearest(name, known)}" if name.startswith("-") else f"what is {argument!r}?")


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parse


def _one_of(noun: str, known: Iterable[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"there is no {noun} {text!r}.{nearest(text, known)}")
        return text

    return parse


def _arms(text: str) -> tuple[str, ...]:
    names = tuple(map(_one_of("arm", (*ARMS, *FP16_ARMS)), text.split(",")))
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names an arm twice")
    return names


def _check_arms(names: Sequence[str], known: Sequence[str], precision: str) -> None:
    for name in names:
        if name not in known:
            raise Wrong(f"with --precision {precision} there is no arm {name!r}: {', '.join(known)}")
