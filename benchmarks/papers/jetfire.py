"""Jetfire (2403.12422) in small: INT8 operands of linear layers in 32 x 32 blocks, per row or per tensor; E4M3 beside them.

    y = Q(x) Q(w)^T     dx = Q(g) Q(w)     dw = Q(g)^T Q(x)

Emulated: operands are encoded and decoded, products are FP32. A row lies along the contracted dimension of its product, so
that per-row scales could leave the product; a square block serves both orientations, which is what it is for.

    errors      of operands and of the three products, on trained transformers of bytes, as they are and with two
                channels of every norm 20 times as large, as large language models have them
    training    the transformer with such linear layers (the head is exact): held-out loss
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.papers.outcome import NOT_FOUND, Outcome, Table, draw_gaps, mean, with_spread
from benchmarks.papers.small_model import HIDDEN, SmallLM, batches, fit, held_out_loss, held_out_text, loss_of
from fp8compile.numerics.blocks import Blocks
from fp8compile.numerics.codecs import Codec, Rowwise, Tensorwise
from fp8compile.numerics.formats import E4M3, INT8
from fp8compile.numerics.metrics import sqnr
from fp8compile.reporting.figure import empty_figure

LAYERS, BLOCK = 2, 32
OUTLIERS, FACTOR = (10, 70), 20.0
WAYS: Mapping[str, Codec] = {
    "INT8 32x32": Blocks(INT8, BLOCK, BLOCK),
    "INT8 per row": Rowwise(INT8),
    "INT8 per tensor": Tensorwise(INT8),
    "E4M3 32x32": Blocks(E4M3, BLOCK, BLOCK),
    "E4M3 per row": Rowwise(E4M3),
    "E4M3 per tensor": Tensorwise(E4M3),
}
PARTS = ("x", "w", "g", "y", "dx", "dw")
SOURCES = (
    "the abstract: accuracy comparable to FP16's, 1.42 times faster and 1.49 times less memory for a transformer block; the "
    "accuracies of single granularities were not found"
)


def there_and_back(codec: Codec, x: Tensor) -> Tensor:
    """A matrix as its codes stand for it, contiguous."""
    codes, inv_scale = codec.encode(x.contiguous())
    return codec.decode(codes, inv_scale, x.dtype)


def product(codec: Codec, a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """``a @ b.T`` of encoded operands, ``[M, N]``."""
    return there_and_back(codec, a_MK) @ there_and_back(codec, b_NK).T


class EncodedLinear(nn.Linear):
    """A linear layer whose three products have encoded operands."""

    def __init__(self, inside: int, outside: int, codec: Codec) -> None:
        super().__init__(inside, outside)
        self.codec = codec

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = _Products.apply(input.flatten(0, -2), self.weight, self.codec)  # type: ignore[no-untyped-call]
        return y.view(*input.shape[:-1], -1) + self.bias


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, codec: Codec) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.codec = codec
        return product(codec, x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, w), (g,) = ctx.saved_tensors, grads
        return product(ctx.codec, g, w.T), product(ctx.codec, g.T, x.T), None


def reproduce(seeds: int, steps: int, tell: Callable[[str], None]) -> Outcome:
    """Errors on the exactly trained models, and a training for each seed and way."""
    losses: dict[str, list[float]] = {way: [] for way in ("exact", *WAYS)}
    errors: dict[str, list[dict[str, dict[str, float]]]] = {"as trained": [], "with outliers": []}
    for seed in range(seeds):
        for way, each in losses.items():
            torch.manual_seed(seed)
            linear = functools.partial(EncodedLinear, codec=WAYS[way]) if way in WAYS else nn.Linear
            model = SmallLM(stable=False, layers=LAYERS, linear=linear)
            fit(model, seed, steps)
            each.append(held_out_loss(model))
            if way == "exact":
                errors["as trained"].append(errors_of(model, seed))
                errors["with outliers"].append(errors_of(with_outliers(model), seed))
        tell(f"seed {seed}: " + ", ".join(f"{way} {each[-1]:.4f}" for way, each in losses.items()))
    db = {
        kind: {way: {part: mean(e[way][part] for e in several) for part in PARTS} for way in WAYS}
        for kind, several in errors.items()
    }
    figures: dict[str, Any] = {"db": db, "losses": losses}
    tables = (*(error_table(kind, each) for kind, each in db.items()), training_table(losses))
    return Outcome(difference(steps), SOURCES, tables, lambda path: draw(figures, path), findings(db), figures)


def difference(steps: int) -> str:
    return (
        f"a transformer of bytes of 2 layers x 128, {steps} steps, operands of linear layers alone, rounded to nearest; the "
        "paper's data flow is INT8 between all operations, on translation, image and language models"
    )


@torch.no_grad()
def with_outliers(model: nn.Module) -> nn.Module:
    """A copy whose norms make two channels large."""
    model = copy.deepcopy(model)
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm) and m.weight.numel() == HIDDEN):
        norm.weight[list(OUTLIERS)] *= FACTOR
    return model


def operands(model: nn.Module, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """x, w and g of each linear layer but the head, from a held-out batch."""
    inputs: list[tuple[nn.Linear, Tensor]] = []
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        inputs.append((module, args[0].detach().flatten(0, -2)))
        outputs.append(out)

    layers = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "head"]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    loss = loss_of(model, next(batches(held_out_text(), seed, 1)))
    for hook in hooks:
        hook.remove()
    grads = torch.autograd.grad(loss, outputs)
    return [(x, layer.weight.detach(), g.flatten(0, -2)) for (layer, x), g in zip(inputs, grads, strict=True)]


def errors_of(model: nn.Module, seed: int) -> dict[str, dict[str, float]]:
    """By way: the mean SQNR over layers of each operand, in its forward orientation, and of each product, in dB."""
    each = operands(model, seed)
    found = {}
    for way, codec in WAYS.items():
        rows = [_errors(codec, *operand) for operand in each]
        found[way] = {part: sum(row[part] for row in rows) / len(rows) for part in PARTS}
    return found


def _errors(codec: Codec, x: Tensor, w: Tensor, g: Tensor) -> dict[str, float]:
    of_operands = {name: sqnr(t, there_and_back(codec, t)) for name, t in (("x", x), ("w", w), ("g", g))}
    products = {"y": (x, w), "dx": (g, w.T), "dw": (g.T, x.T)}
    return of_operands | {name: sqnr(a @ b.T, product(codec, a, b)) for name, (a, b) in products.items()}


def error_table(kind: str, db: Mapping[str, Mapping[str, float | None]]) -> Table:
    rows = tuple((way, *(each[part] for part in PARTS)) for way, each in db.items())
    columns = ("operands in", "x", "w", "g", "y = x w", "dx = g w", "dw = g x")
    return Table(f"Mean SQNR over linear layers, dB; trained model, {kind}", columns, rows)


def training_table(losses: Mapping[str, Sequence[float]]) -> Table:
    rows = []
    for way, each in losses.items():
        gaps = [a / b - 1 for a, b in zip(each, losses["exact"], strict=True)]
        rows.append((way, with_spread(each), None if way == "exact" else with_spread(gaps, "+.2%"), NOT_FOUND))
    columns = ("operands in", "held-out loss", "gap to FP32", "published")
    return Table("Training: nats per byte, mean ± standard error over seeds", columns, tuple(rows))


def findings(db: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> tuple[str, ...]:
    """Blocks against rows and one scale, for the weakest product."""
    lines = []
    for kind, by_way in db.items():
        worst = {way: min(each[part] or 0.0 for part in ("y", "dx", "dw")) for way, each in by_way.items()}
        said = ", ".join(f"{way} {value:.1f}" for way, value in worst.items())
        lines.append(f"Weakest of the three products, {kind}, dB: {said}.")
    return tuple(lines)


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Left, middle: SQNR of products. Right: the gap of each training."""
    made, grid = empty_figure(1, 3, 15, 4.4)
    *errors, right = grid[0]
    for axes, (kind, db) in zip(errors, figures["db"].items(), strict=True):
        for k, (part, colour) in enumerate(zip(("y", "dx", "dw"), ("#4477aa", "#228833", "#cc4411"), strict=True)):
            axes.bar(
                [i + 0.27 * (k - 1) for i in range(len(WAYS))],
                [db[w][part] for w in WAYS],
                0.27,
                color=colour,
                label=part,
            )
        axes.set_xticks(range(len(WAYS)), WAYS, rotation=25, ha="right", fontsize="small")
        axes.set(ylabel="SQNR, dB", title=kind)
    errors[0].legend(frameon=False, fontsize="small")
    draw_gaps(right, figures["losses"], list(WAYS))
    made.savefig(path, dpi=110)
