"""GACT (2206.11357) in small: activations in 2 to 8 bits, the same for all tensors or adaptive within equal bytes.

    uniform     all saved tensors in 8, 6 ... 2 bits; ActNN's and GACT's stochastic rounding, and our dither
    adaptive    bits by tensor: sensitivity of the gradient to each one, measured, and the exact knapsack (``saved.bits``)

The error is |g - g'|^2 of all gradients together, in dB below |g|^2; training compares held-out losses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.papers.outcome import Outcome, Table, draw_gaps, mean, with_spread
from benchmarks.papers.saved_bits import SavedTensors, choose_bits, nbytes, noise
from benchmarks.papers.small_model import SmallLM, batches, fit, held_out_loss, held_out_text, loss_of
from fp8compile.numerics.few_bits import BITS
from fp8compile.numerics.metrics import power, sqnr
from fp8compile.reporting.figure import empty_figure

LAYERS, PROBE_BITS = 2, 4
ADAPTIVE = (2.5, 3.0, 4.0)  # the uniform bits whose bytes are the budget; 2.5: halfway between those of 2 and 3
TRAINED = (4, 3, 2)
SOURCES = "the abstract: activations take up to 8.1 times less memory; errors and accuracies by bits were not found"
FULL_BITS = 32


def reproduce(seeds: int, steps: int, tell: Callable[[str], None]) -> Outcome:
    """Errors on trained models, then trainings in few bits."""
    losses: dict[str, list[float]] = {}
    errors: list[dict[str, float]] = []
    chosen: list[dict[str, tuple[int, ...]]] = []
    for seed in range(seeds):
        model = _trained(seed, steps, None)
        losses.setdefault("exact", []).append(held_out_loss(model))
        found, bits, shapes = errors_of(model, seed)
        errors.append(found)
        chosen.append(bits)
        arms = {f"{b} bits": (b,) * len(shapes) for b in TRAINED}
        arms |= {named(b): bits[named(b)] for b in ADAPTIVE[:2]}
        for arm, each in arms.items():
            losses.setdefault(arm, []).append(held_out_loss(_trained(seed, steps, each)))
        tell(f"seed {seed}: " + ", ".join(f"{arm} {each[-1]:.4f}" for arm, each in losses.items()))
    db = {name: mean(each[name] for each in errors) for name in errors[0]}
    per_element = {name: bits_per_element(name, chosen, shapes) for name in db}
    figures: dict[str, Any] = {
        "gradient_db": db,
        "bits_per_element": per_element,
        "chosen": [{name: list(each) for name, each in by_arm.items()} for by_arm in chosen],
        "losses": losses,
    }
    tables = (error_table(db, per_element), training_table(losses))
    return Outcome(
        difference(steps), SOURCES, tables, lambda path: draw(figures, path), findings(db, chosen), figures
    )


def difference(steps: int) -> str:
    return (
        f"a transformer of bytes of 2 layers x 128, {steps} steps, every tensor of autograd's in groups of 128 with 4 bytes "
        "of metadata; bits are chosen once, on the trained model, where the paper chooses them again as it trains"
    )


def _trained(seed: int, steps: int, bits: Sequence[int] | None) -> nn.Module:
    """A model trained from a seed; ``bits`` of what it saves, None: exact."""
    torch.manual_seed(seed)
    model = SmallLM(stable=False, layers=LAYERS)
    if bits is None:
        fit(model, seed, steps)
    else:
        with SavedTensors(model, dict(enumerate(bits))).encoding():
            fit(model, seed, steps)
    return model


def gradient_of(model: nn.Module, tokens: Tensor, saved: SavedTensors) -> Tensor:
    """All gradients of a step, one after the other."""
    with saved.encoding():
        loss = loss_of(model, tokens)
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in found])


def errors_of(
    model: nn.Module, seed: int
) -> tuple[dict[str, float], dict[str, tuple[int, ...]], list[tuple[int, ...]]]:
    """Gradient SQNR by way of storing; the bits that adaptive ways chose; the elements of each saved tensor."""
    tokens = next(batches(held_out_text(), seed, 1))
    whole = SavedTensors(model, {})
    exact = gradient_of(model, tokens, whole)
    shapes = list(whole.shapes)

    def db(bits: Mapping[int, int], rounding: str = "stochastic") -> float:
        return sqnr(exact, gradient_of(model, tokens, SavedTensors(model, bits, rounding)))

    every = range(len(shapes))
    found = {"8 bits": db(dict.fromkeys(every, 8))}
    for bits in reversed(BITS):
        found[f"{bits} bits"] = db(dict.fromkeys(every, bits))
        found[f"{bits} bits, dithered"] = db(dict.fromkeys(every, bits), "dithered")
    sensitivities = [_sensitivity(model, tokens, exact, i) for i in every]
    chosen = {}
    for budget in ADAPTIVE:
        chosen[named(budget)] = choose_bits(sensitivities, shapes, budget_of(shapes, budget))
        found[named(budget)] = db(dict(enumerate(chosen[named(budget)])))
    return found, chosen, shapes


def named(bits: float) -> str:
    """The arm whose bits are adaptive within the bytes of so many."""
    return f"adaptive, {bits:g} bits"


def budget_of(shapes: Sequence[Sequence[int]], bits: float) -> int:
    """The bytes of these bits for all tensors; of a half, the mean of those below and above."""
    below, above = (sum(nbytes(shape, each) for shape in shapes) for each in (math.floor(bits), math.ceil(bits)))
    return (below + above) // 2


def _sensitivity(model: nn.Module, tokens: Tensor, exact: Tensor, number: int) -> float:
    """The gradient's squared error from one tensor alone, per unit of noise."""
    off = gradient_of(model, tokens, SavedTensors(model, {number: PROBE_BITS})) - exact
    return power(off) / noise(PROBE_BITS)


