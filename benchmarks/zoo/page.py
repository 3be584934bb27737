"""docs/zoo.md, made from benchmarks/results/zoo-cpu.json: no figure in it is typed.

python benchmarks/zoo/page.py          rewrites the page
python benchmarks/zoo/page.py --check  exits with 1 where the page is not what this script makes

A model is an exception where an arm raised, where its gap is larger than 1 % and than the gap of preset "off" in any seed,
or where a gradient that BF16 determines is below the bar of ``fp8compile.check``. ``causes.py`` says why, by name, and
``apart.py`` measures what it says: each part of fp8compile by itself.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a script's own folder is all that is there

from benchmarks.harness.measured_sections import gap as gap_text
from benchmarks.harness.measured_sections import load, source, table
from benchmarks.harness.results import FOLDER
from benchmarks.zoo.causes import CAUSES
from benchmarks.zoo.registry import MODULES, models
from fp8compile.numerics.gradient_quality import BAR

PAGE = Path(__file__).resolve().parents[2] / "docs/zoo.md"
RESULTS = "zoo-cpu.json"
CLOSE = 0.01  # of the twin's loss
FAMILIES = {
    "transformers": "transformers",
    "timm": "timm",
    "diffusers": "diffusers",
    "plain": "Plain models",
}
HEAD = ("model", "graphs", "matmuls in FP8", "saved, KiB", "dB", "dB, BF16", "loss, twin", "gap", 'gap, "off"')
PARTS = {
    "twin": "BF16",
    "off": '"off"',
    "storage": "storage alone",
    "linears": "linears alone",
    "mended": "mended by",
}
LOSSES = {"off": '"off"', "storage": "storage alone", "linears": "linears alone", "ours": "ours", "mended": "mended"}
Row = Mapping[str, Any]

# ---------------------------------------------------------------------------------------------------- verdicts


def crashed(row: Row) -> str:
    """What an arm of ours raised, in a line; "" where none did."""
    return "; ".join(f"{arm}: {each['text'].splitlines()[0]}" for arm, each in row["errors"].items())


def spread(row: Row) -> float:
    """How far preset "off", which encodes nothing, ends from the twin: the largest over seeds."""
    return max(abs(float(each)) for each in row["gap"]["off"]["each"])


def is_close(row: Row) -> bool:
    """Whether the mean loss is within ``CLOSE`` of the twin's, or within the spread of "off"."""
    return abs(float(row["gap"]["ours"]["mean"])) <= max(CLOSE, spread(row))


def findings(row: Row) -> list[str]:
    """What makes a row an exception."""
    if row["errors"]:
        return [crashed(row)]
    found = [] if is_close(row) else [f"gap {signed(row['gap']['ours']['mean'])}"]
    if below := row["db"]["ours"].get("count_below_bar", 0):
        worst = row["db"]["ours"]
        found.append(
            f"{below} of {judged(row)} gradients below {BAR:g} dB, worst `{worst['worst_parameter']}` {worst['worst']:.1f} dB"
        )
    return found


def judged(row: Row) -> int:
    """How many gradients BF16 determines."""
    return int(row["gradients"]) - int(row["zero"]) - int(row["undetermined"])


# ------------------------------------------------------------------------------------------------------ tables


def cells(name: str, row: Row) -> tuple[str, ...]:
    """A row of a family's table."""
    if row["errors"]:
        return (f"`{name}`", *("-",) * (len(HEAD) - 1))
    sizes = (f"{row[key] / 1024:,.0f}" for key in ("saved_before", "saved_after"))
    return (
        f"`{name}`",
        str(row["graphs"]),
        f"{row['products_fp8']} of {row['products_told']}",
        " → ".join(sizes),
        decibels(row["db"]["ours"]),
        decibels(row["db"]["twin"]),
        f"{row['loss_first']:.3g} → {row['loss_last']:.3g}",
        signed(row["gap"]["ours"]["mean"]),
        signed(row["gap"]["off"]["mean"]),
    )


