"""The first step of AdamW with FP8 states, by model: seconds, what is compiled, a second process; and shape by shape.

    open    code for all shapes, as it is
    second  the same in a second process, which finds it in Inductor's cache
    exact   code for each shape by itself, as it was before sizes were left open

Models are configurations of transformers at their sizes; of the Llama four layers of width 1024. Nothing is trained. Every
figure is of a process of its own, with one compiling thread.

python benchmarks/studies/optimizer_first_step.py [--json results.json] [MODEL ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

WAYS = ("open", "second", "exact")


def resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


def efficientnet_b0() -> nn.Module:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, num_labels=1000)
    return EfficientNetForImageClassification(config)


def bert_base() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig())


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": resnet50,
    "EfficientNet-B0": efficientnet_b0,
    "BERT-base": bert_base,
    "Llama, 4 layers": llama,
}


def first_step(name: str, exact: bool) -> dict[str, Any]:
    """In this process: seconds of the first step, without those of the second; kinds of code."""
    import fp8compile
    from fp8compile.optim import compiled_step, open_sizes

    if exact:
        compiled_step.opened = lambda tensors, **_: (open_sizes.closed(tensors), {})
    with torch.device("meta"):
        shapes = [p.shape for p in MODELS[name]().parameters()]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for p in parameters:
        p.grad = torch.full_like(p, 0.01)
    optimizer = fp8compile.optim.AdamW(parameters, lr=1e-3)
    spent = []
    for _ in range(2):
        begin = time.perf_counter()
        optimizer.step()
        spent.append(time.perf_counter() - begin)
    counted = {"parameters": len(shapes), "shapes": len({*shapes}), "compiled": len(compiled_step.COMPILED)}
    return {"seconds": spent[0] - spent[1], "steady": spent[1], **counted}


def measured(name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            cache = str(Path(folder) / ("exact" if way == "exact" else "open"))
            env = os.environ | {
                "TORCHINDUCTOR_CACHE_DIR": cache,
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            command = [sys.executable, __file__, "--one", way, name]
            told = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
            row[way] = json.loads(told.splitlines()[-1])
    return row


def line(row: dict[str, Any]) -> str:
    ours, exact = row["open"], row["exact"]
    counts = (ours["parameters"], ours["shapes"], exact["compiled"], ours["compiled"])
    seconds = (f"{row[way]['seconds']:.1f}" for way in ("exact", "open", "second"))
    return f"| {row['model']} | {' | '.join(map(str, counts))} | {' | '.join(seconds)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(first_step(options.models[0], options.one == "exact")))
        return
    print(
        "| model | parameters | shapes | compiled, each shape | compiled | seconds, each shape | seconds | second process |"
    )
    rows = []
    for name in options.models:
        rows.append(measured(name))
        print(line(rows[-1]), flush=True)
    if options.json:
        what = "the first step of AdamW, e4m3_expanded, FP32 parameters on a CPU; one compiling thread"
        versions = {"torch": torch.__version__, "cores": os.cpu_count()}
        options.json.write_text(json.dumps({"what": what, "versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
