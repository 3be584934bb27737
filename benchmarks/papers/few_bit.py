"""Few-Bit Backward (2202.00441) in small: derivatives of activations in 1 to 4 bits.

    errors      of our tables, found by the dynamic programme, and of the published ones; over all x, as those were made, and
                for inputs of a trained transformer of bytes
    training    the transformer with GELU's derivative from a table: held-out loss against the exact derivative's

The backward multiplies by a level of the table; the forward, and every other operation, is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.papers.outcome import NOT_FOUND, Outcome, Table, mean, with_spread
from benchmarks.papers.small_model import Block, SmallLM, batches, fit, held_out_loss, held_out_text
from fp8compile.numerics.few_bit_backward import BITS, DENSITIES, DERIVATIVES, Pieces, error_of, nbytes, pack, unpack
from fp8compile.numerics.few_bit_tables import pieces_of
from fp8compile.numerics.metrics import sqnr
from fp8compile.reporting.figure import empty_figure

LAYERS, ACTIVATION = 2, "gelu"
# The error over [-100, 100] of each table that the authors publish with their library (skolai/fewbit 0.0.1, BSD-3-Clause), in
# 1 to 4 bits: computed from its file of borders and levels by ``error_of``.
PUBLISHED: Mapping[str, tuple[float, ...]] = {
    "gelu": (0.141047, 0.0447532, 0.0119894, 0.00411389),
    "silu": (0.214978, 0.0594141, 0.0279082, 0.00538044),
    "sigmoid": (0.157294, 0.014878, 0.00330804, 0.00109735),
    "tanh": (1.2947, 0.11961, 0.02652, 0.00877707),
    "elu": (0.190254, 0.0269212, 0.00718232, 0.00160035),
    "softplus": (0.376685, 0.0610046, 0.0129552, 0.00301392),
}
SOURCES = (
    "errors: computed from the tables that the authors publish with their library (github.com/skolai/fewbit, "
    "builtin.npz); the losses and accuracies of the paper's own trainings were not found"
)


class FewBitGradient(torch.autograd.Function):
    """GELU whose backward keeps packed piece numbers instead of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pieces: Pieces) -> Tensor:
        ctx.pieces, ctx.shape = pieces, x.shape
        ctx.save_for_backward(pack(pieces.index(x.detach()), pieces.bits))
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (packed,), (grad,) = ctx.saved_tensors, grads
        index = unpack(packed, ctx.pieces.bits, ctx.shape)
        return grad * ctx.pieces.at(index, grad.dtype), None


def with_pieces(pieces: Pieces | None) -> Callable[[Tensor], Tensor]:
    """GELU, with the exact derivative or one from a table."""
    if pieces is None:
        return F.gelu
    return functools.partial(_few_bit_gelu, pieces)


def _few_bit_gelu(pieces: Pieces, x: Tensor) -> Tensor:
    y: Tensor = FewBitGradient.apply(x, pieces)  # type: ignore[no-untyped-call]
    return y


def arms() -> dict[str, Pieces | None]:
    """The derivatives that are trained with, by name."""
    found: dict[str, Pieces | None] = {"exact": None}
    for density in DENSITIES:
        found |= {f"{bits} bit, {density}": pieces_of(ACTIVATION, bits, density) for bits in BITS}
    return found


def reproduce(seeds: int, steps: int, tell: Callable[[str], None]) -> Outcome:
    """The errors of all tables, and one training for each seed and arm."""
    losses: dict[str, list[float]] = {arm: [] for arm in arms()}
    inputs: list[Tensor] = []
    for seed in range(seeds):
        for arm, pieces in arms().items():
            torch.manual_seed(seed)
            model = SmallLM(stable=False, layers=LAYERS, activation=with_pieces(pieces))
            fit(model, seed, steps)
            losses[arm].append(held_out_loss(model))
            if pieces is None:
                inputs.append(activation_inputs(model))
        tell(f"seed {seed}: " + ", ".join(f"{arm} {each[-1]:.4f}" for arm, each in losses.items()))
    figures: dict[str, Any] = {
        "errors": {name: errors_of(name) for name in DERIVATIVES},
        "published": {name: list(each) for name, each in PUBLISHED.items()},
        "losses": losses,
        "db": {arm: derivative_db(pieces, inputs) for arm, pieces in arms().items() if pieces is not None},
    }
    tables = (error_table(figures["errors"]), training_table(losses, figures["db"]))
    return Outcome(
        difference(steps), SOURCES, tables, lambda path: draw(figures, path), findings(figures, inputs), figures
    )