def signed(share: float) -> str:
    """In percent, and no -0.00%."""
    return f"{round(share, 4) + 0.0:+.2%}"


def decibels(db: Row) -> str:
    """Worst, and median in brackets."""
    return f"{db['worst']:.1f} ({db['median']:.1f})" if db else "-"


def exceptions(rows: Mapping[str, Row]) -> list[str]:
    """Every exception, with what it is, what each part of fp8compile does there by itself, and why."""
    found = [
        (f"`{name}`", "; ".join(what), *parts(row), CAUSES.get(name, "not known"))
        for name, row in rows.items()
        if (what := findings(row))
    ]
    return table(("model", "what", "size", *PARTS.values(), "cause"), found) if found else ["None."]


def parts(row: Row) -> tuple[str, ...]:
    """Of the worst gradient below the bar: its size, and the dB of each part."""
    found = row.get("apart", {}).get("parameters", {}).get(row["db"]["ours"].get("worst_parameter", ""))
    if not found or not row["db"]["ours"]["count_below_bar"]:
        return ("-",) * (1 + len(PARTS))
    cells = {arm: f"{db[0]:.1f} ({statistics.median(db):.1f})" for arm, db in found["db"].items()}
    if "mended" in cells:
        cells["mended"] += "".join(f", `{field}={value}`" for field, value in row["apart"]["mend"].items())
    return (f"{statistics.median(found['size']):.0e}", *(cells.get(arm, "-") for arm in PARTS))


def losses_apart(rows: Mapping[str, Row]) -> list[str]:
    """The gap of each part where the loss is what was found, over more seeds."""
    gaps = {name: each for name, row in rows.items() if (each := row.get("apart", {}).get("gap"))}
    cells = [
        (f"`{name}`", *(gap_text(each[arm]["mean"], each[arm]["error"]) if arm in each else "-" for arm in LOSSES))
        for name, each in gaps.items()
    ]
    return ["", LOSSES_APART, "", *table(("model", *LOSSES.values()), cells)] if cells else []


def reasons(rows: Iterable[Row]) -> list[str]:
    """Why matmuls were left in their dtype, over the zoo."""
    counts: collections.Counter[str] = collections.Counter()
    models: collections.Counter[str] = collections.Counter()
    for row in rows:
        merged: collections.Counter[str] = collections.Counter()
        for reason, times in row.get("left", {}).items():
            merged[shortened(reason)] += times
        counts.update(merged)
        models.update(merged.keys())
    return table(
        ("reason", "matmuls", "models"), ((reason, str(n), str(models[reason])) for reason, n in counts.most_common())
    )


def shortened(reason: str) -> str:
    """A reason without what is one model's own: sizes and paths."""
    start = reason.split(":")[0].split("=")[0]
    if start in ("K", "N", "M"):
        return f"{start} is not a multiple of 16"
    return reason if len(reason) < 90 and "'" not in reason else reason.split(": module")[0].split(" '")[0]


def summary(rows: Mapping[str, Row]) -> list[str]:
    """Counts over the zoo."""
    good = [row for row in rows.values() if not row["errors"]]
    close = sum(map(is_close, good))
    exact = [row["saved_after"] / row["saved_before"] for row in good if row["saved_before"]]
    low = sum(bool(row["db"]["ours"].get("count_below_bar")) for row in good)
    matmuls = [sum(row[key] for row in good) for key in ("products_fp8", "products_told")]
    families = collections.Counter(row["family"] for row in rows.values())
    lines = [
        ("models", f"{len(rows)}: " + ", ".join(f"{n} {family}" for family, n in families.most_common())),
        ("crashes", str(len(rows) - len(good))),
        (
            'loss within 1% of the twin, or within the spread of "off"',
            f"{close} of {len(good)} ({close / max(len(good), 1):.1%})",
        ),
        (f"models with a gradient below {BAR:g} dB that BF16 determines", str(low)),
        ("matmuls of linears in FP8", f"{matmuls[0]} of {matmuls[1]}"),
        (
            "saved bytes, ours over plain Inductor's, median model",
            f"{statistics.median(exact):.0%}" if exact else "-",
        ),
        ("models with more than one graph", str(sum(row["graphs"] > 1 for row in good))),
    ]
    return table(("", ""), lines)


