"""Are the tests awake: each mutant of the tables is put into a copy of the sources, and its nearest tests are run.

    python -m tests.mutants.run                  all, two at a time; fails if a smaller share than ``LEAST`` is killed
    python -m tests.mutants.run --only operands  those whose name contains the word; fails if one survives
    python -m tests.mutants.run --sample 60      so many, the same each time; with --fast by the cases of ``make test`` alone
    python -m tests.mutants.run --list

A mutant is killed where a test fails (pytest's exit status 1). One that ends otherwise (nothing collected, no import, out of
time) shows nothing about the tests and counts as not killed. First the same tests run on the sources as they are: what
fails there cannot judge. The checkout is never written to; the copy stands on ``sys.path`` before the installed package.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import (
    of_analyses,
    of_attention,
    of_blocks,
    of_captured_steps,
    of_clients,
    of_cpu_codecs,
    of_delayed,
    of_experts,
    of_explorer,
    of_first_contact,
    of_graphs,
    of_integers,
    of_kernel_tables,
    of_linears,
    of_links,
    of_logits,
    of_memory,
    of_norms,
    of_numerics,
    of_prices,
    of_regions,
    of_scaling,
    of_short_forms,
    of_states,
    of_stores,
    of_training,
    of_tuning,
    of_watching,
)
from tests.mutants.mutant import Mutant

MUTANTS = (
    *of_numerics.NUMERICS,
    *of_graphs.PASSES,
    *of_norms.NORMS,
    *of_logits.LOGITS,
    *of_regions.REGIONS,
    *of_cpu_codecs.CPU_CODECS,
    *of_short_forms.SHORT_FORMS,
    *of_stores.STORES,
    *of_scaling.SCALING,
    *of_delayed.DELAYED,
    *of_linears.LINEARS,
    *of_experts.EXPERTS,
    *of_blocks.BLOCKS,
    *of_integers.INTEGERS,
    *of_analyses.ANALYSES,
    *of_attention.ATTENTION,
    *of_prices.PRICES,
    *of_memory.MEMORY,
    *of_training.AROUND,
    *of_training.WHOLE_STEP,
    *of_training.AMP,
    *of_training.OPTIM,
    *of_captured_steps.CAPTURED_STEPS,
    *of_states.STATES,
    *of_links.LINKS,
    *of_clients.CLIENTS,
    *of_explorer.EXPLORER,
    *of_first_contact.FIRST_CONTACT,
    *of_kernel_tables.KERNEL_TABLES,
    *of_watching.WATCHING,
    *of_tuning.TUNING,
)

ROOT = Path(__file__).parents[2]
LEAST = 0.9  # of all, killed
TIMEOUT_S = 600
FAILED = 1  # pytest's exit status where it ran tests and some failed
PASSES, INSTALLED_PASSES = "passes", "fp8compile/passes"  # where they lie, and where they are imported from


def copied(root: Path, at: Path) -> None:
    """The package as it is installed, its tests and pytest's configuration in ``at``."""
    without_caches = shutil.ignore_patterns("__pycache__")
    as_they_are = ((name, name) for name in ("fp8compile", "tests", "benchmarks", "examples"))
    for source, target in (*as_they_are, (PASSES, INSTALLED_PASSES)):
        shutil.copytree(root / source, at / target, ignore=without_caches)
    shutil.copytree(root / PASSES, at / PASSES, ignore=without_caches)  # tests may read the files
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(root / name, at / name)


def stale(mutant: Mutant, root: Path = ROOT) -> str | None:
    """Why a mutant does not fit the sources; None where it does."""
    path = root / mutant.file
    if not path.exists():
        return f"{mutant.file} is not there"
    count = path.read_text().count(mutant.old)
    if count != 1:
        return f"{mutant.file} has its old text {count} times, not once"
    missing = [t for t in mutant.tests if not (root / t.split("::")[0]).exists()]
    return f"no such tests: {', '.join(missing)}" if missing else None


