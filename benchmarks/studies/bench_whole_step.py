"""The peak of a whole training step with its optimizer, ours over plain Inductor's: predicted, and measured small on a CPU.

    python benchmarks/studies/bench_whole_step.py --json benchmarks/results/whole-step-cpu.json
    python benchmarks/studies/bench_whole_step.py --predict "Llama-3.2-1B, 1x8192" --measure     one model; no measurements

Predicted: ``explain`` of the whole model on the meta device, in BF16, attention as on a CPU. Plain is BF16 weights with FP32
masters and moments (12 bytes a parameter); ours AdamW with ``e4m3_expanded`` moments and one byte of each weight's rest.
Measured: a Llama of the 1B model's proportions, a quarter as wide; everything allocated at the peak of forward, backward and
step, by torch.profiler, with weights and states. Plain trains FP32 weights under autocast with torch.optim.AdamW: 16 bytes a
parameter too. Linears stay in 16 bit on both sides.

What the JSON already has is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from fp8compile.reporting.memory import Fit, storage_bytes
from fp8compile.tools.step_memory import measured_peak

MASTERS_AND_MOMENTS = 12  # bytes a parameter
REST_OF_A_WEIGHT = 1  # byte a parameter
OUR_STATES = "AdamW e4m3_expanded"
CARD = 60.0  # GiB
Shape = tuple[
    int, int, int, int, int, int, bool
]  # hidden, ffn, layers, heads, heads of keys, words, head tied to embedding
MODELS: Mapping[str, tuple[Shape, tuple[int, int]]] = {
    "Llama-3.2-1B, 1x8192": ((2048, 8192, 16, 32, 8, 128256, True), (1, 8192)),
    "Llama-3-8B, 1x8192": ((4096, 14336, 32, 32, 8, 128256, False), (1, 8192)),
    "Llama-2-7B, 1x2048": ((4096, 11008, 32, 32, 32, 32000, False), (1, 2048)),
}
RECIPES: Mapping[str, dict[str, Any]] = {
    "ours": {},
    "ours, logits in chunks": {"memory.chunk_logits": "auto"},
    "ours, logits in chunks, budget 0.3": {"memory.chunk_logits": "auto", "memory": 0.3},
}
SMALL: Shape = (512, 2048, 4, 8, 2, 32064, True)
SMALL_BATCH = (1, 2048)
CHUNKS = 8  # of the small model's logits; "auto" leaves what is less than 512 MiB
PLAIN, RELEASED = "plain Inductor, AdamW", "ours, logits in chunks, by blocks, gradients released"


class Head(nn.Module):
    """The output head and the loss of the next token."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits.float(), tokens[:, 1:].flatten())


class Loss(nn.Module):
    """A Hugging Face Llama that returns its loss alone."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        hidden, ffn, layers, heads, of_keys, words, tied = shape
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=of_keys, vocab_size=words, tie_word_embeddings=tied, use_cache=False,
        )  # fmt: skip
        whole = LlamaForCausalLM(config)
        self.body, self.end = whole.model, Head(whole.lm_head)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.end(self.body(input_ids=tokens).last_hidden_state, tokens)
        return loss


def predicted(shape: Shape, batch: tuple[int, int]) -> dict[str, Any]:
    """Bytes by part for plain Inductor and for each recipe."""
    rows: dict[str, Any] = {}
    for name, recipe in RECIPES.items():
        with torch.device("meta"):
            model, tokens = Loss(shape).bfloat16(), torch.empty(batch, dtype=torch.long)
        report = fp8compile.explain(model, tokens, recipe={"linears": "off", **recipe})
        parameters = sum(p.numel() for p in model.parameters())
        (states,) = (row.states for row in report.fits().by_optimizer() if row.name == OUR_STATES)
        fit = report.fits(CARD, states=states / parameters + REST_OF_A_WEIGHT)
        if not rows:
            plain = report.fits(CARD, states=MASTERS_AND_MOMENTS)
            rows["plain"] = parts(plain, plain.activations_plain, plain.workspace_plain, plain.running_plain)
        rows[name] = parts(fit, fit.activations, fit.workspace, fit.running)
        print(name, rows[name], flush=True)
    return rows


def parts(fit: Fit, activations: int, workspace: int, running: int) -> dict[str, int]:
    """The parts of a step, and its peak with an optimizer that makes no temporaries of whole gradients.

    Logits and their gradient are part of the workspace; where they are returned or saved, of the activations. ``running`` is
    what forward and backward have alive at their most: gradients come while activations go, so it is less than their sum.
    """
    held = {"weights": fit.weights, "gradients": fit.gradients, "states": fit.states}
    peak = fit.weights + fit.buffers + fit.states + running
    return {**held, "activations": activations, "workspace": workspace, "running": running, "peak": peak}


def measured() -> dict[str, Any]:
    """Bytes at the peak of a step of the small model."""
    recipes = {name: recipe | ({"memory.chunk_logits": CHUNKS} if recipe else {}) for name, recipe in RECIPES.items()}
    return {PLAIN: _plain(), **{name: _ours(recipe) for name, recipe in recipes.items()}, RELEASED: _released()}


def _plain() -> dict[str, int]:
    model = Loss(SMALL)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(run: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = run(tokens)
        return found

    return _peak(model, torch.compile(model), optimizer, loss)


def _ours(recipe: Mapping[str, Any]) -> dict[str, int]:
    model = Loss(SMALL).bfloat16()
    optimizer = fp8compile.optim.AdamW(model, master="split")
    return _peak(model, torch.compile(model, backend="fp8compile", options=dict(recipe)), optimizer)


def _released() -> dict[str, int]:
    model = Loss(SMALL).bfloat16()
    optimizer = fp8compile.optim.AdamW(model, master="split")
    fp8compile.compile_blocks(model.body, {})
    model.end.compile(backend="fp8compile", options={"memory.chunk_logits": CHUNKS})
    optimizer.release_gradients(model)
    return _peak(model, model, optimizer)


def _peak(
    model: nn.Module,
    run: Any,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = lambda run, tokens: run(tokens),
) -> dict[str, int]:
    torch._dynamo.reset()
    tokens = torch.randint(0, SMALL[5], SMALL_BATCH)

    def step() -> None:
        loss(run, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = storage_bytes([*model.parameters(), *model.buffers()])
    states = storage_bytes(
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)
    )
    return {"weights": held, "states": states, "peak": held + states + measured_peak(step)}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--predict", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args(words)
    before = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    found: dict[str, Any] = {
        **environment(),
        "predicted": before.get("predicted", {}),
        "measured": before.get("measured", {}),
    }

    def keep() -> None:
        if arguments.json:
            write_json(arguments.json, found)

    if arguments.measure and not found["measured"]:
        found["measured"] = measured()
        keep()
    for name in arguments.predict:
        if name not in found["predicted"]:
            found["predicted"][name] = predicted(*MODELS[name])
            keep()
    print(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
