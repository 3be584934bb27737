"""The sections of docs/results.md about set-ups as people have them: bytes kept, gradients, training, and residual sums."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_sections import load, source, table

NAME, TRAINING, RESIDUALS = "setups-cpu.json", "setup-training-cpu.json", "residual-sizes-cpu.json"
LOWERED, ON_A_DEVICE = "setups-sm90-lowered.json", "setups-sm90-lowered-torch-2.11.json"
FOLDER = Path(__file__).resolve().parents[1] / "results"
LOGITS = "exponentiated in the backward"


def setups(folder: Path) -> list[str]:
    """A row for each set-up: bytes kept beside plain Inductor's, and the worst gradient's SQNR."""
    found = load(folder, NAME)
    rows = [
        (
            name,
            f"{here['kept'] / here['plain']:.0%}",
            f"{here['goal']:.0%}",
            *(f"{here[key]:.1f}" for key in ("twin_db", "ours_db", "fp8_db")),
            f"{here['peak_ours'] / here['peak_plain']:.0%}",
        )
        for name, here in found["rows"].items()
    ]
    over = [name for name, here in found["rows"].items() if here["kept"] > (here["goal"] + 0.005) * here["plain"]]
    lines = [
        source(NAME, found),
        "Bytes kept for the backward over plain Inductor's, and what was aimed at. The worst gradient of a parameter against",
        "float64, in dB: of the model as it is, with storage alone, with all linears in FP8 too (emulated). Small models.",
        "The peak is that of a step in generated code, over plain Inductor's: it has weights, gradients and logits too.",
        "On a CPU a codec is a call, and its result in memory: without `call_codecs` BERT's peak is 48 %.",
        "",
        *table(("set-up", "kept", "goal", "as it is", "storage", "and FP8", "peak"), rows),
    ]
    for name in over:
        here = found["rows"][name]
        logits = sum(n for label, n in here["by"].items() if label.startswith(LOGITS))
        share, rest = logits / here["plain"], (here["kept"] - logits) / (here["plain"] - logits)
        told = (
            f"{name}: the logits, which the model returns, are {100 * share:.0f} %; without them {100 * rest:.0f} %."
        )
        lines += ["", told]
    return lines


def lowered(folder: Path) -> list[str]:
    """What generated kernels of each set-up launch, move and are predicted to take, on both versions of torch."""
    found, on_a_device = load(folder, LOWERED), load(folder, ON_A_DEVICE)
    sizes = found["sizes"]
    return [
        source(LOWERED, found),
        f"{found['tokens']} tokens, hidden size {sizes['hidden']}, FFN {sizes['ffn']}, forward and backward, without a GPU.",
        "*Kernels* are launches of generated ones; *calls* are products, attention and copies. Bytes, instructions, the most",
        "registers of a thread and the predicted time are those of generated kernels alone, not of calls.",
        "",
        *_lowered_table(found),
        "",
        source(ON_A_DEVICE, on_a_device),
        "The same on the torch that GPUs were lent with.",
        "",
        *_lowered_table(on_a_device),
    ]


def _lowered_table(found: Mapping[str, Any]) -> list[str]:
    """A row for each set-up and recipe."""
    rows = [
        (
            *((name, arm) if arm == "plain" else ("", arm)),
            str(here["launches"]),
            str(here["externs"]),
            f"{here['kernel_bytes'] / 1e9:.2f}",
            f"{here['issued'] / 1e9:.1f}",
            str(here["registers"]),
            f"{here['us'] / 1e3:.2f}",
            f"{here['kept'] / 1e6:.0f}",
            f"{here['kept'] / by_arm['plain']['kept']:.0%}",
        )
        for name, by_arm in found["setups"].items()
        for arm, here in by_arm.items()
    ]
    head = (
        "set-up",
        "recipe",
        "kernels",
        "calls",
        "GB",
        "1e9 instructions",
        "registers",
        "ms",
        "kept, MB",
        "of plain",
    )
    return table(head, rows)


def training(folder: Path) -> list[str]:
    """A row for each set-up that was trained; then how far residual sums cancel."""
    found, sizes = load(folder, TRAINING), load(folder, RESIDUALS)
    rows = [(name, _gap(here), str(here["seeds"])) for name, here in found["summary"].items()]
    most = max(row["largest"] for seed in sizes["seeds"].values() for row in seed.values())
    return [
        source(TRAINING, found),
        f"The demo's model, {found['training']['steps']} steps, products in FP32, storage alone. The gap is the validation",
        "loss over that of plain Inductor, in the same set-up and from the same seed, minus 1 (mean ± standard error).",
        "*Noise* is plain beside plain whose gradients have Gaussian noise of 40 dB, the size of what codes add to the",
        "experts' worst. Experts spread by any such difference, since which expert takes a token is a step; *over noise* is",
        "ours over those runs, seed by seed.",
        "",
        *table(("set-up", "gap", "seeds"), rows),
        "",
        source(RESIDUALS, sizes),
        "A checkpointed block's second norm reads x + f(norm(x)), where the error of x counts |x| / |sum| times.",
        f"In {len(sizes['seeds'])} runs of {sizes['steps']} steps that was at most {most:.2f} in any row.",
    ]


def _gap(here: Mapping[str, Any]) -> str:
    return f"{here['gap']:+.2%}" + (f" ± {here['error']:.2%}" if here["error"] is not None else "")