def put_in(mutant: Mutant, at: Path) -> None:
    """Write the fault into the copy."""
    for file in {mutant.file, mutant.file.replace(f"{PASSES}/", f"{INSTALLED_PASSES}/", 1)}:
        if (at / file).exists():
            text = (at / file).read_text()
            (at / file).write_text(text.replace(mutant.old, mutant.new, 1))


def status_of(tests: Sequence[str], at: Path, timeout_s: float) -> int | None:
    """pytest's exit status for these options and tests on the sources in ``at``; None where it ran out of time."""
    temporary = at / "temporary"
    temporary.mkdir(exist_ok=True)
    own = {"PYTHONPATH": str(at), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider", *tests]
    with (at / "output").open("w") as output:
        process = subprocess.Popen(
            command, cwd=at, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with the processes that tests have started
            process.wait()
            return None


def verdict(mutant: Mutant, extent: Sequence[str]) -> tuple[str, float]:
    """ "killed", "survived" or what else came of it, and the seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fp8compile-mutant-") as folder:
        copied(ROOT, Path(folder))
        put_in(mutant, Path(folder))
        status = status_of([*extent, *mutant.tests], Path(folder), TIMEOUT_S)
    said = {FAILED: "killed", 0: "survived", None: f"no verdict in {TIMEOUT_S} s"}
    return said.get(status, f"pytest ended with {status}"), time.monotonic() - start


def unchanged_fails(mutants: Sequence[Mutant], extent: Sequence[str]) -> bool:
    """Whether the tests of these mutants fail, or import something else than the copy, without any mutant."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    with tempfile.TemporaryDirectory(prefix="fp8compile-mutant-") as folder:
        at = Path(folder)
        copied(ROOT, at)
        where = "import fp8compile, fp8compile.passes as p; print(fp8compile.__file__, p.__file__)"
        env = os.environ | {"PYTHONPATH": folder}
        found = subprocess.run([sys.executable, "-c", where], cwd=at, env=env, capture_output=True, text=True)
        if not all(Path(f).is_relative_to(at) for f in found.stdout.split()) or not found.stdout:
            raise RuntimeError(f"not the copy is imported: {found.stdout}{found.stderr}")
        status = status_of([*extent, *tests], at, TIMEOUT_S * max(1, len(mutants)))
        if status != 0:
            print((at / "output").read_text()[-4000:])
    return status != 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", metavar="WORD", help="mutants whose name contains it")
    parser.add_argument("--list", action="store_true", help="print the table and end")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, drawn by the same seed each time")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="how many at a time")
    parser.add_argument("--fast", action="store_true", help="by the cases of make test alone")
    parser.add_argument("--trust", action="store_true", help="do not run the tests on unchanged sources first")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if options.only is None or options.only in m.name]
    if options.sample is not None:
        chosen = random.Random(0).sample(chosen, min(options.sample, len(chosen)))
    if options.list:
        print("\n".join(f"{m.name:60} {m.file}" for m in chosen))
        return 0
    if not chosen:
        print(f"no mutant's name contains {options.only!r}: see --list")
        return 2
    if unfit := [(m, why) for m in chosen if (why := stale(m))]:
        print("\n".join(f"the table is stale: {m.name}: {why}" for m, why in unfit))
        return 2
    extent = () if options.fast else ("--sweep",)
    if not options.trust and unchanged_fails(chosen, extent):
        print("these tests fail without any mutant")
        return 2
    return _run(chosen, options.j, extent, sampled=options.sample is not None)


def _run(chosen: Sequence[Mutant], at_a_time: int, extent: Sequence[str], *, sampled: bool) -> int:
    killed, judge = 0, functools.partial(verdict, extent=extent)
    with ThreadPoolExecutor(at_a_time) as pool:
        for mutant, (said, seconds) in zip(chosen, pool.map(judge, chosen), strict=True):
            killed += said == "killed"
            print(f"{said:12} {mutant.name:60} {seconds:4.0f} s", flush=True)
    print(f"{killed} of {len(chosen)} killed")
    least = LEAST * len(chosen) if sampled or len(chosen) == len(MUTANTS) else len(chosen)
    return 0 if killed >= least else 1


if __name__ == "__main__":
    sys.exit(main())
