"""docs/results.md, made from the files of benchmarks/results: nothing in it is typed.

python benchmarks/results_page.py          rewrites the page
python benchmarks/results_page.py --check  exits with 1 where the page is not what this script makes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script's own folder is all that is there

from benchmarks import kernel_table, readme_tables
from benchmarks.first import lowered as first_lowered
from benchmarks.first import readings
from benchmarks.first import table as first_table
from benchmarks.harness import (
    adaptive_bits_section,
    bars_section,
    budget_section,
    compile_section,
    explorer_section,
    few_bits_section,
    first_step_section,
    fits_section,
    formats_section,
    instructions_section,
    int8_section,
    links_section,
    lowered_tables,
    ranks_section,
    reproduced_section,
    scaling_section,
    setups_section,
    step_section,
    watching_section,
)
from benchmarks.harness import measured_sections as measured
from benchmarks.harness.measured_sections import load, source, table
from benchmarks.harness.results import FOLDER, newest_on_gpu
from benchmarks.zoo import page as zoo

PAGE = Path(__file__).resolve().parents[1] / "docs/results.md"
BEGINNING = """# Results

For someone who asks how a figure was measured. This page is made by `python benchmarks/results_page.py` from the files of
`benchmarks/results`.

Figures come from CPUs (*measured*) and from [a GPU](#gpu) (*measured on a GPU*). Others come from code that was generated
for an H100 without one (*counted*), or from such counts and assumed rates (*predicted*). Saved bytes and SQNR do not
depend on the speed of a machine. Seconds do. [Numerics](numerics.md) says what the figures mean."""


def gpu(folder: Path) -> list[str]:
    told = [line for reading in reversed(readings.readings(folder)) for line in _reading(reading)]
    if newest_on_gpu(folder) is None and told:
        return told
    return [*told, readme_tables.measured(folder).replace("](benchmarks/", "](../benchmarks/")]


# By commit that a card ran: what its figures show that is mended since, by graphs lowered without a card.
MENDED_SINCE = {
    "34b1c85": "With gradient checkpointing this commit kept more than plain Inductor: FP8 matmuls were saved, not "
    "computed again.\nThey are computed again since: [lowered](#set-ups-lowered-for-an-h100), "
    "such layers keep half of plain's."
}


def _reading(reading: readings.Reading) -> list[str]:
    """Of one card at one commit; what came later may have changed what it says."""
    return [
        f"[`{reading.path.name}`](../benchmarks/results/{reading.path.name}): {reading.where}, {reading.date}.",
        "Forward and backward, unless a whole step is said.",
        "Speed is plain Inductor's fastest step over this one's. U is the layer's input in BF16.",
        "The peak of a whole step is all that is allocated; other peaks are above the weights.",
        "First steps were compiled many side by side.",
        *([MENDED_SINCE[reading.commit]] if reading.commit in MENDED_SINCE else []),
        "",
        *first_table.whole(reading.found),
    ]


def layers(folder: Path) -> list[str]:
    return [
        source(lowered_tables.LAYERS, load(folder, lowered_tables.LAYERS)),
        "Generated kernels, forward + backward, and the bytes they move against plain Inductor's.",
        "U is the layer's input in BF16.",
        '"With matmuls" adds what matmuls and attention read and write.',
        "",
        lowered_tables.layers(folder),
    ]


def depth(folder: Path) -> list[str]:
    found = load(folder, lowered_tables.DEPTH)
    few, many = found["depths"]
    return [
        source(lowered_tables.DEPTH, found),
        f"What one more layer adds, between {few} and {many} layers: generated kernels, forward + backward, and their bytes.",
        "Beside its neighbours a layer moves less than alone, plain Inductor's most of all.",
        "",
        lowered_tables.depth(folder),
    ]


def small_layer(folder: Path) -> list[str]:
    found = load(folder, "linears-sm90-lowered.json")
    case = found["case"]
    rows = [(name, *_moved(graphs, case["unit_bytes"])) for name, graphs in found["graphs"].items()]
    return [
        source("linears-sm90-lowered.json", found),
        f"A Llama layer in BF16: {case['batch']} × {case['seq']} tokens, hidden {case['hidden']}, ffn {case['ffn']}, "
        f"{case['heads']} heads.",
        "Matmuls and attention are counted.",
        "",
        *table(("recipe", "generated kernels", "bytes moved, U"), rows),
    ]


def _moved(graphs: Sequence[Mapping[str, Any]], unit: int) -> tuple[str, str]:
    kernels = " + ".join(str(len(graph["launches"])) for graph in graphs)
    return kernels, f"{sum(graph['num_bytes'] + graph['extern_bytes'] for graph in graphs) / unit:.0f}"


def observed(folder: Path) -> list[str]:
    found = load(folder, "observed-sm90-lowered.json")
    case = found["case"]
    moved = {
        name: sum(g["num_bytes"] + g["extern_bytes"] for g in graphs) for name, graphs in found["graphs"].items()
    }
    generated = {name: sum(g["num_bytes"] for g in graphs) for name, graphs in found["graphs"].items()}
    rows = [
        (name, f"{generated[name] / generated['off']:.3f} ×", f"{moved[name] / moved['off']:.3f} ×")
        for name in found["graphs"]
    ]
    return [
        source("observed-sm90-lowered.json", found),
        f"A Llama layer in FP16: {case['batch']} × {case['seq']} tokens, hidden {case['hidden']}, ffn {case['ffn']}.",
        "",
        *table(("observation", "generated bytes", "with matmuls and attention"), rows),
    ]


def optimizer_step(folder: Path) -> list[str]:
    found = load(folder, "optimizer-sm90-lowered.json")
    rows = []
    for name, case in found["cases"].items():
        timed = [each for each in case["configurations"] if each["timed"]]
        spilled = max(each["spill_bytes"] for each in timed)
        rows.append((name, str(case["kernels"]), f"{case['ratio']:.3f}", str(spilled)))
    head = ("case", "kernels", "bytes moved over the least possible", "bytes spilled")
    return [
        source("optimizer-sm90-lowered.json", found),
        "AdamW unless the case says otherwise.",
        "",
        *table(head, rows),
    ]


def predicted(folder: Path) -> list[str]:
    found = load(folder, lowered_tables.PREDICTED)
    rates = found["rates"]
    return [
        source(lowered_tables.PREDICTED, found),
        "One decoder layer of each model, with batch × sequence.",
        f"Assumed: {rates['copy']:g} TB/s, {rates['bf16']:g} TFLOP/s in BF16, {rates['fp8']:g} in FP8, "
        f"{rates['attention']:g} in attention's forward and {rates['attention_backward']:g} in its backward, "
        f"{rates['gap']:g} µs between kernels. Attention is FlashAttention-2.",
        "The second factor is with FlashAttention-3, for plain Inductor too.",
        "",
        lowered_tables.predicted(folder),
    ]


SECTIONS: Sequence[tuple[str, str, Callable[[Path], list[str]]]] = (
    ("measured", "The demo", measured.demo),
    ("measured", "Saved activations in models", measured.models),
    ("measured", "Set-ups as people have them", setups_section.setups),
    ("measured", "Training in set-ups as people have them", setups_section.training),
    ("measured", "FP8 linears in models", measured.linears),
    ("measured", "Modes of scaling", scaling_section.scaling_modes),
    ("measured", "Training in modes of scaling", scaling_section.mode_training),
    ("measured", "INT8 linears", int8_section.int8_linears),
    ("measured", "Outlier channels of SwiGLU", scaling_section.smooth_swiglu),
    ("measured", "Gradients checked", measured.checked),
    ("measured", "Size of groups", measured.group_size),
    ("measured and counted", "Formats", formats_section.formats),
    ("measured", "Few bits", few_bits_section.few_bits),
    ("measured", "Coded links of a pipeline", links_section.links),
    ("measured", "Adaptive bits", adaptive_bits_section.adaptive_bits),
    ("measured", "Memory budgets", budget_section.budgets),
    ("measured", "Will it fit: the predicted peak against the allocator's", fits_section.fits),
    ("measured", "A whole step", step_section.measured_step),
    ("measured", "A step as one graph", step_section.one_graph),
    ("measured", "Optimizer states", measured.states),
    ("measured and counted", "The first step of an optimizer", first_step_section.optimizer_first_step),
    ("measured", "Bars of optimizer states", bars_section.state_bars),
    ("measured", "Stability of 8-bit states", measured.stability),
    ("measured", "Stochastic rounding", measured.stochastic_rounding),
    ("measured", "Loss scaling", measured.loss_scaling),
    ("measured", "Published ablations in small", reproduced_section.reproduced),
    ("measured", "Several ranks", ranks_section.distributed),
    ("measured", "The zoo", zoo.section),
    ("measured", "Overflowing FP16 code", measured.islands),
    ("measured", "Operators of PyTorch", measured.operators),
    ("measured", "Compile time", compile_section.compile_time),
    ("measured", "Compile time by depth and way", compile_section.compile_depth),
    ("measured", "Compile time for an H100", compile_section.compile_lowered),
    ("measured", "The explorer's page", explorer_section.explorer),
    ("measured", "Watching a run", watching_section.watching),
    ("measured on a GPU", "GPU", gpu),
    ("predicted, and measured on a GPU where it was read", "Kernels", kernel_table.section),
    ("counted", "Layers lowered for an H100", layers),
    ("predicted", "Set-ups lowered for an H100", setups_section.lowered),
    ("counted", "One more layer, lowered for an H100", depth),
    ("counted", "A small layer lowered for an H100", small_layer),
    ("counted", "Observation lowered for an H100", observed),
    ("counted", "Optimizer step lowered for an H100", optimizer_step),
    ("predicted", "Set-ups of the H200's table, lowered", first_lowered.device_table),
    ("predicted", "Kernels read on an H200", instructions_section.kernels_read),
    ("predicted", "Instructions of an optimizer's step", instructions_section.optimizer_instructions),
    ("predicted", "Instructions of a layer's kernels", instructions_section.layer_instructions),
    ("predicted", "Step times predicted", predicted),
    ("predicted", "Peaks of a whole step predicted", step_section.predicted_step),
)


def page(folder: Path = FOLDER) -> str:
    """The whole page."""
    parts = [BEGINNING]
    for kind, title, make in SECTIONS:
        parts.append("\n".join([f"## {title}", "", f"*{kind[:1].upper()}{kind[1:]}.*", *make(folder)]))
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    new = page()
    if args.check:
        return int(PAGE.read_text() != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
