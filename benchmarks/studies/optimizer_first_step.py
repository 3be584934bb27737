"""The first step of AdamW with FP8 states, by model: seconds, what is compiled, a second process; and shape by shape.

    open    code for all shapes, as it is
    second  the same in a second process, which finds it in Inductor's cache
    sm90    its kernels lowered and assembled for an H100, without one; of BF16 parameters
    exact   code for each shape by itself, as it was before sizes were left open; only with --exact, it takes minutes

Models are configurations of transformers at their sizes; of the Llama four layers of width 1024. Nothing is trained. Every
figure is of a process of its own, with one compiling thread; the least of --times.

python benchmarks/studies/optimizer_first_step.py [--json results.json] [--exact] [--times N] [MODEL ...]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

WAYS = ("open", "second", "sm90", "exact")


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
    "ResNet-50, channels_last": lambda: resnet50().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "EfficientNet-B0": efficientnet_b0,
    "BERT-base": bert_base,
    "Llama, 4 layers": llama,
}


def parameters_of(name: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """A model's, with gradients."""
    with torch.device("meta"):
        model = MODELS[name]()
    parameters = [nn.Parameter(torch.zeros_like(p, dtype=dtype, device="cpu")) for p in model.parameters()]
    for p in parameters:
        p.grad = torch.full_like(p, 0.01)
    return parameters


@contextmanager
def counted(*functions: tuple[Any, str]) -> Iterator[list[float]]:
    """Seconds of each call of functions of modules."""
    spent: list[float] = []

    def noted(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        found = plain(*args, **options)
        spent.append(time.perf_counter() - begin)
        return found

    with ExitStack() as patches:
        for module, function in functions:
            replaced = functools.partial(noted, getattr(module, function))
            patches.enter_context(mock.patch.object(module, function, replaced))
        yield spent


def assembled(name: str) -> dict[str, Any]:
    """In this process: seconds to lower and to assemble each kernel of the step for an H100, and what a device would not ask
    for besides: the graph moved to a device that is not there, and disassembly."""
    from tests.sm90 import lowering, optimizers

    with counted((lowering, "retarget"), (optimizers, "check")) as besides:
        found = _assembled(name)
    return found | {"seconds": found["seconds"] - sum(besides), "besides": sum(besides)}


def _assembled(name: str) -> dict[str, Any]:
    from fp8compile import optim
    from fp8compile.optim import compiled_step, kernel_text
    from tests.sm90 import fake_h100, run_numbers
    from tests.sm90.measures import measured as measured_of
    from tests.sm90.optimizers import chunks_of, lowered_chunk, together

    fake_h100.install()
    compiled_step.rows_alone = lambda _: False  # as on a GPU
    chunks, _ = chunks_of(optim.AdamW(parameters_of(name, torch.bfloat16), lr=1e-3, compiled=False))
    begin, launches = time.perf_counter(), 0
    for signature, pieces in chunks:
        graph, _ = lowered_chunk((signature, pieces[:1]))
        if all(kernel_text.parsed(kernel.source) for kernel in graph.kernels.values()):
            together(graph, signature)
            launches += 1
        else:  # of one parameter
            measured_of(graph)
            launches += len(pieces)
    run_numbers.lowered("AdamW", None)
    return {"seconds": time.perf_counter() - begin, "launches": launches}


def first_step(name: str, exact: bool) -> dict[str, Any]:
    """In this process: seconds of the first step, without those of the second; kinds of code."""
    import fp8compile
    from fp8compile.optim import compiled_step, open_sizes

    if exact:
        compiled_step.opened = lambda tensors, **_: (open_sizes.closed(tensors), {})
    parameters = parameters_of(name, torch.float32)
    optimizer = fp8compile.optim.AdamW(parameters, lr=1e-3)
    spent = []
    for _ in range(2):
        begin = time.perf_counter()
        optimizer.step()
        spent.append(time.perf_counter() - begin)
    shapes = {p.shape for p in parameters}
    counted = {"parameters": len(parameters), "shapes": len(shapes), "compiled": len(compiled_step.COMPILED)}
    return {"seconds": spent[0] - spent[1], "steady": spent[1], **counted}


def least(name: str, ways: Sequence[str], times: int) -> dict[str, Any]:
    """Of each way the run that took least."""
    rows = [measured(name, ways) for _ in range(times)]
    return {"model": name} | {way: min((row[way] for row in rows), key=lambda run: run["seconds"]) for way in ways}


def measured(name: str, ways: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ways:
            cache = str(Path(folder) / ("open" if way == "second" else way))
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
    ours = row["open"]
    seconds = (f"{row[way]['seconds']:.1f}" if way in row else "-" for way in WAYS)
    return f"{row['model']}: {ours['parameters']} parameters, {ours['shapes']} shapes; s: {', '.join(seconds)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--times", type=int, default=1, metavar="N")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        [name] = options.models
        print(json.dumps(assembled(name) if options.one == "sm90" else first_step(name, options.one == "exact")))
        return
    print(", ".join(WAYS))
    what = "the first step of AdamW, e4m3_expanded, on a CPU, and lowered for sm_90; one compiling thread"
    found: dict[str, Any] = {
        "what": what,
        "versions": {"torch": torch.__version__, "cores": os.cpu_count()},
        "rows": [],
    }
    for name in options.models:
        found["rows"].append(least(name, WAYS if options.exact else WAYS[:-1], options.times))
        print(line(found["rows"][-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