def bits_per_element(
    name: str, chosen: Sequence[Mapping[str, Sequence[int]]], shapes: Sequence[Sequence[int]]
) -> float:
    """Metadata included; the mean over seeds of adaptive ones."""
    each = [by_arm[name] for by_arm in chosen] if name in chosen[0] else [[int(name[0])] * len(shapes)]
    taken = [sum(nbytes(n, b) for n, b in zip(shapes, bits, strict=True)) for bits in each]
    return 8 * sum(taken) / len(taken) / sum(map(math.prod, shapes))


def error_table(db: Mapping[str, float | None], per_element: Mapping[str, float]) -> Table:
    rows = []
    for name, value in db.items():
        rows.append((name, per_element[name], FULL_BITS / per_element[name], value))
    columns = ("saved tensors in", "bits per element", "times less than FP32", "gradient, dB")
    return Table("Error of the gradient of trained models, stochastic rounding or dithered", columns, tuple(rows))


def training_table(losses: Mapping[str, Sequence[float]]) -> Table:
    rows = []
    for arm, each in losses.items():
        gaps = [a / b - 1 for a, b in zip(each, losses["exact"], strict=True)]
        rows.append((arm, with_spread(each), None if arm == "exact" else with_spread(gaps, "+.2%")))
    columns = ("saved tensors in", "held-out loss", "gap to exact")
    return Table("Training: nats per byte, mean ± standard error over seeds", columns, tuple(rows))


def findings(db: Mapping[str, float | None], chosen: Sequence[Mapping[str, Sequence[int]]]) -> tuple[str, ...]:
    """Adaptive against uniform at equal bytes, and what was chosen."""
    lines = []
    for bits in ADAPTIVE:
        name, plain = named(bits), f"{math.ceil(bits)} bits"
        ours, uniform = db[name] or 0.0, db[plain] or 0.0
        counts = Counter(b for by_arm in chosen for b in by_arm[name])
        mix = ", ".join(f"{counts[b]} x {b}" for b in sorted(counts))
        lines.append(
            f"Adaptive within {bits:g} bits: {ours - uniform:+.1f} dB against {plain} for all (chosen: {mix})."
        )
    return tuple(lines)


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Left: gradient error by bits per element. Right: the gap of each training."""
    made, grid = empty_figure(1, 2, 11, 4.4)
    left, right = grid[0]
    db, per_element = figures["gradient_db"], figures["bits_per_element"]
    for kind, colour, names in (
        ("stochastic", "#cc4411", [n for n in db if n.endswith("bits") and n[0].isdigit()]),
        ("dithered", "#4477aa", [n for n in db if n.endswith("dithered")]),
        ("adaptive, stochastic", "#228833", [n for n in db if n.startswith("adaptive")]),
    ):
        points = sorted((per_element[n], db[n]) for n in names)
        left.plot(*zip(*points, strict=True), "o-", color=colour, label=kind)
    left.set(xlabel="bits per element, metadata included", ylabel="gradient SQNR, dB")
    left.legend(frameon=False, fontsize="small")
    draw_gaps(right, figures["losses"], [arm for arm in figures["losses"] if arm != "exact"])
    made.savefig(path, dpi=110)
