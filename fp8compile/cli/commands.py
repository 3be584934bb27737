"""The commands: each is one entry of ``COMMANDS``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from fp8compile.cli import options, plan, watch


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        name: as it is typed.
        help: what it does, in a line.
        add_options: declares its options, without torch.
        home: the module whose ``run_<name>`` takes the values and returns the exit code; imported to run it.
    """

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    home: str

    def run(self, values: argparse.Namespace) -> int:
        """Run it; returns the exit code."""
        code: int = getattr(importlib.import_module(self.home), f"run_{self.name}")(values)
        return code


COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "train a small Llama with and without fp8compile, and compare",
        options.add_demo_options,
        "fp8compile.cli.demo",
    ),
    Command(
        "explain",
        "tell what fp8compile does to a model, without training it",
        options.add_explain_options,
        "fp8compile.cli.explain",
    ),
    Command(
        "dump",
        "explain, and write the graphs before and after each pass to files",
        options.add_dump_options,
        "fp8compile.cli.explain",
    ),
    Command(
        "plan",
        "estimate memory and traffic per GPU of a large model, by arithmetic",
        plan.add_plan_options,
        "fp8compile.cli.plan",
    ),
    Command(
        "watch",
        "show a training run that fp8compile.extras.watching.watch writes down: as a page, or live",
        watch.add_watch_options,
        "fp8compile.cli.watch",
    ),
    Command(
        "bench",
        "measure kernels, layers and whole steps beside other systems, in a checkout",
        options.add_bench_options,
        "fp8compile.cli.bench",
    ),
)
