"""A name for a graph under a recipe: equal keys share compiled code *and* report, so it holds all that either depends on.

    what the graph computes     operations, arguments, inputs; of nested graphs (bodies of checkpoints, regions, branches) too
    how it is cut               the memory budget of its regions
    where it stands             module paths and source lines, because the report does; the path in the running model
    how it is compiled          our sources, the recipe, Inductor's and functorch's configuration, autocast, grad mode

The key is part of the partitioner's uuid, hence of Inductor's cache key. Inductor's own key holds its configuration as well.
The report's key must too, or a report made with a pass would be shown for a run where that pass was switched off
(``TORCHINDUCTOR_DISABLED_PASSES`` is an entry of that configuration).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fp8compile import _torch as private
from fp8compile.analysis.sensitivity.declared import declarations_key
from fp8compile.compiler.sources import sources_key
from fp8compile.fx.provenance import module_path, source_line
from fp8compile.recipe.context import Context, Place

# Left out of Inductor's portable configuration, where each pass has to identify itself.
CUSTOM_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)


def key_of(gm: GraphModule, example_inputs: Sequence[Any], ctx: Context, patches: Mapping[str, Any]) -> str:
    """The key of a Dynamo graph with these inputs, with this context and these changes to Inductor's options."""
    measures = ctx.scale_input is not None and not ctx.scale_input.known
    parts: list[str] = [
        sources_key(),
        ctx.recipe.key,
        declarations_key(),
        _place(ctx.place),
        repr(measures),
        _settings(patches),
    ]
    parts += ["measures what is saved"] if ctx.measures_saved else []
    parts += _lines(gm)
    parts += [_input(value) for value in example_inputs]
    parts += [
        repr(torch.is_grad_enabled()),
        repr(torch.is_autocast_enabled("cpu")),
        repr(torch.is_autocast_enabled("cuda")),
    ]
    text = re.sub(r" at 0x[0-9a-f]+", "", "\n".join(parts))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _place(place: Place) -> str:
    return f"{place.prefix!r} {place.core!r} {sorted(place.heads)}"


def origin_key(node: Node) -> str:
    return f"{module_path(node)} {source_line(node)}"


def _settings(patches: Mapping[str, Any]) -> str:
    inductor = {**private.inductor_config.save_config_portable(), **patches}
    custom = {name: patches.get(name, getattr(private.inductor_config, name, None)) for name in CUSTOM_PASSES}
    said = {name: _uuid(value) for name, value in {**inductor, **custom}.items()}
    functorch = private.functorch_config.save_config_portable()
    return repr(sorted(said.items())) + repr(sorted(functorch.items(), key=str))


def _uuid(value: Any) -> str:
    """The identity of a setting: a custom pass gives its own, as for Inductor's cache."""
    if isinstance(value, (list, tuple)):
        return repr([_uuid(each) for each in value])
    return repr(value.uuid()) if callable(getattr(value, "uuid", None)) else repr(value)


def _lines(gm: GraphModule, prefix: str = "") -> Iterator[str]:
    """The operations of a graph; a nested graph's operations come where that graph is used."""
    for node in gm.graph.nodes:
        target = getattr(node.target, "__qualname__", node.target)
        budget = (node.meta.get("custom") or {}).get(private.MEMORY_BUDGET)
        yield f"{prefix}{node.op} {node.name} {target} {node.args} {node.kwargs} {budget} {origin_key(node)}"
        if node.op == "get_attr":
            value = attrgetter(node.target)(gm)
            if isinstance(value, GraphModule):
                yield from _lines(value, f"{prefix}{node.target}.")
            else:
                yield f"{prefix}{node.target} {_input(value)}"


def _input(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape, stride = tuple(map(str, value.shape)), tuple(map(str, value.stride()))
        return f"{type(value).__name__} {value.dtype} {shape} {stride} {value.device} {value.requires_grad}"
    return f"{type(value).__name__} {value}"
