"""Compile a model block by block, in place: blocks that are alike are compiled once, however many there are.

The compile time of a whole model grows with its depth. Block by block it is that of one block, since Dynamo treats
parameters as inputs: what it compiled for the first block serves all that have the same code and shapes.

    alike     the same class, and parameters and buffers of the same names, shapes and dtypes
    a block   a child, with children of its own, of a ModuleList, Sequential or ModuleDict; of a class of which two are alike

Found from the top: what lies in a block is part of it. What lies outside of all blocks (embeddings, the last norm, the output
head, the loss) runs as it is, and is listed.

torch.nn's own layers (``nn.TransformerEncoderLayer``) are no blocks: compiled in place, Dynamo skips their forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8compile import _torch as private
from fp8compile._messages import nearest
from fp8compile.fx.provenance import module_names, without_wrappers
from fp8compile.recipe.from_file import recipe_of
from fp8compile.reporting.layers import LayerRow, collapsed
from fp8compile.tools.trial_step import check_is_module

CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
WHOLE = 'compile it whole: model.compile(backend="fp8compile")'


@dataclass(frozen=True)
class CompiledBlocks:
    """What ``compile_blocks`` did.

    Attributes:
        paths: the blocks, in the order of ``named_modules``.
        kinds: how many of them are not alike, which is how many compilations they take at least.
        outside: modules with parameters of their own that are in no block and run as they are.
    """

    paths: tuple[str, ...]
    kinds: int
    outside: tuple[str, ...]

    def __str__(self) -> str:
        kinds = f"{self.kinds} kind{'s' * (self.kinds != 1)}"
        said = f"{len(self.paths)} blocks of {kinds} compiled: {_listed(self.paths)}"
        return f"{said}. Outside of them, as they are: {_listed(self.outside)}" if self.outside else said


def compile_blocks(
    model: nn.Module,
    options: Mapping[str, Any] | None = None,
    *,
    blocks: str | Sequence[str] | None = None,
    **arguments: Any,
) -> CompiledBlocks:
    """Call ``block.compile(backend="fp8compile", options=options)`` for each block of a model.

    Paths in reports and in ``Recipe.modules`` begin at the model, and output heads are known, as if it were compiled whole.
    Where the recipe, an attribute that the forward reads, or a shape differs between alike blocks, Dynamo compiles once for
    each difference. So that none of them ends in plain eager, ``recompile_limit`` is the number of blocks if that is more
    than Dynamo's own, where this torch has that argument.

    Args:
        model: not compiled itself.
        options: a recipe's fields, as for ``torch.compile``.
        blocks: paths of modules, where ``*`` stands for anything but a dot: ``"layers.*"``; None finds them.
        arguments: others of ``torch.compile``: ``mode``, ``dynamic``, ``fullgraph``.

    Returns:
        The blocks, and what is outside of them. Its text says both.

    Raises:
        ValueError: no module; compiled already, itself or a block; no two blocks alike; a pattern without a module; modules
            of patterns that lie in one another or that Dynamo skips; ``backend`` given.
    """
    check_is_module(model, "compile_blocks")
    if "backend" in arguments:
        raise ValueError("compile_blocks: the backend is fp8compile; leave backend= out")
    recipe_of(options)  # what is wrong in it is said now, and not at the first call
    _refuse_compiled(model, model)
    chosen = (
        _found(model) if blocks is None else _named(model, (blocks,) if isinstance(blocks, str) else tuple(blocks))
    )
    for module in chosen.values():
        _refuse_compiled(model, module)
    limit = private.dynamo_config.recompile_limit
    if private.HAS_REGIONS and len(chosen) > limit:
        arguments = {"recompile_limit": len(chosen), **arguments}
    for module in chosen.values():
        module.compile(backend="fp8compile", options=None if options is None else dict(options), **arguments)
    return CompiledBlocks(tuple(chosen), len({_signature(m) for m in chosen.values()}), _outside(model, chosen))


def _found(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks by path; see the top of this file."""
    alike = Counter(_signature(child) for child in _candidates(model))
    kinds = {signature[0] for signature, count in alike.items() if count > 1}
    found = dict(_topmost("", model, kinds))
    if not found:
        raise ValueError(f"compile_blocks: {_why_none(model)}; {WHOLE}, or name blocks=")
    return found


def _candidates(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, CONTAINERS):
            yield from filter(_may_be_a_block, module.children())


def _may_be_a_block(module: nn.Module) -> bool:
    has_parts = any(True for _ in module.children()) and any(True for _ in module.parameters())
    return has_parts and not _is_skipped(module)


def _is_skipped(module: nn.Module) -> bool:
    """Whether Dynamo skips its forward where it is compiled in place: one that torch.nn defines."""
    return type(module).forward.__module__.startswith("torch.nn.")


def _topmost(path: str, module: nn.Module, kinds: set[type]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        at = without_wrappers(f"{path}.{name}" if path else name)
        if isinstance(module, CONTAINERS) and type(child) in kinds and _may_be_a_block(child):
            yield at, child
        else:
            yield from _topmost(at, child, kinds)


def _signature(module: nn.Module) -> tuple[Any, ...]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return (type(module), *((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors))


def _why_none(model: nn.Module) -> str:
    name = type(model).__name__
    children = [child for module in model.modules() if isinstance(module, CONTAINERS) for child in module.children()]
    of_torch = sorted({type(c).__name__ for c in children if _is_skipped(c) and any(True for _ in c.children())})
    if of_torch:
        return f"the blocks of this {name} are torch.nn's {', '.join(of_torch)}, which Dynamo skips where compiled in place"
    return f"this {name} has no two blocks alike in a ModuleList, Sequential or ModuleDict"


def _named(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    names = {name: module for module, name in module_names(model).items() if name}
    for pattern in patterns:
        matching = {name: names[name] for name in names if _matches(name, pattern)}
        if not matching:
            raise ValueError(
                f"compile_blocks: no module of this {type(model).__name__} is called {pattern!r}."
                f"{nearest(str(pattern), list(names), listed=False)}"
            )
        found |= matching
    for name, module in found.items():
        if _is_skipped(module):
            kind = type(module).__name__
            raise ValueError(f"compile_blocks: {name} is torch.nn's {kind}: Dynamo skips its forward; {WHOLE}")
        inside = next((other for other in found if other.startswith(f"{name}.")), None)
        if inside:
            raise ValueError(f"compile_blocks: {inside} lies in {name}, and both are named; name one of them")
    return found


def _matches(path: str, pattern: str) -> bool:
    """``*`` for one part of the path: "layers.*" is no module inside of a layer."""
    parts, wanted = path.split("."), str(pattern).split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


def _refuse_compiled(model: nn.Module, module: nn.Module) -> None:
    inside = [
        name or type(model).__name__ for m, name in module_names(module).items() if m._compiled_call_impl is not None
    ]
    if isinstance(module, private.OptimizedModule) or inside:
        raise ValueError(
            f"compile_blocks: {inside[0] if inside else type(module).__name__} is compiled already; give compile_blocks the "
            "model before that, or call set_recipe for another recipe"
        )


def _outside(model: nn.Module, blocks: Mapping[str, nn.Module]) -> tuple[str, ...]:
    inside = {id(m) for block in blocks.values() for m in block.modules()}
    rest = {name: m for m, name in module_names(model).items() if id(m) not in inside}
    return tuple(
        name or type(m).__name__ for name, m in rest.items() if any(True for _ in m.parameters(recurse=False))
    )


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(row.module for row in collapsed(LayerRow(path, ()) for path in paths))
