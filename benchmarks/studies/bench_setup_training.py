"""The demo trained as people train: with checkpointed blocks, dropout, experts. Validation loss beside plain Inductor's.

    python benchmarks/studies/bench_setup_training.py --seeds 5 --arms "checkpointing, plain;checkpointing, ours"

    checkpointing    every block, by Transformers' own switch; ours starts a block from codes of its input
    dropout          0.1 in attention; ours draws masks again from their seeds
    experts          Mixtral's: four of them, two a token, each half as wide
    experts, nudged  plain beside plain, its embedding moved by one rounding: what two runs differ by in any case
    experts, noise   plain beside plain, every gradient with Gaussian noise of 40 dB, as large as what codes leave of the
                     experts' worst: what two runs differ by whose gradients do, whatever made the difference

Each arm has the weights, batches and rates of its twin from the same seed; products in FP32, so that nothing but what is kept
differs; storage alone, as by default on a CPU. The gap is (ours - plain) / plain of the validation loss; mean and standard
error over seeds.

Runs that the JSON already has are not run again; it is written after every run.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.studies.demo_arms import gaps_to, parse, row_of, run_compiled, shown, train
from benchmarks.studies.demo_runs import Demo
from fp8compile.extras.demo.model import Size, build_model
from fp8compile.extras.demo.results import mean_of

PLAIN, OURS, NUDGED, NOISE = "plain", "ours", "nudged", "noise"
NOISE_DB = 40.0
BESIDE_NOISE = "experts, over noise"


def checkpointed(size: Size, seed: int, device: torch.device) -> nn.Module:
    model = build_model(size, seed, device)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model.train()  # type: ignore[no-any-return]


def with_dropout(size: Size, seed: int, device: torch.device) -> nn.Module:
    model = build_model(size, seed, device).train()
    for block in model.model.layers:
        block.self_attn.attention_dropout = 0.1
    return model  # type: ignore[no-any-return]


def with_experts(size: Size, seed: int, device: torch.device) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    known = build_model(size, seed, device).config
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(known, name) for name in names}
    config = MixtralConfig(
        **sizes,
        intermediate_size=size.intermediate // 2,
        max_position_embeddings=size.length,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return MixtralForCausalLM(config).to(device)  # type: ignore[no-any-return]


def nudged(size: Size, seed: int, device: torch.device) -> nn.Module:
    """The experts' model, each weight of its embedding one step of FP32 larger."""
    model = with_experts(size, seed, device)
    weight = model.get_input_embeddings().weight.data  # type: ignore[operator]
    weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
    return model


def with_noise(size: Size, seed: int, device: torch.device) -> nn.Module:
    """The experts' model, each gradient ``NOISE_DB`` off, by noise of its own generator."""
    model = with_experts(size, seed, device)
    generator = torch.Generator(device).manual_seed(seed)

    def off(gradient: Tensor) -> Tensor:
        noise = torch.randn(gradient.shape, generator=generator, device=device)
        return gradient + noise * (gradient.square().mean().sqrt() * 10 ** (-NOISE_DB / 20))

    for parameter in model.parameters():
        parameter.register_hook(off)
    return model


CONTROLS = {NUDGED: nudged, NOISE: with_noise}
SETUPS: Mapping[str, Callable[[Size, int, torch.device], nn.Module]] = {
    "checkpointing": checkpointed,
    "dropout": with_dropout,
    "experts": with_experts,
}
ARMS = (
    *(f"{setup}, {whose}" for setup in SETUPS for whose in (PLAIN, OURS)),
    *(f"experts, {name}" for name in CONTROLS),
)


def run_arm(arm: str, seed: int, demo: Demo) -> dict[str, Any]:
    """One run, ready for JSON, with the bytes that its graphs keep for the backward."""
    setup, whose = arm.split(", ")
    build = CONTROLS.get(whose, SETUPS[setup])
    run, compiled = run_compiled(dataclasses.replace(demo, build=build), seed, {} if whose == OURS else None)
    row = row_of(run)
    if compiled is not None:
        report = fp8compile.report(compiled)
        row |= {"saved_bytes": report.saved_bytes, "saved_bytes_plain": report.saved_bytes_plain}
    return row


def summary(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of each set-up the mean gap to its twin and its standard error; of experts to noise from the same seeds, too."""
    pairs = [(arm.split(", ")[0], arm) for arm in ARMS if not arm.endswith(PLAIN)]
    means = {arm.removesuffix(f", {OURS}"): mean_of(gaps_to(f"{of}, {PLAIN}", runs, arm)) for of, arm in pairs}
    means[BESIDE_NOISE] = mean_of(gaps_to(f"experts, {NOISE}", runs, f"experts, {OURS}"))
    return {name: {"gap": m.mean, "error": m.error, "seeds": m.n} for name, m in means.items() if m is not None}


def table(found: Mapping[str, Any]) -> Table:
    """The gaps as people read them."""
    made = Table("set-up", "seeds", "gap to plain", "kept", title=f"{found['training']['steps']} steps")
    for setup, here in found["summary"].items():
        rows = found["runs"].get(f"{setup}, {OURS}", {}).values()
        kept = next((f"{row['saved_bytes'] / row['saved_bytes_plain']:.0%}" for row in rows), "")
        error = f" ± {here['error']:.2%}" if here["error"] is not None else ""
        made.add_row(setup, str(here["seeds"]), f"{here['gap']:+.2%}{error}", kept)
    return made


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    about = "Training with checkpointed blocks, dropout, experts, against plain Inductor."
    arguments = parse(words, about, "setup-training-cpu.json", ARMS, PLAIN, ";")
    return shown(train(arguments, True, run_arm, summary), table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
