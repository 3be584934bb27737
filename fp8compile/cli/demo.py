"""``fp8compile demo``: its options checked, and handed to the demo."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fp8compile.cli.ends import FAILED, WRONG, Wrong, said
from fp8compile.cli.recipes import recipe_from
from fp8compile.extras.demo import run as demo
from fp8compile.extras.demo.arms import ARMS, FP16_ARMS
from fp8compile.extras.demo.data import NoSource
from fp8compile.extras.demo.extras import MissingExtra
from fp8compile.extras.demo.fp16_cost import TooSlow


def run_demo(values: argparse.Namespace) -> int:
    try:
        recipe_from(values.preset, values.fields)
        _check_arms(values.arms or (), FP16_ARMS if values.precision == "fp16" else ARMS, values.precision)
    except Wrong as error:
        return said("demo", error, WRONG)
    options = demo.DemoOptions(
        out=values.out,
        steps=values.steps,
        seeds=values.seeds,
        seed=values.seed,
        arms=values.arms,
        preset=values.preset,
        fields=dict(values.fields),
        precision=values.precision,
        tiny=values.tiny,
        threads=values.threads,
        slow=values.slow,
    )
    try:
        return demo.run_demo(options)
    except BrokenPipeError:
        raise  # an OSError too, but not the folder's fault
    except (MissingExtra, NoSource, TooSlow, OSError) as error:
        return said("demo", error, FAILED)


def _check_arms(names: Sequence[str], known: Sequence[str], precision: str) -> None:
    for name in names:
        if name not in known:
            raise Wrong(f"with --precision {precision} there is no arm {name!r}: {', '.join(known)}")
