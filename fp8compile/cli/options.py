"""The options of each command."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from fp8compile.cli.values import at_least, factory, field, minutes, one_of, several_of
from fp8compile.extras.demo.arms import ARMS, FP16_ARMS
from fp8compile.recipe.presets import PRESETS

RETURNS = "(model, args) or (model, args, kwargs)"


def add_demo_options(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("demo-output"), metavar="DIR", help="folder for the results")
    parser.add_argument("--steps", type=at_least(1), metavar="N", help="optimizer steps per run")
    parser.add_argument(
        "--seeds", type=at_least(1), default=1, metavar="N", help="seeds per arm; the gap is their mean"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="the first seed")
    parser.add_argument(
        "--arms",
        type=several_of("arm", (*ARMS, *FP16_ARMS)),
        metavar="A,B",
        help=f"which of {', '.join(ARMS)}; with --precision fp16, which of {', '.join(FP16_ARMS)}",
    )
    add_recipe_options(parser)
    parser.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp32", "fp16"),
        default="auto",
        help="of matmuls; auto: what is fast here; fp16: of everything, to compare ways to scale the loss",
    )
    parser.add_argument("--tiny", action="store_true", help="a toy model for seconds, to try the machinery")
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="CPU threads")
    parser.add_argument("--slow", action="store_true", help="train in FP16 even where this CPU takes hours for it")


def add_explain_options(parser: ArgumentParser) -> None:
    parser.add_argument("factory", type=factory, metavar="pkg.mod:factory", help=f"a callable that returns {RETURNS}")
    add_recipe_options(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page to look at: one file, offline")
    parser.add_argument("--kernels", action="store_true", help="generate the kernels and list them in the page")
    parser.add_argument("--full", action="store_true", help="print every table, not only the first screen")
    parser.add_argument(
        "--traceback", action="store_true", help="of an error, the whole traceback before the line that names it"
    )


def add_dump_options(parser: ArgumentParser) -> None:
    add_explain_options(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the graphs")


def add_bench_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="benchmarks, or the parts kernels, layers, e2e (all)"
    )
    parser.add_argument("--list", action="store_true", help="every benchmark, its shapes, what it is compared with")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where torch sees a GPU")
    parser.add_argument(
        "--tiny", action="store_true", help="toy sizes for a CPU: to try the machinery, not to measure"
    )
    parser.add_argument("--again", action="store_true", help="measure rows too that are in the results file already")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results (benchmarks/results)")
    parser.add_argument("--minutes", type=minutes, metavar="M", help="stop after so long; the next run goes on")


def add_recipe_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--preset",
        type=one_of("preset", PRESETS),
        choices=tuple(PRESETS),
        default="default",
        metavar="NAME",
        help=f"fp8compile's recipe: {', '.join(PRESETS)}",
    )
    parser.add_argument(
        "-o",
        dest="fields",
        type=field,
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of fp8compile.Recipe that differs from the preset; repeat it for more",
    )
