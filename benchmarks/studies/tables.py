"""The rows of the model sweep as people read them: what is kept, how good gradients are, how training went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from benchmarks.studies.measuring import FORMATS, LINEARS


def tables(rows: dict[str, Any]) -> Iterator[Table]:
    """The rows as people read them: what is kept, how good gradients are, how training went."""
    yield _bytes_table(rows)
    yield _sqnr_table(rows)
    yield _linears_table(rows)
    yield _training_table(rows)


def _bytes_table(rows: dict[str, Any]) -> Table:
    ours = _ours(rows)
    table = _table("saved for backward, MB", "model", "precision", "codegen", "eager", "plain", *ours)
    for column in (f"{ours[0]} / plain", "report / measured", "same for plain") if ours else ():
        table.add_column(column, justify="right")
    for key, row, precision, found in _measurements(rows):
        ways = ("eager", "plain", *ours)
        sizes = (f"{found[way]['saved_bytes'] / 1e6:.2f}" if way in found else "-" for way in ways)
        shares = _shares(found, ours[0]) if ours and ours[0] in found else ()
        table.add_row(key.split("/")[0], precision, row["codegen"], *sizes, *shares)
    return table


def _shares(found: dict[str, Any], way: str) -> tuple[str, ...]:
    plain, ours, report = found["plain"]["saved_bytes"], found[way]["saved_bytes"], found[way]["report"]
    ratios = (ours / plain, report["saved_bytes"] / ours, report["saved_bytes_plain"] / plain)
    return f"{ratios[0]:.2f}", f"{ratios[1]:.3f}", f"{ratios[2]:.3f}"


def _sqnr_table(rows: dict[str, Any]) -> Table:
    title = "worst gradient SQNR over parameters against float64, dB (median)"
    ours = _ours(rows)
    table = _table(title, "model", "precision", "codegen", "plain", *ours)
    for column in (*(f"{way} to plain" for way in ours), "worst parameter", "zero in theory"):
        table.add_column(column, justify="right")
    for key, row, precision, found in _measurements(rows):
        there = next((way for way in ours if way in found), "plain")
        table.add_row(
            key.split("/")[0],
            precision,
            row["codegen"],
            *(_sqnr_text(found[way]["sqnr"]) if way in found else "-" for way in ("plain", *ours)),
            *(f"{found[way]['sqnr_to_plain']['worst_db']:.1f}" if way in found else "-" for way in ours),
            found[there]["sqnr"]["worst_parameter"],
            str(len(found["without_gradient_in_theory"])),
        )
    return table


def _ours(rows: dict[str, Any]) -> list[str]:
    """The ways of compiling by fp8compile that any row has."""
    measured = [found for _, _, _, found in _measurements(rows)]
    return [way for way in (*FORMATS, *LINEARS) if any(way in found for found in measured)]


def _linears_table(rows: dict[str, Any]) -> Table:
    title = "linears: those that run, in FP8 and left; products in FP8, and left with their reasons"
    table = _table(title, "model", "precision", "arm", "run", "in FP8", "left", "FP8 products", "products left")
    for key, _, precision, found in _measurements(rows):
        for way in LINEARS:
            if told := found.get(way, {}).get("linears"):
                counts = (told[f"linears_{what}"] for what in ("of_the_model", "in_fp8", "left"))
                left = "; ".join(f"{n} {why}" for why, n in told["products_left"].items())
                left += "".join(f" DIFFERS {path}: {how}" for path, how in told["differences"].items())
                products = str(sum(told["products_in_fp8"].values()))
                table.add_row(key.split("/")[0], precision, way, *map(str, counts), products, left)
    return table


def _sqnr_text(found: dict[str, Any]) -> str:
    return f"{found['worst_db']:.1f} ({found['median_db']:.1f})"


def _training_table(rows: dict[str, Any]) -> Table:
    title = "loss of the last 5 steps, gap to the twin (mean over seeds +- standard error)"
    arms = ("eager", *FORMATS, *LINEARS)
    table = _table(title, "model", "codegen", "twin", "first", "last 5", *arms)
    for key, row in rows.items():
        found = row["training"]
        if found is None:
            continue
        table.add_row(
            key.split("/")[0],
            row["codegen"],
            "Inductor" if found["twin"] == "Inductor" else "eager graph",
            f"{found['twin_loss_first']:.3f}",
            f"{found['twin_loss_last5']:.3f}",
            *(_gap_text(found["gap_last5"].get(arm)) for arm in arms),
        )
    return table


def _gap_text(gap: dict[str, Any] | None) -> str:
    if gap is None:
        return "-"
    error = gap["standard_error"]
    return f"{gap['mean']:+.2%}" + (f" +- {error:.2%}" if error is not None else "")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        words = column in ("model", "precision", "codegen", "twin", "arm", "products left")
        table.add_column(column, justify="left" if words else "right")
    return table


def _measurements(rows: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str, dict[str, Any]]]:
    for key, row in rows.items():
        for precision, found in row["precisions"].items():
            yield key, row, precision, found
