"""A report that the explorer's tests share, its page, and a check of data against a JSON schema."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import Recipe
from fp8compile.reporting.report import Report


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).logsumexp(-1).mean()  # type: ignore[no-any-return]


@functools.cache
def explained(layers: int = 3) -> Report:
    """What fp8compile does to ``layers`` residual blocks and a head, its FP8 matmuls emulated."""
    torch.manual_seed(0)
    x = torch.randn(128, 64, requires_grad=True)
    return fp8compile.explain(
        Model(layers),
        (x,),
        recipe=Recipe(linears={"emulate": True, "skip": ("layers.1.down", "head")}, saved={"min_numel": 256}),
    )


def violations(value: Any, schema: Mapping[str, Any], defs: Mapping[str, Any], path: str = "$") -> Iterator[str]:
    """Where ``value`` is not as a JSON schema says, of as much of the language as ours uses."""
    if "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]]
    if "const" in schema and value != schema["const"]:
        yield f"{path} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is none of {schema['enum']}"
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float)}
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        yield f"{path} is of type {type(value).__name__}, not {schema['type']}"
        return
    if isinstance(value, dict):
        known = schema.get("properties", {})
        yield from (f"{path}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, each in value.items():
            if name in known:
                yield from violations(each, known[name], defs, f"{path}.{name}")
            elif schema.get("additionalProperties") is False:
                yield f"{path}.{name} is not in the schema"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{path} has {len(value)} items"
        first = schema.get("prefixItems", ())
        for at, each in enumerate(value):
            yield from violations(
                each, first[at] if at < len(first) else schema.get("items", {}), defs, f"{path}[{at}]"
            )
