"""COAT (2410.19313) in small: what formats do to m / (sqrt(v) + eps), which k range expansion takes, which groups suffice.

    states       Adam's moments of a trained transformer of bytes, encoded once                ``state_errors``
    activations  inputs of its linear layers on held-out bytes, E4M3 and INT8, by group size

Published: table 8 and section 4 of the paper. Only ratios compare, since an MSE depends on the model and on its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.papers.outcome import NOT_FOUND, Outcome, Table, mean, rank_correlation
from benchmarks.papers.small_model import SmallLM, batches, fit, held_out_text
from benchmarks.papers.state_errors import Errors, Moments, ranges
from fp8compile.numerics.codecs import Codec, Groupwise, Tensorwise
from fp8compile.numerics.formats import E4M3, INT8
from fp8compile.numerics.metrics import sqnr
from fp8compile.reporting.figure import empty_figure

LAYERS, LEAST_NUMEL = 2, 4096
BASE = ("e4m3_expanded", "e4m3_expanded")
NAMES = {
    "E4M3": "e4m3",
    "E4M3 + Expand": "e4m3_expanded",
    "E5M2": "e5m2",
    "E5M2 + Expand": "e5m2_expanded",
    "DE8": "dynamic_tree",
    "DE8 + Expand": "dynamic_tree, expanded",
}  # the paper's and ours; DE8 is the dynamic tree
# MSE of m / (sqrt(v) + eps) by format of m, then of v, in the paper's units.
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "E4M3": {"E4M3": 20.10},
    "E4M3 + Expand": dict(zip(NAMES, (15.13, 12.31, 21.96, 12.43, 14.01, 18.84), strict=True)),
    "E5M2": {"E5M2": 40.30},
    "DE8": dict(zip(NAMES, (12.11, 8.27, 20.02, 8.43, 10.54, 16.25), strict=True)),
    "DE8 + Expand": dict(zip(NAMES, (11.57, 7.47, 19.69, 7.65, 9.91, 15.81), strict=True)),
}
PUBLISHED_K = {"m": (1, 3), "v": (5, 15)}
GROUP_SIZES = (16, 32, 64, 128, 256, 512)
SOURCES = (
    "table 8 (its rows E4M3 + Expand, DE8, DE8 + Expand) and section 4 of the paper; E4M3 and E5M2 for both moments, and the "
    "spans of k, as this project's notes quote it"
)


def reproduce(seeds: int, steps: int, tell: Callable[[str], None]) -> Outcome:
    """Train ``seeds`` models, and encode what they hold."""
    errors, k, by_size = [], {"m": [], "v": []}, []  # type: ignore[var-annotated]
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = SmallLM(stable=False, layers=LAYERS)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        losses = fit(model, seed, steps, optimizer=optimizer)
        tell(f"seed {seed}: trained to {losses[-1]:.3f} nats per byte")
        moments = moments_of(model, optimizer)
        found = Errors("nearest")
        for each in moments:
            found.add(each)
        errors.append(found.table())
        for state, here in ranges(moments).items():
            k[state].append(here["k paper"])
        by_size.append(activation_errors(model))
    figures: dict[str, Any] = {
        "mse": mean_table(errors),
        "k": {state: k_figures(torch.cat(each), PUBLISHED_K[state]) for state, each in k.items()},
        "activations_db": {key: mean(each[key] for each in by_size) for key in by_size[0]},
    }
    tables = (state_table(figures["mse"]), k_table(figures["k"]), activation_table(figures["activations_db"]))
    drawn = {state: torch.cat(each).tolist() for state, each in k.items()}
    findings = (
        f"Rank correlation of the {len(tables[0].rows)} errors with the published ones: {agreement(tables[0]):.2f}.",
        f"Smallest error: {best(tables[0], 2)}; published: {best(tables[0], 4)}.",
    )
    return Outcome(difference(steps), SOURCES, tables, lambda path: draw(figures, drawn, path), findings, figures)


def difference(steps: int) -> str:
    return (
        f"a transformer of bytes of 2 layers x 128 after {steps} steps of AdamW, where the paper has large language models. "
        "v is rounded to nearest and never to 0, in groups of 128. Errors compare as multiples of E4M3 + Expand's."
    )


def agreement(table: Table) -> float:
    """Spearman's rank correlation of our errors and the published ones."""
    return rank_correlation([float(row[2] or 0) for row in table.rows], [float(row[4] or 0) for row in table.rows])


def best(table: Table, column: int) -> str:
    """The formats with the smallest error in a column."""
    row = min(table.rows, key=lambda row: float(row[column] or 0))
    return f"m in {row[0]}, v in {row[1]}"


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Moments]:
    """The moments of every parameter that is large enough to be encoded."""
    return [
        Moments(name, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])
        for name, p in model.named_parameters()
        if p.numel() >= LEAST_NUMEL
    ]