BEGINNING = """# The zoo

For someone who asks whether fp8compile works on a model like theirs. This page is made by `python benchmarks/zoo/page.py`
from the results of `make zoo`.

Every model is small, has random weights, and learns from data that can be learnt.
Most of its linears are wide enough for FP8."""
HOW = """Three arms train from the same weights on the same batches, in BF16 autocast: the twin is eager PyTorch.
"off" is fp8compile with that preset. Ours is the default recipe with `linears.emulate=True`. No kernels are generated
(`debug.codegen="eager"`).

- *Matmuls in FP8*: of those of linears, three for each linear. The reasons for the others are below.
- *Saved*: bytes kept for the backward, plain Inductor's and ours, from the report.
- *dB*: the worst gradient (the median) against float64, over the gradients that BF16 determines to {bar:g} dB.
- *Gap*: the mean loss of the last 5 of {steps} steps, over the twin's, minus 1. It is the mean over seeds."""

APART = """Each is taken apart by `benchmarks/zoo/apart.py`, on the same weights: storage without FP8 linears, and FP8
linears without storage. The figures are dB of the worst gradient on the batch of the verdict.
In brackets is the median of five batches.
*Size* is the RMS of the exact gradient over that of the parameter in the middle.
*Mended by* is a change to the recipe, and the dB with it.
These rows are older than the present storage of attention (see the changelog, "Numerics").
With it the worst gradient of funnel is at 8.5 dB, of blenderbot at 10.0, of opt at 11.5, of deberta_v2 at 6.8."""
LOSSES_APART = "Gaps over five seeds, mean ± standard error, of those whose loss was found:"
GENERATED = 'The same with `debug.codegen="inductor"` for all arms of ours; the arm "off" is plain Inductor.'


def page(folder: Path = FOLDER) -> str:
    """The whole page."""
    found = load(folder, RESULTS)
    rows = of_zoo(found, "")
    steps = next((row["steps"] for row in rows.values() if "steps" in row), 0)
    parts = [BEGINNING, source(RESULTS, found), HOW.format(bar=BAR, steps=steps), *_section("Summary", summary(rows))]
    parts += _section("Exceptions", [APART, "", *exceptions(rows), *losses_apart(rows)])
    for family, title in FAMILIES.items():
        if own := {name: row for name, row in rows.items() if row["family"] == family}:
            parts += _section(title, [*rows_table(own), *notes(own)])
    if generated := of_zoo(found, "/inductor"):
        parts += _section("With kernels generated", [GENERATED, "", *rows_table(generated)])
    parts += _section("Matmuls that were left", reasons(rows.values()))
    return "\n\n".join(parts) + "\n"


def of_zoo(found: Mapping[str, Any], way: str) -> dict[str, Row]:
    """The rows of one way to run graphs, in the zoo's order, by the model's name."""
    return {name: found["rows"][name + way] for name in models(tuple(MODULES)) if name + way in found["rows"]}


def rows_table(rows: Mapping[str, Row]) -> list[str]:
    """Rows as a table."""
    return table(HEAD, (cells(name, row) for name, row in rows.items()))


def notes(rows: Mapping[str, Row]) -> list[str]:
    """What a reader of some rows should know."""
    told = [f"- `{name}`: {row['note']}." for name, row in rows.items() if row["note"]]
    return ["", *told] if told else []


def section(folder: Path = FOLDER) -> list[str]:
    """The zoo in ``docs/results.md``: where its figures are, and the counts."""
    found = load(folder, RESULTS)
    rows = of_zoo(found, "")
    return [source(RESULTS, found), "[The zoo](zoo.md) has a row for each model.", "", *summary(rows)]


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "\n".join(lines)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    new = page()
    if arguments.check:
        return int(PAGE.read_text() != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
