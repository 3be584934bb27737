"""The first quarter of an hour on a GPU: facts about layers, training, set-ups, optimizers and kernels, most wanted first.

    python benchmarks/first_contact.py --seconds 520          a lease of nine minutes; killed, it goes on where it stopped
    python benchmarks/first_contact.py --plan then --seconds 230
    python benchmarks/first_contact.py "layer default 7b" "LAYERS=2!ncu vit default"
    python benchmarks/first_contact.py --device cpu --tiny    toy sizes, to try the script

One JSON line per fact goes to <out>/<device>-first-<date>.jsonl as soon as it is known, a table and a picture of
all of them beside it.
Arms that failed are not run again, but for --again. Needs no network and no installed package beyond PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script's own folder is all that is there

from benchmarks.first import facts, head, pictures, plan, table
from benchmarks.first.runner import Limits, Run

RESULTS = Path(__file__).resolve().parent / "results"


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", help="instead of a plan")
    parser.add_argument("--plan", choices=plan.PLANS, help="first, or tiny with --tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--seconds", type=float, default=520.0, help="of the whole run")
    parser.add_argument("--slots", type=int, help="arms that compile at once; default: CPUs less one")
    parser.add_argument("--gib", type=float, help="of the device, for all arms; default: what it has less 8")
    parser.add_argument("--compiling", type=float, default=240.0, help="seconds that an arm may compile for")
    parser.add_argument("--timed", type=float, default=80.0, help="seconds that it may be timed for")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the facts")
    parser.add_argument("--again", action="store_true", help="run arms that did not end well again")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that arms are ended and the table is written
    texts = args.arms or plan.PLANS[args.plan or ("tiny" if args.tiny else "first")]
    arms = plan.arms(texts)
    args.out.mkdir(parents=True, exist_ok=True)
    path = head.file(args.out, args.device, args.tiny)
    if args.again:
        _forget_the_failed(path)
    slots = args.slots or max(1, (os.cpu_count() or 2) - 1)
    limits = Limits(
        args.seconds, slots=slots, gib=args.gib or head.gib(args.device), compiling=args.compiling, timed=args.timed
    )
    _defaults_of_compilers()
    try:
        Run(arms, limits, path, args.device, args.tiny, head.head(args.device, args.tiny)).through()
    finally:
        _told(path)
    return 0


def _told(path: Path) -> None:
    """The table, what did not end well, and a picture."""
    found = facts.read(path)
    text = table.document(found)
    path.with_suffix(".md").write_text(text)
    print(text)
    pictures.written(found, path.with_suffix(".png"))


def _forget_the_failed(path: Path) -> None:
    kept = [f for f in facts.read(path) if f["what"] != facts.END or f.get("outcome") == facts.DONE]
    path.unlink(missing_ok=True)
    for fact in kept:
        facts.append(path, fact)


def _defaults_of_compilers() -> None:
    """Many compile at once: few threads each, and no word on the way."""
    for name, value in {
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "OMP_NUM_THREADS": "2",
        "PYTHONWARNINGS": "ignore",
    }.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    sys.exit(main())