def mean_table(several: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """The mean over seeds of the errors of the formats in ``NAMES``, by the paper's names."""
    return {m: {v: sum(each[NAMES[m]][NAMES[v]] for each in several) / len(several) for v in NAMES} for m in NAMES}


def state_table(mse: Mapping[str, Mapping[str, float]]) -> Table:
    """Errors as multiples of E4M3 + Expand's for both moments."""
    ours, theirs = mse["E4M3 + Expand"]["E4M3 + Expand"], PUBLISHED["E4M3 + Expand"]["E4M3 + Expand"]
    rows = []
    for m in NAMES:
        for v in NAMES:
            published = PUBLISHED.get(m, {}).get(v)
            if published is not None:
                rows.append((m, v, mse[m][v], mse[m][v] / ours, published, published / theirs))
    columns = ("m in", "v in", "MSE", "x E4M3 + Expand", "published MSE", "published x")
    return Table("Error of m / (sqrt(v) + eps), both moments encoded once", columns, tuple(rows))


def k_figures(k: Tensor, span: tuple[int, int]) -> dict[str, float]:
    """Quantiles of k over groups, and the share within ``span``."""
    quantiles = torch.quantile(k, torch.tensor([0.1, 0.5, 0.9])).tolist()
    inside = float(((k >= span[0]) & (k <= span[1])).float().mean())
    return {**dict(zip(("p10", "median", "p90"), quantiles, strict=True)), "share_in_published_span": inside}


def k_table(k: Mapping[str, Mapping[str, float]]) -> Table:
    rows = []
    for state, found in k.items():
        low, high = PUBLISHED_K[state]
        spread = f"{found['p10']:.2f} to {found['p90']:.2f}"
        rows.append((state, found["median"], spread, f"{low} to {high}", f"{found['share_in_published_span']:.0%}"))
    columns = ("state", "median k", "a tenth to nine tenths", "published, mostly", "groups within that")
    return Table("k of range expansion, with the paper's target of the whole range", columns, tuple(rows))


def codecs() -> dict[str, Codec]:
    """The ways of storing an activation that are compared."""
    found: dict[str, Codec] = {}
    for fmt in (E4M3, INT8):
        found |= {f"{fmt.name} 1x{size}": Groupwise(fmt, size) for size in GROUP_SIZES}
        found[f"{fmt.name} tensor"] = Tensorwise(fmt)
    return found


@torch.no_grad()
def activation_errors(model: nn.Module) -> dict[str, float]:
    """By way of storing: the mean over linear layers of the SQNR of their inputs, in dB."""
    inputs: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    model(next(batches(held_out_text(), 0, 1))[:, :-1])
    for hook in hooks:
        hook.remove()
    return {
        name: sum(sqnr(x, codec.decode(*codec.encode(x), x.dtype)) for x in inputs) / len(inputs)
        for name, codec in codecs().items()
    }


def activation_table(db: Mapping[str, float | None]) -> Table:
    sizes = [*(f"1x{size}" for size in GROUP_SIZES), "tensor"]
    rows = tuple((size, db[f"e4m3 {size}"], db[f"int8 {size}"], NOT_FOUND) for size in sizes)
    columns = ("elements per scale", "E4M3, dB", "INT8, dB", "published")
    return Table("Inputs of linear layers: mean SQNR by group size, BF16 scales", columns, rows)


def draw(figures: Mapping[str, Any], k: Mapping[str, Sequence[float]], path: Path) -> None:
    """Left: errors beside the published ones. Middle: k's histogram. Right: activations by group size."""
    made, grid = empty_figure(1, 3, 15, 4.6)
    left, middle, right = grid[0]
    rows = state_table(figures["mse"]).rows
    at = list(range(len(rows)))
    left.barh([i - 0.2 for i in at], [row[3] for row in rows], 0.4, color="#4477aa", label="ours")
    left.barh([i + 0.2 for i in at], [row[5] for row in rows], 0.4, color="#bbbbbb", label="published")
    left.set_yticks(at, [f"{row[0]} / {row[1]}" for row in rows], fontsize="x-small")
    left.invert_yaxis()
    left.set(xlabel="MSE of m / (sqrt(v) + eps), x E4M3 + Expand")
    for (state, values), colour in zip(k.items(), ("#4477aa", "#cc4411"), strict=True):
        middle.hist(values, bins=60, range=(0, 16), density=True, alpha=0.6, color=colour, label=state)
    middle.set(xlabel="k", ylabel="density of groups")
    for fmt, colour in (("e4m3", "#4477aa"), ("int8", "#cc4411")):
        db = [figures["activations_db"][f"{fmt} 1x{size}"] for size in GROUP_SIZES]
        right.plot(GROUP_SIZES, db, "o-", color=colour, label=fmt)
        right.axhline(figures["activations_db"][f"{fmt} tensor"], color=colour, linestyle=":", linewidth=1)
    right.set(xlabel="elements per scale (dotted: one scale)", ylabel="SQNR, dB")
    right.set_xscale("log", base=2)
    right.set_xticks(GROUP_SIZES, GROUP_SIZES)
    for axes in grid[0]:
        axes.legend(frameon=False, fontsize="small")
    made.savefig(path, dpi=110)
