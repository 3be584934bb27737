"""Two checkouts held against each other: gradients and updates to the bit, bytes saved, entries of the report.

    python benchmarks/studies/same_numbers.py OTHER [CASE ...]

For a change that is to change nothing. Each checkout runs every case in a process of its own, with its own ``fp8compile``
and ``passes``, the rewritten graphs node by node. Exits 1 where a case differs.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parents[2]
ROWS, WIDTH, TOKENS = 64, 64, 128
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
Case = Callable[[], dict[str, Any]]


def use(checkout: Path) -> None:
    """Import ``fp8compile`` and its passes from there, whatever is installed."""
    import importlib.util

    sys.path.insert(0, str(checkout))
    import fp8compile  # noqa: F401

    folder = checkout / "passes"
    spec = importlib.util.spec_from_file_location(
        "fp8compile.passes", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    module = sys.modules["fp8compile.passes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def digest(tensors: Iterable[Tensor | None]) -> str:
    """Of the bits of tensors."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(b"none" if t is None else t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def told(compiled: Any) -> dict[str, Any]:
    """What the report says, in numbers."""
    import fp8compile

    graphs = json.loads(fp8compile.report(compiled).to_json())["graphs"]
    entries = [{name: len(of) for name, of in graph["notes"].items() if isinstance(of, list)} for graph in graphs]
    return {"saved": [graph["saved_bytes"] for graph in graphs], "entries": entries}


def trained(model: nn.Module, inputs: dict[str, Any] | Tensor, steps: int = 2, **options: Any) -> dict[str, Any]:
    """Gradients of some steps of plain SGD."""
    compiled: Any = torch.compile(
        model, backend="fp8compile", options={"debug.codegen": "eager", "saved.min_numel": 256, **options}
    )
    seen = []
    for _ in range(steps):
        out = compiled(**inputs) if isinstance(inputs, dict) else compiled(inputs)
        loss = out.loss if hasattr(out, "loss") else out.float().square().mean()
        model.zero_grad()
        loss.backward()
        seen.append(digest([loss, *(p.grad for p in model.parameters())]))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
    return {"bits": seen, **told(compiled)}


def ids() -> dict[str, Tensor]:
    tokens = torch.randint(0, 128, (2, TOKENS))
    return {"input_ids": tokens, "labels": tokens}


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=128, num_key_value_heads=2)).to(dtype)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL, intermediate_size=128)).train()


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SMALL, intermediate_size=128, num_key_value_heads=2, num_local_experts=4)
    return MixtralForCausalLM(config)


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    model = ViTForImageClassification(ViTConfig(**sizes, intermediate_size=128, image_size=32, patch_size=4))
    return model, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 0, 1])}


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(**sizes)).train()
    return model, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 0, 1])}


class Islands(nn.Module):
    """Whose squares overflow FP16."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * 300
        return self.down(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6))  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.LayerNorm(4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))


def whole_step() -> dict[str, Any]:
    import fp8compile

    model = mlp()
    optimizer = fp8compile.optim.AdamW(model, lr=1e-2)
    recipe = fp8compile.Recipe(debug={"codegen": "eager"}, linears={"emulate": True}, saved={"min_numel": 256})
    step = fp8compile.train_step(model, lambda net, x: net(x).square().mean(), optimizer, recipe=recipe)
    losses = [step(torch.randn(ROWS, WIDTH)) for _ in range(3)]
    return {"bits": [digest([*losses, *model.parameters()])]}


def optimizers() -> dict[str, Any]:
    import fp8compile

    found = []
    for make in (
        lambda ps: fp8compile.optim.AdamW(ps, lr=1e-2, compiled=False),
        lambda ps: fp8compile.optim.compress(torch.optim.NAdam(ps, lr=1e-2), compiled=False),
    ):
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.randn(24, 256)), nn.Parameter(torch.randn(300).bfloat16())]
        optimizer = make(parameters)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn_like(p)
            optimizer.step()
        found.append(digest(parameters))
    return {"bits": found}


CASES: dict[str, Case] = {
    "llama": lambda: trained(llama(torch.bfloat16), ids()),
    "llama, FP8 linears": lambda: trained(llama(torch.bfloat16), ids(), **{"linears.emulate": True}),
    "llama, delayed, cached": lambda: trained(
        llama(torch.bfloat16),
        ids(),
        **{"linears.emulate": True, "linears.scaling": "delayed", "linears.cache_weights": True},
    ),
    "llama, blocks": lambda: trained(llama(), ids(), linears="blockwise", **{"linears.emulate": True}),
    "llama, INT8": lambda: trained(llama(), ids(), linears="int8", **{"linears.emulate": True}),
    "llama, smoothed": lambda: trained(
        llama(torch.bfloat16), ids(), **{"linears.emulate": True, "linears.smooth_swiglu": True}
    ),
    "llama, 4 bits": lambda: trained(llama(), ids(), saved="4bit"),
    "llama, a budget": lambda: trained(llama(torch.bfloat16), ids(), memory=0.5),
    "llama, offloaded": lambda: trained(llama(torch.bfloat16), ids(), **{"memory.offload": "all"}),
    "llama, chunked logits": lambda: trained(llama(), ids(), **{"memory.chunk_logits": 4}),
    "bert": lambda: trained(bert(), ids(), **{"linears.emulate": True}),
    "mixtral": lambda: trained(mixtral(), ids(), **{"linears.emulate": True}),
    "vit": lambda: trained(*vit(), **{"linears.emulate": True}),
    "resnet": lambda: trained(*resnet()),
    "islands": lambda: trained(Islands().half(), torch.randn(ROWS, WIDTH).half()),
    "a whole step": whole_step,
    "two optimizers": optimizers,
}


def outcomes(checkout: Path, names: list[str]) -> dict[str, Any]:
    """What a checkout makes of the cases."""
    command = [sys.executable, str(Path(__file__).resolve()), "--run", str(checkout), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def run(checkout: Path, names: list[str]) -> None:
    use(checkout)
    found = {}
    for name in names or CASES:
        torch.manual_seed(0)
        torch._dynamo.reset()
        found[name] = CASES[name]()
    print(json.dumps(found))


def main(arguments: list[str]) -> int:
    if arguments[0] == "--run":
        run(Path(arguments[1]), arguments[2:])
        return 0
    other, names = Path(arguments[0]).resolve(), arguments[1:]
    mine, theirs = outcomes(HERE, names), outcomes(other, names)
    for name, found in mine.items():
        parts = [part for part in found if found[part] != theirs[name][part]]
        print(f"{name:24} {'equal' if not parts else 'differs in ' + ', '.join(parts)}")
    return int(mine != theirs)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1:]))