def difference(steps: int) -> str:
    return (
        f"a transformer of bytes of 2 layers x 128 trained from scratch for {steps} steps, where the authors' code "
        "fine-tunes RoBERTa"
    )


def errors_of(activation: str) -> list[float]:
    """Of our tables over all x, in 1 to 4 bits."""
    return [error_of(DERIVATIVES[activation], pieces_of(activation, bits, "uniform"), "uniform") for bits in BITS]


@torch.no_grad()
def activation_inputs(model: nn.Module) -> Tensor:
    """What a trained model gives its activations on held-out bytes, flat."""
    seen: list[Tensor] = []
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    hooks = [block.up.register_forward_hook(lambda _, __, out: seen.append(out.flatten())) for block in blocks]
    model(next(batches(held_out_text(), 0, 1, rows=64))[:, :-1])
    for hook in hooks:
        hook.remove()
    return torch.cat(seen)


def derivative_db(pieces: Pieces, inputs: list[Tensor]) -> float | None:
    """The SQNR of a table's derivative at these inputs, in dB: that of dx where dy is independent of x."""
    exact = DERIVATIVES[ACTIVATION]
    return mean(sqnr(exact(x), pieces.at(pieces.index(x))) for x in inputs)


def error_table(errors: Mapping[str, list[float]]) -> Table:
    rows = tuple(
        (name, bits, errors[name][i], PUBLISHED[name][i], errors[name][i] / PUBLISHED[name][i])
        for name in errors
        for i, bits in enumerate(BITS)
    )
    columns = ("activation", "bits", "error, ours", "error, published table", "ratio")
    return Table("Integral of (f' - q)^2 over [-100, 100]", columns, rows)


def training_table(losses: Mapping[str, list[float]], db: Mapping[str, float | None]) -> Table:
    exact, rows = losses["exact"], []
    for arm, each in losses.items():
        gaps = [ours / plain - 1 for ours, plain in zip(each, exact, strict=True)]
        kept = 32 if arm == "exact" else 8 * nbytes(4096, int(arm[0])) / 4096
        gap = None if arm == "exact" else with_spread(gaps, "+.2%")
        rows.append((arm, f"{kept:g}", db.get(arm), with_spread(each), gap, NOT_FOUND))
    columns = ("GELU's derivative", "bits kept", "dB at real inputs", "held-out loss", "gap to exact", "published")
    return Table("A transformer of bytes: nats per byte, mean ± standard error over seeds", columns, tuple(rows))


def findings(figures: Mapping[str, Any], inputs: list[Tensor]) -> tuple[str, ...]:
    ratios = [
        ours / theirs
        for name in PUBLISHED
        for ours, theirs in zip(figures["errors"][name], PUBLISHED[name], strict=True)
    ]
    x = torch.cat(inputs)
    return (
        f"{sum(r > 0.99 for r in ratios)} of {len(ratios)} errors are the published tables' within 1 %; the others are "
        f"{min(ratios):.2f} times theirs or more: a dynamic programme has no local minima.",
        f"GELU's inputs in the trained models: mean {float(x.mean()):.2f}, standard deviation {float(x.std()):.2f}.",
    )


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Left: GELU's derivative and its tables. Right: the gap to the exact derivative by bits."""
    made, grid = empty_figure(1, 2, 11, 4.4)
    left, right = grid[0]
    x = torch.linspace(-4, 4, 2001)
    left.plot(x, DERIVATIVES[ACTIVATION](x), color="black", linewidth=1, label="exact")
    for bits, colour in zip((1, 2, 3), ("#cc4411", "#228833", "#4477aa"), strict=True):
        pieces = pieces_of(ACTIVATION, bits)
        left.plot(x, pieces.at(pieces.index(x)), color=colour, linewidth=1, label=f"{bits} bit, normal")
    left.set(xlabel="x", ylabel="derivative of GELU")
    exact = figures["losses"]["exact"]
    for density, colour in zip(DENSITIES, ("#4477aa", "#cc4411"), strict=True):
        for i, bits in enumerate(BITS):
            gaps = [
                100 * (a / b - 1) for a, b in zip(figures["losses"][f"{bits} bit, {density}"], exact, strict=True)
            ]
            right.scatter(
                [bits] * len(gaps), gaps, 18, colour, label=f"table for {density} inputs" if not i else None
            )
    right.axhline(0, color="#777777", linewidth=1)
    right.set(xlabel="bits", ylabel="held-out loss, % above the exact derivative's", xticks=BITS)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize="small")
    made.savefig(path, dpi=110)
