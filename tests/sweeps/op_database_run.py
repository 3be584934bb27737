"""The command of ``tests/sweeps/op_database.py``: run the sweep, go on with one that was cut off, write and print results.

Records go into PATH.partial as they come (one line each; its first line is the key of the sources, so that a sweep goes on
only with the code that it began with); PATH is written at the end.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp8compile.compiler.sources import sources_key
from tests.sweeps import workers
from tests.sweeps.op_database import BAD, DTYPES, RECIPE, SECONDS, Record, records
from tests.sweeps.op_programs import WRAPPERS, operations

ORDER = (*BAD, "encoded", "declined", "exact", "not compiled", "eager is not finite", "eager fails")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="results file; a sweep that was cut off goes on")
    parser.add_argument("--only", default="", help="regular expression searched in the operations' names")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--wrappers", nargs="*", default=list(WRAPPERS), choices=list(WRAPPERS))
    parser.add_argument("-j", type=int, default=1, help="processes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        workers.serve(_answer)
        return
    names = [n for n in operations() if re.search(args.only, n)]
    jobs = jobs_of(names, args.dtypes, args.samples, args.wrappers)
    found = swept(jobs, args.j, args.json.with_suffix(".partial") if args.json else None)
    print(text_of(found))
    if args.json:
        args.json.write_text(json.dumps(document(found), indent=1) + "\n")
        args.json.with_suffix(".partial").unlink()


def jobs_of(
    names: Iterable[str], dtypes: Iterable[str], samples: int = 2, wrappers: Sequence[str] = WRAPPERS
) -> list[str]:
    """One job for each operation and dtype, as its worker reads it; what can have a wrong gradient first, mixed."""
    order = sorted(names, key=lambda n: (not operations()[n].supports_autograd, hashlib.sha256(n.encode()).digest()))
    return [f"{dtype} {samples} {','.join(wrappers)} {name}" for dtype in dtypes for name in order]


def swept(jobs: Sequence[str], processes: int, partial: Path | None = None) -> list[Record]:
    """The records of all jobs, in that order; ``partial`` holds an earlier run's, and takes new ones."""
    known = _read(partial) if partial else {}
    file = _opened(partial, known) if partial else None

    def done(job: str, answer: Any) -> None:
        known[job] = [_record(r) for r in answer]
        if file:
            file.write(json.dumps([job, answer]) + "\n")
            file.flush()
        bad = [r for r in known[job] if r.outcome in BAD]
        print(f"{len(known)}/{len(jobs)} {job}", *(f"\n    {r.key}: {r.outcome} {r.detail}" for r in bad), flush=True)

    todo = [job for job in jobs if job not in known]
    workers.run_jobs("tests.sweeps.op_database", todo, done, _died, processes, 3 * SECONDS)
    if file:
        file.close()
    return [record for job in jobs for record in known[job]]


def _answer(job: str) -> list[dict[str, Any]]:
    dtype, samples, wrappers, name = job.split(" ", 3)
    return [asdict(r) for r in records(name, dtype, int(samples), wrappers.split(","))]


def _died(job: str, why: str) -> list[dict[str, Any]]:
    dtype, _, _, name = job.split(" ", 3)
    return [asdict(Record(name, dtype, 0, "", "crash", why))]


def _record(data: dict[str, Any]) -> Record:
    return Record(**{**data, "saved": tuple(data["saved"]), "left": tuple(data["left"])})


def key() -> str:
    """Of the project's sources and the sweep's own."""
    own = b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("op_*.py")))
    return hashlib.sha256(sources_key().encode() + own).hexdigest()[:16]


def _read(partial: Path) -> dict[str, list[Record]]:
    lines = partial.read_text().splitlines() if partial.exists() else []
    if not lines or lines[0] != key():
        return {}
    found = {}
    for line in lines[1:]:
        try:
            job, answer = json.loads(line)
        except ValueError:  # the last line of a run that was killed while it wrote
            continue
        found[job] = [_record(r) for r in answer]
    return found


def _opened(partial: Path, known: dict[str, list[Record]]) -> Any:
    file = partial.open("w")
    file.write(key() + "\n")
    for job, rows in known.items():
        file.write(json.dumps([job, [asdict(r) for r in rows]]) + "\n")
    return file


def worst_first(outcomes: Iterable[str]) -> list[str]:
    return sorted(set(outcomes), key=lambda o: ORDER.index(o) if o in ORDER else len(ORDER))


def by_operation(found: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    groups: dict[tuple[str, str], list[Record]] = collections.defaultdict(list)
    for record in found:
        groups[record.dtype, record.op].append(record)
    return groups


def summary(found: Iterable[Record]) -> dict[str, dict[str, int]]:
    """For each dtype, how many operations there are of each outcome (its worst case's); cases are counted beside it."""
    table: dict[str, dict[str, int]] = {}
    for (dtype, _), rows in by_operation(found).items():
        counts = table.setdefault(dtype, collections.Counter())
        counts[worst_first(r.outcome for r in rows)[0]] += 1
        for row in rows:
            counts[f"cases: {row.outcome}"] += 1
    return table


def text_of(found: Sequence[Record]) -> str:
    """The summary as a table, and every case that must not be."""
    table = summary(found)
    names = worst_first(name for counts in table.values() for name in counts if not name.startswith("cases: "))
    lines = [f"{'operations (cases)':24}" + "".join(f"{dtype:>18}" for dtype in table)]
    for name in names:
        cells = (f"{counts.get(name, 0)} ({counts.get('cases: ' + name, 0)})" for counts in table.values())
        lines.append(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join((*lines, told(r for r in found if r.outcome in BAD)))


def told(found: Iterable[Record]) -> str:
    """A line for each case."""
    return "\n".join(f"{r.key}: {r.outcome} {r.detail} [{r.about}]; as codes: {'; '.join(r.saved)}" for r in found)


def document(found: Sequence[Record]) -> dict[str, Any]:
    """What the results file holds: the summary, a row for each operation and dtype, the reasons by their counts."""
    from benchmarks.harness.environment import environment

    rows = {f"{op} {dtype}": _row(rows) for (dtype, op), rows in by_operation(found).items()}
    reasons = collections.Counter(entry.split(": ", 1)[1] for r in found for entry in set(r.left))
    return {
        "environment": environment(),
        "recipe": RECIPE,
        "summary": summary(found),
        "bad": [asdict(r) for r in found if r.outcome in BAD],
        "reasons": dict(reasons.most_common()),
        "operations": rows,
    }


def _row(rows: Sequence[Record]) -> dict[str, Any]:
    compared = [r for r in rows if r.db is not None]
    worst = min(compared, key=lambda r: r.db if r.db is not None else 0.0) if compared else None
    row: dict[str, Any] = {
        "outcomes": " ".join(worst_first(r.outcome.replace(" ", "-") for r in rows)),
        "cases": len(rows),
    }
    if worst:
        row |= {"db": worst.db, "case": f"{worst.sample} {worst.wrapper} {worst.worst}"}
    if lowered := [r.bar for r in rows if r.bar is not None and r.bar < 20]:
        row["bar"] = min(lowered)
    details = dict.fromkeys(r.detail for r in rows if r.detail and r.outcome not in ("encoded", "exact"))
    return {**row, "details": list(details)} if details else row
