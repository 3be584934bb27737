"""What a tensor is and where it comes from: shape, dtype, bytes; the operation, the module, the user's source line.

Dynamo notes these on each node. A module path may begin in the middle of the model: where a graph breaks in a module, Dynamo
compiles what follows, or that module, by itself. The parameters that such a graph reads show where in the model it is
(``whole_path``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fp8compile import _torch as private
from fp8compile.fx.graph import dtype_text, nbytes, shape_text, storage_root

# What torch.compile, checkpoint_wrapper and FullyShardedDataParallel call the module that they wrap.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """The path of each module of a model, as graphs have it: without wrappers. A module used twice has its first path."""
    return {module: without_wrappers(name) for name, module in model.named_modules()}


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """By identity of a parameter, its names in a model, as graphs have them; a shared parameter has several.

    Of what FSDP2 shards, the whole parameter has the same names.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(without_wrappers(name))
    for sharded, whole in private.unsharded_parameters(model):
        one, other = names.get(id(sharded), []), names.get(id(whole), [])
        names[id(sharded)] = names[id(whole)] = one or other
    return names


def beginning(paths: Mapping[int, str], names: Mapping[int, Sequence[str]]) -> str | None:
    """Where a graph begins in a model: the one module path that stands before the graph's paths of all its parameters.

    Args:
        paths: the graph's path of each parameter, by identity.
        names: the model's names of each of its parameters, by identity. A parameter of another model says nothing.

    Returns:
        None where no such path exists, or several (parameters of two modules that are shared).
    """
    fits = [_before(path, names[key]) for key, path in paths.items() if key in names]
    common = set.intersection(*fits) if fits else set()
    return next(iter(common)) if len(common) == 1 else None


def _before(path: str, names: Sequence[str]) -> set[str]:
    return {name[: -len(path)].rstrip(".") for name in names if name == path or name.endswith(f".{path}")}


def whole_path(path: str, modules: Set[str], parameters: Iterable[str]) -> str:
    """``path`` as one of ``modules``: as it is, or after the prefix that the names of all the parameters share."""
    if path and path in modules:
        return path
    begin = _common(parameters)
    return next((whole for whole in _joined(begin, path) if whole in modules), path)


def _common(parameters: Iterable[str]) -> list[str]:
    """The module path that all names begin with, in parts."""
    owners = [name.split(".")[:-1] for name in parameters]
    begin: list[str] = []
    for parts in zip(*owners, strict=False):
        if len(set(parts)) > 1:
            break
        begin.append(parts[0])
    return begin


def _joined(begin: list[str], path: str) -> Iterable[str]:
    """``path`` after each beginning, the longest first."""
    for length in range(len(begin), 0, -1):
        yield ".".join([*begin[:length], *([path] if path else [])])


def origin(node: Node) -> Origin:
    """The aten op, module path and user source line behind a value; for a view, those of the storage it uses."""
    root = storage_root(node)
    if root.op != "placeholder":
        node = root
    return Origin(op_name(node), module_path(node), source_line(node))


def op_name(node: Node) -> str:
    """The aten op behind a node, without its namespace: ``mm.default``; ``getitem``s name what they index."""
    if node.op == "placeholder":
        return "input"
    if node.target is private.getitem and isinstance(node.args[0], Node):
        return f"{op_name(node.args[0])}[{node.args[1]}]"
    return str(node.target).removeprefix("aten.").removeprefix("prims.")


def module_path(node: Node) -> str:
    """``layers.0.mlp.up_proj``, or "" at the top of the model; for a backward node, the module it is the backward of."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return _normalised(path if isinstance(path, str) else "")


def _normalised(path: str) -> str:
    """Dynamo's ``L['self']._modules['layers']._modules['0'].mlp`` as ``layers.0.mlp``."""
    path = re.sub(r"^L\['args'\]\[\d+\]", "L['self']", path)  # where a replaced forward takes the model
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    path = re.sub(r"\[['\"]([^'\"]*)['\"]\]", r".\1", path)
    path = re.sub(r"^[LG]\.\w+\.?", "", path)  # the local or global variable that holds the model
    return without_wrappers(path.replace("__dict__._modules.", ""))  # how Dynamo reads through a __getattr__


def without_wrappers(path: str) -> str:
    """A module path without the names that PyTorch's wrappers give to what they wrap."""
    return ".".join(part for part in path.split(".") if part not in WRAPPED)


def parameter_path(placeholder: Node) -> str:
    """``layers.0.mlp.weight`` for an input of a Dynamo graph, or the name of the input where Dynamo gives no more."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    return _normalised(re.sub(r"\._parameters\['([^']*)'\]", r".\1", name)) if name else placeholder.name


def parameters_of(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[tuple[int, str], ...]:
    """The parameters among the inputs of a Dynamo graph: position, and the path that the graph gives it."""
    inputs = enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False))
    return tuple((at, parameter_path(node)) for at, (node, value) in inputs if isinstance(value, nn.Parameter))


def source_line(node: Node) -> str:
    """``model.py:42 in forward: y = self.up(x)``, the innermost line of the user's stack."""
    return _innermost(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)
def _innermost(trace: str) -> str:
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip()]
    for index in range(len(lines) - 1, -1, -1):
        found = re.match(r'File "(.*)", line (\d+), in (.*)', lines[index])
        if found:
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{found[1].replace(chr(92), '/').rsplit('/', 1)[-1]}:{found[2]} in {found[3]}: {code}".rstrip(
                ": "
            )
    return ""


@dataclass(frozen=True)
class Origin:
    """Where a value comes from: the aten op that made it, the module it ran in, the user's source line."""

    op: str
    module: str
    source: str


@dataclass(frozen=True)
class TensorInfo:
    """The facts of a tensor that are given wherever it is named, at the shapes of the compilation.

    Attributes:
        name: the name of the node in its graph.
        origin: where it comes from.
        shape: numbers; a symbolic size as text.
        dtype: as short text, "bf16".
        nbytes: bytes.
    """

    name: str
    origin: Origin
    shape: tuple[int | str, ...]
    dtype: str
    nbytes: int

    @classmethod
    def without_tensor(cls, name: str, origin: Origin, dtype: str = "-", nbytes: int = 0) -> TensorInfo:
        """For an entry that is not about one tensor: several tensors together, or a request that matches none."""
        return cls(name, origin, (), dtype, nbytes)

    @classmethod
    def of(cls, node: Node) -> TensorInfo:
        """The facts of a node whose value is a tensor, or of the first of several."""
        value = next(v for v in private.tree_leaves(node.meta["val"]) if isinstance(v, Tensor))
        shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
        return cls(node.name, origin(node), shape, dtype_text(value), nbytes(value))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorInfo:
        """The inverse of ``dataclasses.asdict``, also after a trip through JSON."""
        return cls(**{**data, "origin": Origin(**data["origin"]), "shape": tuple(data["shape"])})

    def __str__(self) -> str:
        return f"{self.dtype}{shape_text(self.shape)}"
